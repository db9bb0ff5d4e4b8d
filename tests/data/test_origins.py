"""Where documents with ids of their own were read: their shards say it."""

from __future__ import annotations

import gzip
import json
import random

import pytest

from drover.pipeline.config.loading import load_config
from drover.pipeline.contract.run import Run
from drover.pipeline.data import sources
from drover.pipeline.data.text_shards import SPLITS, read_documents
from drover.tools.where.origin import Corpus
from tests.data.source_files import lines
from tests.stages.test_shard import files_source, run, write_config

WORDS = ["river", "bank", "stone", "grass", "cloud", "bird", "light", "rain"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A config over files in lines, one large enough to be read in parts, one packed; and a table without ids."""
    folder, draw = tmp_path_factory.mktemp("origins"), random.Random(3)
    (folder / "in").mkdir()
    for name, count, words in (("large.jsonl", 400, 300), ("odd:7.jsonl", 20, 50), ("packed.jsonl.gz", 20, 50)):
        data = lines({"id": f"{name}-{number}", "text": f"{name} {number} " + " ".join(
            draw.choices(WORDS, k=draw.randrange(5, words)))} for number in range(count))
        (folder / "in" / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    (folder / "in/plain.txt").write_text("\n\n".join(f"plain {number}" for number in range(20)))
    return write_config(folder, [files_source("web", folder / "in/*.jsonl*", id_field="id"),
                                 files_source("plain", folder / "in/*.txt", separator="\n\n")],
                        shard_mb=0.1, heldout_share=0.2)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(sources, "LEAST_PART", 100_000)



@pytest.mark.parametrize("rule", ["hash", "tail"])
def test_file_and_record_of_every_document(corpus, rule):
    asked = [f"name={rule}", f"shard.heldout_rule={rule}"]
    assert run(corpus, *asked) == 0
    found = Corpus(Run(load_config(corpus, asked)))
    data = {path.name: path.read_bytes() for path in (corpus.parent / "in").glob("*.jsonl*")}
    data["packed.jsonl.gz"] = gzip.decompress(data["packed.jsonl.gz"])
    seen, cut, parts = set(), 0, 0
    for document in (document for shard, record in found.shards.items() if record["split"] in SPLITS
                     for document in read_documents(found.folder / shard)):
        origin = found.placed(document.source, document.place or document.id)
        assert origin["path"] == str(corpus.parent / "in" / origin["file"])
        if document.source == "plain":
            assert document.text in f"plain {origin['record'] - 1}" and origin["file"] == "plain.txt"
            continue
        seen.add(origin["file"])
        parts += isinstance(origin["record"], str)
        content = data[origin["file"]]
        line = content.splitlines()[origin["record"] - 1] if isinstance(origin["record"], int) else \
            content[int(origin["record"]):].partition(b"\n")[0]
        record = json.loads(line)
        first, _, end = (characters := origin["origin"].partition(", characters ")[2]).partition("..")
        cut += bool(characters)
        assert document.id.startswith(record["id"])
        assert document.text == record["text"][int(first or 0):int(end) if end else None]
    assert parts, "a file was read in parts"
    assert seen == set(data) and cut == (2 if rule == "tail" else 0)
