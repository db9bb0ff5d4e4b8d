"""Files that are not what their name says are named for what they are; file names may be any bytes."""

import bz2
import gzip
import json
import lzma
import os
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from pipeline.config.data import FilesSource, ShardConfig
from pipeline.config.tree import Config
from pipeline.data.documents import Rejection
from pipeline.data.file_kinds import mistaken
from pipeline.data.reading import unit_documents
from pipeline.data.sources import input_files, reading_units
from pipeline.errors import UserError
from pipeline.files import read_json, sha256_json, write_json

LINES = b'{"text": "one"}\n{"text": "two"}\n'
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def read(*paths, **fields):
    """(documents, rejections) of a source of these files."""
    source = FilesSource(kind="files", name="s", paths=[str(path) for path in paths], **fields)
    config = Config(shard=ShardConfig(sources=[source]))
    items = [item for _, payload in reading_units(config.shard, input_files(config))
             for item in unit_documents(payload)]
    return ([item[0] for item in items if not isinstance(item, Rejection)],
            [item for item in items if isinstance(item, Rejection)])


def parquet():
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": ["one", "two"]}), sink)
    return sink.getvalue().to_pybytes()


def zipped():
    import io
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a.jsonl", LINES)
    return buffer.getvalue()


@pytest.mark.parametrize(("name", "data", "said"), [
    ("a.jsonl", POINTER, "it is a Git LFS pointer; run `git lfs pull`"),
    ("a.parquet", POINTER, "it is a Git LFS pointer"), ("a.txt", POINTER, "it is a Git LFS pointer"),
    ("a.jsonl.gz", POINTER, "its name ends in .gz, but it is a Git LFS pointer"),
    ("a.jsonl", gzip.compress(LINES, mtime=0), "it is a gzip file; add .gz to its name"),
    ("a.txt", zstandard.compress(LINES), "it is a zstd file; add .zst"),
    ("a.jsonl", zipped(), "it is a zip file; unpack it"), ("a.csv", lzma.compress(LINES), "it is an xz file; unpack"),
    ("a.txt", bz2.compress(LINES), "it is a bzip2 file; unpack"),
    ("a.jsonl", parquet(), "it is a Parquet file; name it .parquet, or set the source's `format: parquet`"),
    ("a.json.gz", gzip.compress(parquet(), mtime=0), "it is a Parquet file"),
    ("a.jsonl.gz", gzip.compress(gzip.compress(LINES, mtime=0), mtime=0), "it is a gzip file"),
    ("a.jsonl.gz", zstandard.compress(LINES), "its name ends in .gz, but it is a zstd file"),
    ("a.jsonl.gz", LINES, "its name ends in .gz, but it is no gzip data; rename it"),
    ("a.arrow", parquet(), "it is a Parquet file"),
    ("a.txt", "words ü".encode("utf-16"), "it is UTF-16 text with a byte-order mark; convert it to UTF-8 (iconv "),
    ("a.csv", b"\xfe\xff" + "text\nü".encode("utf-16-be"), "it is UTF-16 text with a byte-order mark"),
    ("a.txt", "words and words ".encode("utf-16-le"), "UTF-16 text without a byte-order mark; convert it to UTF-8 "
                                                      "(iconv -f utf-16le -t utf-8)"),
    ("a.txt", "words and words ".encode("utf-16-be"), "iconv -f utf-16be"), ("a.txt", "w".encode("utf-32"), "UTF-32"),
    ("a.txt", b"\x01\x02\0\xff" * 9, "binary data, not text"), ("a.jsonl", bytes(100), "binary data, not text"),
    ("a.txt", b"%PDF-1.7\n%\xe2\xe3", "it is a PDF file"),
    ("a.jsonl", b"\n<!DOCTYPE html><html>", "it is an HTML page, as a server sends")])
def test_a_file_is_named_for_what_it_is(tmp_path, name, data, said):
    (tmp_path / name).write_bytes(data)
    documents, (rejection,) = read(tmp_path / name)
    assert documents == [] and rejection.lost and rejection.record is None
    assert said in rejection.reason and "latin1" not in rejection.reason, rejection.reason


