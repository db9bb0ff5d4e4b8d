"""Which files a source has, what they are called and in which order they are read."""

import re
import sysconfig

import pytest

from drover.pipeline.config.data import HubSource, StdlibSource
from drover.pipeline.contract.inputs import listed_files
from drover.pipeline.core.errors import UserError
from drover.pipeline.data.reading import unit_documents
from drover.pipeline.data.sources import input_files, reading_units
from drover.pipeline.storage.object_files import find
from tests.data.source_files import (
    RECORDS,
    config_of,
    files_source,
    payload_of,
    read,
    separated,
    texts,
    write_jsonl,
)
from tests.refusal import refused


def names(*sources):
    return [name for name, _ in input_files(config_of(*sources))]


def test_documents_come_by_file_name_then_record_whatever_the_units(tmp_path):
    ordered = ["a.jsonl", "a0.jsonl", "b.jsonl", "sub/a.jsonl"]
    for name in reversed(ordered):
        write_jsonl(tmp_path / name, [{"text": f"{name} {record}"} for record in range(3)])
    source = files_source(tmp_path / "**" / "*.jsonl")
    for megabytes, units in ((1e-5, 4), (1.0, 1)):
        config = config_of(source, shard_mb=megabytes)
        assert len(reading_units(config.shard, listed_files(input_files(config)))) == units
        assert [document.id for document in read(source, shard_mb=megabytes)[0]] == [
            f"{name}:{record}" for name in ordered for record in (1, 2, 3)]


