"""Which files a source has, what they are called and in which order they are read."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from pipeline.config.data import FilesSource, ShardConfig, StdlibSource
from pipeline.data.reading import unit_documents
from pipeline.data.sources import input_files, reading_units
from pipeline.errors import UserError
from tests.data.source_files import RECORDS, config_of, files_source, read, texts, write_jsonl


def test_documents_come_by_file_name_then_record_whatever_the_units(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "sub/a.jsonl", "a0.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_jsonl(tmp_path / name, [{"text": f"{name} {record}"} for record in range(3)])
    source = files_source(tmp_path / "**" / "*.jsonl")
    expected = [f"{name}:{record}" for name in sorted(["b.jsonl", "a.jsonl", "sub/a.jsonl", "a0.jsonl"])
                for record in (1, 2, 3)]
    for megabytes in (1e-5, 1e-4, 1.0):
        assert [document.id for document in read(source, shard_mb=megabytes)[0]] == expected
    assert [name for name, _ in input_files(config_of(source))] == [
        "s/a.jsonl", "s/a0.jsonl", "s/b.jsonl", "s/sub/a.jsonl"]
    assert len(reading_units(ShardConfig(sources=[source], shard_mb=1e-5), input_files(config_of(source)))) == 4


def test_names_do_not_depend_on_where_the_files_lie(tmp_path):
    for place in ("here", "there/and/deeper"):
        (tmp_path / place / "x").mkdir(parents=True)
        (tmp_path / place / "x" / "one.txt").write_text("1")
        (tmp_path / place / "two.txt").write_text("2")
    named = [[name for name, _ in input_files(config_of(files_source(tmp_path / place / "**" / "*.txt")))]
             for place in ("here", "there/and/deeper")]
    assert named == [["s/two.txt", "s/x/one.txt"]] * 2


def test_a_file_is_read_once_however_its_path_is_written(tmp_path, monkeypatch):
    for folder in ("run", "data/a"):
        (tmp_path / folder).mkdir(parents=True)
    write_jsonl(tmp_path / "data" / "a" / "f.jsonl", RECORDS)
    (tmp_path / "run" / "link").symlink_to(tmp_path / "data" / "a")
    monkeypatch.chdir(tmp_path / "run")
    source = files_source("../data/a/*.jsonl", tmp_path / "data" / "a" / "*.jsonl", "link/../a/f.jsonl",
                          f"file://{tmp_path}/run/../data/a/f.jsonl")
    assert input_files(config_of(source)) == [("s/f.jsonl", tmp_path / "data" / "a" / "f.jsonl")]
    through = files_source("link/f.jsonl")
    assert input_files(config_of(through)) == [("s/f.jsonl", tmp_path / "run" / "link" / "f.jsonl")]


def test_stdlib_is_this_pythons_own_sources_without_tests_and_packages():
    names = [name for name, _ in input_files(config_of(StdlibSource(kind="stdlib")))]
    assert {"stdlib/os.py", "stdlib/json/decoder.py", "stdlib/asyncio/tasks.py"} < set(names)
    parts = {part for name in names for part in Path(name).parts}
    assert not parts & {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
    documents, rejections = read(StdlibSource(kind="stdlib"))
    assert len(documents) == len(names) and rejections == []
    ids = {document.id: document.text for document in documents}
    assert ids["json/decoder.py"] == (Path(sysconfig.get_path("stdlib")) / "json" / "decoder.py").read_text("utf-8")


def test_stdlib_sources_are_read_in_the_encoding_they_declare(tmp_path, monkeypatch):
    (tmp_path / "latin.py").write_bytes("# coding: latin-1\nname = 'Grüße'\n".encode("latin-1"))
    (tmp_path / "wrong.py").write_bytes(b"name = '\xff'\n")
    (tmp_path / "unknown.py").write_bytes(b"# coding: klingon\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_it.py").write_text("assert True\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    documents, rejections = read(StdlibSource(kind="stdlib"))
    assert texts(documents) == ["# coding: latin-1\nname = 'Grüße'\n"]
    assert [rejection.file for rejection in rejections] == ["unknown.py", "wrong.py"]
    assert len(read(StdlibSource(kind="stdlib", include_tests=True))[0]) == 2


def test_problems_with_paths_are_told_all_at_once(tmp_path):
    (tmp_path / "notes.md").write_text("x")
    first = FilesSource(kind="files", name="first", paths=[str(tmp_path / "*.txt"), str(tmp_path / "gone.jsonl")])
    second = FilesSource(kind="files", name="second", paths=[str(tmp_path / "*.md")])
    with pytest.raises(UserError) as caught:
        input_files(config_of(first, second))
    message = str(caught.value)
    assert "no file matches" in message and "*.txt" in message
    assert f"{tmp_path / 'gone.jsonl'} does not exist" in message
    assert "second" in message and "notes.md" in message and ".parquet" in message
    assert read(second.model_copy(update={"format": "txt"}))[0][0].text == "x"


def test_a_file_that_vanishes_is_not_taken_for_a_broken_one(tmp_path):
    (tmp_path / "f.jsonl").write_text('{"text": "a"}')
    source = files_source(tmp_path / "f.jsonl")
    [(_, payload)] = reading_units(ShardConfig(sources=[source]), input_files(config_of(source)))
    (tmp_path / "f.jsonl").unlink()
    with pytest.raises(UserError, match=r"f\.jsonl cannot be read: No such file"):
        list(unit_documents(payload))


def test_the_launcher_reads_the_list_of_files_without_heavy_libraries():
    code = ("import sys, pipeline.data.sources; "
            "print([name for name in ('torch', 'pyarrow', 'datasets', 'webdataset') if name in sys.modules])")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                            cwd=Path(__file__).resolve().parents[2])
    assert result.stdout.strip() == "[]"