@pytest.mark.parametrize(("name", "data", "texts"), [
    ("a.txt", b"a\0b", ["a\0b"]), ("a.txt", b"<html>", ["<html>"]), ("a.txt", b"BZh is a word", ["BZh is a word"]),
    ("a.txt", ("x" * 4095 + "ü\0").encode(), ["x" * 4095 + "ü\0"]), ("a.txt", b"", [""]), ("a.txt.gz", b"", None),
    ("a.jsonl", b"\xef\xbb\xbf" + LINES, ["one", "two"]), ("a.JSONL.GZ", gzip.compress(LINES, mtime=0), ["one", "two"]),
    ("a.parquet.zst", zstandard.compress(parquet()), ["one", "two"])])
def test_what_is_right_is_read(tmp_path, name, data, texts):
    (tmp_path / name).write_bytes(data)
    assert mistaken(tmp_path / name, "txt" if ".txt" in name else name.split(".")[1].lower()) is None
    if texts is not None:
        assert [document.text for document in read(tmp_path / name)[0]] == texts


def test_a_document_that_is_binary_further_on_is_not_taken_for_latin_1(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"x" * 5000 + b"\n\n\0\xff\0" + b"\n\ncaf\xe9")
    _, rejections = read(tmp_path / "a.txt", separator="\n\n")
    assert ["binary" in rejection.reason for rejection in rejections] == [True, False]
    assert "iconv -f latin1" in rejections[1].reason


ODD = b"caf\xe9 \xff.%s"


def test_zstd_may_begin_with_a_frame_without_data(tmp_path):
    """As pzstd writes one before each frame."""
    before = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + bytes(4)
    (tmp_path / "a.jsonl.zst").write_bytes((before + zstandard.compress(LINES)) * 2)
    documents, rejections = read(tmp_path / "a.jsonl.zst")
    assert rejections == [] and len(documents) == 2 * LINES.count(b"\n")


@pytest.mark.parametrize(("ending", "data"), [
    (b"txt", b"one"), (b"jsonl", b'{"text": "one"}\n{]\n'), (b"csv.gz", gzip.compress(b"text\none\n", mtime=0)),
    (b"parquet", parquet()), (b"parquet.zst", zstandard.compress(parquet())), (b"json", b"[1]")])
def test_a_name_that_is_not_utf_8(tmp_path, ending, data):
    path = os.fsencode(tmp_path) + b"/" + ODD % ending
    with open(path, "wb") as file:
        file.write(data)
    name = "caf\\xe9 \\xff." + ending.decode()
    documents, rejections = read(tmp_path / "*")
    assert all(document.id.startswith(name) and document.text for document in documents)
    assert all(rejection.file == name for rejection in rejections) and documents + rejections
    source = FilesSource(kind="files", name="s", paths=[f"{tmp_path}/*"])
    config = Config(shard=ShardConfig(sources=[source]))
    files = input_files(config)
    assert [found for found, _ in files] == [f"s/{name}"]
    # What stage and manifest keep of it: names, and paths that must lead back to the file.
    units = reading_units(config.shard, files)
    write_json(tmp_path / "record", {"units": units, "path": str(files[0][1])})
    again = read_json(tmp_path / "record")
    assert os.fsencode(again["path"]) == path and sha256_json(again["units"]) == sha256_json(units)
    (tmp_path / "record").read_text(encoding="utf-8")


def test_names_that_cannot_be_told_apart_are_refused(tmp_path):
    for name in (b"a\xe9.txt", b"a\\xe9.txt"):
        with open(os.fsencode(tmp_path) + b"/" + name, "wb") as file:
            file.write(b"x")
    with pytest.raises(UserError, match="two files are called s/a"):
        read(tmp_path / "*.txt")


def test_looked_in_names_the_folder_that_was_looked_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data/web").mkdir(parents=True)
    for pattern, said in (("data/**/*.txt", f"no file matches data/**/*.txt (looked in {tmp_path}/data)."),
                          ("data/web/a.txt", f"does not exist (looked in {tmp_path}/data/web)."),
                          ("dat/web/*.txt", f"(looked in {tmp_path}, where there is no dat/web)."),
                          ("dat/a.txt", f"(looked in {tmp_path}, where there is no dat).")):
        with pytest.raises(UserError) as caught:
            read(pattern)
        assert said in str(caught.value)
    json.dumps(str(caught.value))
