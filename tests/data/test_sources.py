"""Which files a source has, what they are called and in which order they are read."""

import json
import re
import shutil
import sysconfig

import pytest

from drover.pipeline.config.data import HubSource, StdlibSource
from drover.pipeline.contract.inputs import listed_files
from drover.pipeline.core.errors import UserError
from drover.pipeline.data.reading import unit_documents
from drover.pipeline.data.sources import input_files, reading_units
from drover.pipeline.storage.object_files import find
from tests.data.source_files import (
    COMPRESS,
    RECORDS,
    config_of,
    files_source,
    lost,
    payload_of,
    read,
    texts,
    write_jsonl,
)
from tests.refusal import refused, table


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
    refused(UserError, re.escape(f"no file matches data/web (looked for {tmp_path}/data/web). Correct `paths`. Of a "
                                 f"folder"), read, "data/web")


def test_a_file_that_vanishes_is_not_taken_for_a_broken_one(tmp_path):
    (tmp_path / "f.jsonl").write_text('{"text": "a"}')
    payload, config = payload_of(tmp_path / "f.jsonl"), config_of(files_source(tmp_path / "f.jsonl"))
    files = input_files(config)
    (tmp_path / "f.jsonl").unlink()
    refused(UserError, r"f\.jsonl cannot be read: No such file", list, unit_documents(payload))
    refused(UserError, r"f\.jsonl cannot be read: No such file", listed_files, files)

def hub_source(folder, **fields):
    return HubSource(kind="hf", name="h", dataset=str(folder), **fields)


@pytest.fixture(scope="module")
def dataset_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dataset")
    for part in range(2):
        write_jsonl(folder / f"part-{part}.jsonl", [{"text": f"text {part} {row}", "stars": row} for row in range(20)])
    return folder


def test_a_local_hugging_face_dataset(dataset_folder):
    source = hub_source(dataset_folder, meta_fields=["stars"], limit=30)
    documents, rejections = read(source)
    assert texts(documents) == [f"text {part} {row}" for part in range(2) for row in range(20)][:30]
    assert lost(rejections) == [] and documents[29].id == "train:30" and documents[29].meta == {"stars": 9}
    assert names(source) == ["h/part-0.jsonl", "h/part-1.jsonl"]


@pytest.mark.parametrize(("files", "fields", "unread"), table("""
    part-train-0.jsonl part-test-0.jsonl eval_notes.jsonl -> {} -> eval_notes.jsonl, part-test-0.jsonl
    a.jsonl b.jsonl c.csv -> {"split": "train"} -> c.csv
    train/a.jsonl dev/x.jsonl LICENSE README.md .git/config -> {} -> dev/x.jsonl
    a.jsonl notes.doc -> {} -> notes.doc
    a.jsonl link/b.jsonl -> {"split": "train"} -> link/b.jsonl""", str.split, json.loads))
def test_files_that_the_library_leaves_out_stop_the_stage(tmp_path, files, fields, unread):
    for name in files:
        write_jsonl((tmp_path / "elsewhere" if "link" in name else tmp_path / "d") / name, [{"text": name}])
    if "link" in unread:
        (tmp_path / "d/link").symlink_to(tmp_path / "elsewhere/link")
    refused(UserError, re.escape(f"({unread}): it takes splits"), names, hub_source(tmp_path / "d", **fields))


def test_other_splits_and_configurations_may_be_left_out_by_name(tmp_path, monkeypatch):
    for name in ("one/train.jsonl", "one/test.jsonl", "two.jsonl"):
        write_jsonl(tmp_path / name, [{"text": name}])
    refused(UserError, "1 of the 3 files.*two.jsonl", names, hub_source(tmp_path, split="train"))
    (tmp_path / "two.jsonl").rename(tmp_path / "one/train-2.jsonl")
    refused(UserError, r"\(one/test.jsonl\).*or leave the other splits out with `split: train`", names,
            hub_source(tmp_path))
    assert names(hub_source(tmp_path, split="train")) == ["h/train-2.jsonl", "h/train.jsonl"]
    (tmp_path / "one/train-2.jsonl").rename(tmp_path / "two.jsonl")
    (tmp_path / "README.md").write_text("---\nconfigs:\n- {config_name: a, data_files: [{split: train, path: one/*}]}\n"
                                        "- {config_name: b, data_files: two.jsonl}\n---\n")
    assert names(hub_source(tmp_path, config_name="b")) == ["h/README.md", "h/two.jsonl"]
    assert texts(read(hub_source(tmp_path, config_name="b"))[0]) == ["two.jsonl"]
    refused(UserError, "(?s)Config name is missing.*kind: files", names, hub_source(tmp_path))


@pytest.mark.parametrize("name", ["p.txt", "sub/p.txt.gz"])
def test_text_files_and_saved_datasets_are_not_read_by_the_library(tmp_path, name):
    import datasets
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(COMPRESS[".gz" * name.endswith("gz")](b"a\n\nb"))
    refused(UserError, r"each line a document.*kind: files", names, hub_source(tmp_path))
    for saved in (data := datasets.Dataset.from_dict({"text": ["a"]})), datasets.DatasetDict({"train": data}):
        saved.save_to_disk(tmp_path / "saved")
        message = refused(UserError, "written by save_to_disk", names, hub_source(tmp_path / "saved"))
        assert texts(read(re.search(r"\[(.*)\]", message)[1])[0]) == ["a"]
        shutil.rmtree(tmp_path / "saved")


def test_a_hugging_face_dataset_that_cannot_be_loaded_says_so(dataset_folder, tmp_path):
    refused(UserError, r"no column 'body'.*text, stars", read, hub_source(dataset_folder, text_field="body"))
    refused(UserError, r"(?s)split='nosplit'.*failed", read, hub_source(dataset_folder, split="nosplit"))
    (tmp_path / "f.jsonl").write_text('{"text": "a"}\n{"text": \n')
    refused(UserError, r"JSON parse error.*kind: files", read, hub_source(tmp_path))


def test_a_local_dataset_that_is_not_there_is_refused_first(tmp_path):
    (tmp_path / "f.jsonl").write_text("{}")
    for name in (tmp_path / "gone", tmp_path / "f.jsonl"):
        refused(UserError, r"is no folder.*kind: files", names, hub_source(name))
    (tmp_path / "bare/.hidden").mkdir(parents=True)
    (tmp_path / "bare/.hidden/f.jsonl").write_text("{}")
    refused(UserError, "holds no files", names, hub_source(tmp_path / "bare"))
    assert names(hub_source("someone/something")) == []
