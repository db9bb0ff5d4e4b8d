"""What is counted of a source: files, bytes and documents add up, and what was not read is named; cards stay small."""

import gzip
import json

import pytest

from drover.pipeline.contract.manifest import read_manifest
from drover.pipeline.core.files import read_lines
from drover.pipeline.data.counts import (
    MOST_LANGUAGES,
    MOST_REASONS,
    DataCard,
    files_read,
    remarks,
    source_card,
)
from drover.pipeline.data.documents import Document
from drover.pipeline.data.filters.base import Dropped
from drover.pipeline.data.reading import unit_documents
from drover.pipeline.reporting.facts import collect
from drover.pipeline.reporting.render import compose, markdown
from tests.data.source_files import batch, files_source, lines, payload_of, write_batches
from tests.reporting.made_up import write_run
from tests.stages.conftest import run  # noqa: F401 - a fixture
from tests.stages.test_shard import files_source as source_of
from tests.stages.test_shard import folder_of, write_config
from tests.stages.training import manifest_of

GOOD = lines({"text": f"text {number}"} for number in range(3000))
RECORD = json.dumps({"text": "t" * 100}).encode()


def about(path, *borders, **fields):
    """What became of a file that is read in these pieces."""
    payload, inputs = payload_of(path, *borders, **fields), []
    assert list(unit_documents(payload, inputs.append)) is not None
    [file] = files_read(inputs)
    return file


@pytest.mark.parametrize(("name", "content", "documents", "rejected"), [
    ("f.json", b"[" + b", ".join([RECORD] * 9) + b", {broken}" + b", " * 400 + RECORD, 9, 808 + len(RECORD)),
    ("f.jsonl", GOOD + RECORD.replace(b"t", b"\xff", 3) * 9 + b"\n" + GOOD, 6000, 9 * len(RECORD)),
    ("f.jsonl", "[1, 2]\n".encode("utf-16"), 0, 16), ("f.jsonl", b"x" * 3_000_000 + b"\n" + RECORD, 1, 3_000_000),
    ("f.csv", b'n,text\n1,a\n2,"never closed\n3,b\n', 1, 20),
    ("f.txt", b"\xff" * 50, 0, 50), ("f.txt", b"x" * 3_000_000, 0, 3_000_000)])
def test_bytes_that_are_no_documents_are_counted(tmp_path, name, content, documents, rejected):
    """Of packed files as well, as a share of their size."""
    (tmp_path / name).write_bytes(content)
    file = about(tmp_path / name, megabytes=1.0)
    assert (file.documents, file.lost_bytes, file.bytes) == (documents, rejected, len(content)) and file.reason
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content))
    packed = about(tmp_path / f"{name}.gz", megabytes=1.0)
    assert packed.documents == documents and packed.became == file.became
    assert packed.lost_bytes / packed.bytes == pytest.approx(rejected / len(content), abs=0.03)


@pytest.mark.parametrize("name", ["f.parquet", "f.arrow"])
def test_rows_count_as_their_share_of_the_file(tmp_path, name):
    write_batches(tmp_path / name, *[batch(("text", [f"{row} {'x' * 99}" for row in range(90)] + [None] * 10))] * 2,
                  batch(("text", ["y" * 2_000_000])))
    file = about(tmp_path / name, megabytes=1.0)
    assert (file.documents, file.rejected, file.became) == (180, 21, "partly")
    assert 0.9 < file.lost_bytes / file.bytes < 1
    assert about(tmp_path / name, text_field="body").lost_bytes == file.bytes


@pytest.mark.parametrize(("content", "named"), [
    ([{"text": "t", "x": {"y": [{}, {"text": "a"}]}}], "x.y"), ({"text": "t", "links": [{"url": "a"}]}, ""),
    ([{"text": "post", "comments": [{"text": "a"}]}] * 2, "")])