def test_a_file_is_read_once_however_its_path_is_written(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    write_jsonl(tmp_path / "data" / "a" / "f.jsonl", RECORDS)
    (tmp_path / "run" / "link").symlink_to(tmp_path / "data" / "a")
    monkeypatch.chdir(tmp_path / "run")
    source = files_source("../data/a/*.jsonl", tmp_path / "data" / "a" / "*.jsonl", "./../data/a/f.jsonl",
                          "link/../a/f.jsonl")  # `..` of where the link leads
    assert input_files(config_of(source)) == [("s/f.jsonl", tmp_path / "data" / "a" / "f.jsonl")]
    through = files_source("link/f.jsonl")
    assert input_files(config_of(through)) == [("s/f.jsonl", tmp_path / "run" / "link" / "f.jsonl")]


def test_files_folders_and_links_are_excluded(tmp_path):
    for name in ("a.jsonl", "b.jsonl", "old/c.jsonl", "new/d.jsonl", "new/e.jsonl"):
        write_jsonl(tmp_path / name, RECORDS)
    (tmp_path / "gone.jsonl").symlink_to("nowhere")
    source = files_source(tmp_path / "**/*.jsonl", tmp_path / "b.jsonl", exclude=[
        f"{tmp_path}/old/*", f"{tmp_path}/new/../b.jsonl", f"{tmp_path}/gone.jsonl", f"{tmp_path}/new/x*"])
    assert names(source) == ["s/a.jsonl", "s/new/d.jsonl", "s/new/e.jsonl"]


@pytest.mark.parametrize(("links", "pattern", "wanted"), [
    ({"alias": "real", "real/loop": ".."}, "**/*.txt", ["real/sub/a.txt"]),
    ({"all": "/", "up": "../.."}, "**/*.txt", ["real/sub/a.txt"]),
    ({"b": "elsewhere", "a": "elsewhere"}, "**", ["a/b.txt", "real/sub/a.txt"]),
    ({"itself": "itself"}, "*/sub/*", ["real/sub/a.txt"])])
def test_links_lead_to_a_folder_once(tmp_path, links, pattern, wanted):
    for folder, name in ((tmp_path / "d/real/sub", "a.txt"), (tmp_path / "elsewhere", "b.txt")):
        folder.mkdir(parents=True)
        (folder / name).write_text("x")
    for link, target in links.items():
        (tmp_path / "d" / link).symlink_to(tmp_path / target if target == "elsewhere" else target)
    assert [path for _, path in input_files(config_of(files_source(tmp_path / "d" / pattern)))] == \
        [tmp_path / "d" / name for name in wanted]
    assert [file.url for file in find(f"file://{tmp_path}/d/{pattern}")] == \
        [f"file://{tmp_path}/d/{name}" for name in wanted]


def test_stdlib_sources_are_read_in_the_encoding_they_declare(tmp_path, monkeypatch):
    for name, data in (("latin.py", "# coding: latin-1\nname = 'Grüße'\n".encode("latin-1")),
                       ("wrong.py", b"name = '\xff'\n"), ("unknown.py", b"# coding: klingon\n"),
                       ("test/test_it.py", b"assert True\n"), ("long.py", b"#" * 1_000_001),
                       ("site-packages/own.py", b""), ("dist-packages/own.py", b""), ("__pycache__/own.py", b"")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    documents, rejections = read(StdlibSource(kind="stdlib"), max_document_mb=1.0)
    assert texts(documents) == ["# coding: latin-1\nname = 'Grüße'\n"]
    assert [rejection.file for rejection in rejections] == ["long.py", "unknown.py", "wrong.py"]


def test_problems_with_paths_are_told_all_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("notes.dat", "old.doc", "new.docx"):
        (tmp_path / name).write_text("x")
    second = files_source(tmp_path / "*.d*").model_copy(update={"name": "second"})
    first = files_source(tmp_path / "*.txt", tmp_path / "gone.jsonl")
    message = refused(UserError, "no file matches", names, first, second)
    for problem in ("*.txt", f"no file matches {tmp_path / 'gone.jsonl'} (looked for ", "second", "notes.dat",
                    ".parquet", "Convert them to text, as by `pandoc new.docx --to plain"):
        assert problem in message
    assert read(second.model_copy(update={"format": "txt"}))[0][0].text == "x"
    for link in ("b.doc", "c.doc"):
        (tmp_path / link).symlink_to("c.doc")
    refused(UserError, r"2 links that match .*\(b.doc, c.doc\)", names, second)
    (tmp_path / "data/web").mkdir(parents=True)
    refused(UserError, re.escape("data/web/ is a folder. Name the files in it (`drover init data/web/` shows how), as "
                                 "in data/web/**/*.ENDING."), read,
            "data/web/")


def test_a_file_that_vanishes_is_not_taken_for_a_broken_one(tmp_path):
    (tmp_path / "f.jsonl").write_text('{"text": "a"}')
    payload, config = payload_of(tmp_path / "f.jsonl"), config_of(files_source(tmp_path / "f.jsonl"))
    files = input_files(config)
    (tmp_path / "f.jsonl").unlink()
    refused(UserError, r"f\.jsonl cannot be read: No such file", list, unit_documents(payload))
    refused(UserError, r"f\.jsonl cannot be read: No such file", listed_files, files)


@pytest.fixture
def hub_source(tmp_path):
    """Function: a source of the kind hf. The library reads a folder as it reads the Hub."""
    return lambda **fields: HubSource(kind="hf", name="h", dataset=str(tmp_path), **fields)


def hub_documents(source):
    return separated(unit_documents({"source": source.model_dump(), "max_document_mb": 1.0, "pieces": []}))


def test_a_dataset_of_the_hub_is_read_or_it_is_told_why_not(tmp_path, hub_source):
    for part in range(2):
        write_jsonl(tmp_path / f"part-{part}.jsonl", [{"text": f"{part} {row}", "stars": row} for row in range(20)])
    documents, rejections = hub_documents(hub_source(meta_fields=["stars"], limit=30))
    assert texts(documents) == [f"{part} {row}" for part in range(2) for row in range(20)][:30] and not rejections
    assert (documents[29].id, documents[29].meta) == ("train:30", {"stars": 9})
    refused(UserError, r"no column 'body'.*text, stars", hub_documents, hub_source(text_field="body"))
    refused(UserError, r"(?s)split='nosplit'.*failed", hub_documents, hub_source(split="nosplit"))
    (tmp_path / "part-1.jsonl").write_text('{"text": "a"}\n{"text": \n')
    refused(UserError, r"JSON parse error.*kind: files", hub_documents, hub_source())
    for path in tmp_path.iterdir():
        path.rename(path.with_suffix(".txt"))
    refused(UserError, r"each line a document.*kind: files", hub_documents, hub_source())


def test_files_of_this_machine_are_not_read_as_of_the_hub(tmp_path, hub_source):
    refused(UserError, rf"is a path of this machine. Read its files with `kind: files`, as paths: \[{tmp_path}", names,
            hub_source())
    assert names(HubSource(kind="hf", name="h", dataset="someone/something")) == []