@pytest.mark.parametrize("name", ["f.json", "f.jsonl"])
def test_more_records_within_the_one_document_of_a_file_are_named(tmp_path, name, content, named):
    (tmp_path / name).write_text(json.dumps(content))
    warnings = [own for own in remarks(files_source(tmp_path), [about(tmp_path / name)]) if "one document" in own]
    assert len(warnings) == bool(named)
    assert all(f"the field {named} ({name}) holds more" in own for own in warnings)


def test_files_bytes_and_documents_add_up_and_a_file_that_was_not_read_is_named(tmp_path, run):  # noqa: F811
    folder = tmp_path / "in"
    folder.mkdir()
    for name, content in (("a.jsonl", GOOD), ("b.json", b'{"data": {"x": [[' + b"1, " * 9000 + b"1]]}}"),
                          ("c.jsonl", b""), ("d.json", b"[" + RECORD + b", {}" + b" " * 5000 + b"]"),
                          ("e.json", b'{"page": [' + RECORD + b"]}")):
        (folder / name).write_bytes(content)
    config = write_config(tmp_path, [source_of("s", folder / "*")], validation_share=0.2)
    size = sum(path.stat().st_size for path in folder.iterdir())
    error = run("shard", config, expect=2).err
    assert "bytes of the files cannot be read" in error and "s/b.json (0 documents read, 27 kB of 27 kB" in error
    printed = run("shard", config, "shard.max_rejected_share=0.5").out
    assert "rejected.jsonl names them), of 2 files: s/b.json (0 documents" in printed
    assert "source s: 1 file without a record (c.jsonl)" in printed
    counts = manifest_of(config, "shard", "a").counts
    assert counts["files"] == {"in": 5, "whole": 2, "partly": 1, "unread": 1, "empty": 1}
    rejected = list(read_lines(folder_of(config) / "rejected.jsonl"))
    assert counts["bytes"] == {"in": size, "rejected": sum(own["lost_bytes"] for own in rejected)}
    assert [own["file"] for own in counts["incomplete_files"]] == ["b.json", "d.json"]
    assert len(counts["remarks"]["s"]) == 1


def report(tmp_path, counts):
    """The report of a run whose stage shard counted this, as Markdown."""
    made_up, _ = write_run(tmp_path / "report")
    manifest = read_manifest(made_up.own_folder("shard"))
    manifest.counts = counts
    manifest.write(made_up.own_folder("shard"))
    return markdown(compose(collect(made_up)))


def test_a_separator_that_does_not_occur_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("a||b")
    (tmp_path / "b.txt").write_text("a|b")
    (tmp_path / "c.txt").write_text("a||")
    files = [about(path, separator="||") for path in sorted(tmp_path.iterdir())]
    for some, line in ((files, 'source s: the separator "||" does not occur in 1 of 3 files'),
                       (files[1:2], 'warning: source s: the separator "||" does not occur in 1 of 1 files')):
        assert list(remarks(files_source(tmp_path, separator="||"), some)) == [line]


def record_of(events, examples):
    """The record of a card; events: (what became of a document, its text). It was dropped for a filter and reason, or
    kept, changed or not."""
    card = DataCard(examples)
    for number, (what, text) in events:
        own = Document(text, "web", f"a.jsonl:{number}", {})
        if isinstance(what, bool):
            card.add(own, changed=what)
        else:
            card.drop(Dropped(own, *what))
    return json.loads(json.dumps(card.record()))


def test_cards_stay_small():
    many = {"card": record_of([(0, (("own", f"reason {number}"), "x")) for number in range(3 * MOST_REASONS)], 5),
            "findings": {}}
    other = {"card": record_of([(0, (("own", "another"), "x"))], 2), "findings": {
        "lid": {"languages": {f"l{number:03}": number + 1 for number in range(100)}}}}
    assert len(many["card"]["examples"]["own"]) == MOST_REASONS
    card = source_card([many, other], 5)
    assert len(card["examples"]["own"]) == MOST_REASONS and card["documents"] == 0
    lid = card["languages"]["lid"]
    assert len(lid) == MOST_LANGUAGES + 1 and lid["l099"] == 100 and sum(lid.values()) == 5050
