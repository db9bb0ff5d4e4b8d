"""Files that are not what their name says are named for what they are; file names may be any bytes."""

import bz2
import gzip
import lzma
import os

import pytest
import zstandard

from drover.pipeline.core.errors import UserError
from tests.data.source_files import file_bytes, files_source, read, texts
from tests.refusal import refused

LINES = b'{"text": "one"}\n{"text": "two"}\n'
GZIPPED, ZSTD = gzip.compress(LINES, mtime=0), zstandard.compress(LINES)
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize(("name", "data", "reason"), [
    ("a.jsonl", POINTER, "it is a Git LFS pointer; run `git lfs pull`"),
    ("a.parquet", POINTER, "it is a Git LFS pointer"),
    ("a.jsonl", GZIPPED, "it is a gzip file; add .gz to its name"), ("a.txt", ZSTD, "it is a zstd file; add .zst"),
    ("a.jsonl", b"PK\x03\x04\x14", "it is a zip file; unpack it"),
    ("a.csv", lzma.compress(LINES), "it is an xz file; unpack"),
    ("a.txt", bz2.compress(LINES), "it is a bzip2 file; unpack"),
    ("a.jsonl.gz", gzip.compress(GZIPPED, mtime=0), "it is a gzip file"),
    ("a.jsonl.gz", ZSTD, "its name ends in .gz, but it is a zstd file"),
    ("a.jsonl.gz", LINES, "its name ends in .gz, but it is no gzip data; rename it"),
    ("a.txt", "words ü".encode("utf-16"), "it is UTF-16 text with a byte-order mark; set the source's `enc"),
    ("a.txt", "words and words ".encode("utf-16-le"), "it is UTF-16 text without a byte-order mark; set the "
                                                      "source's `encoding: utf-16-le`"),
    ("a.txt", "words and words ".encode("utf-16-be"), "`encoding: utf-16-be`"),
    ("a.txt", "w".encode("utf-32"), "UTF-32"),
    ("a.txt", b"\x01\x02\0\xff" * 9, "binary data, not text"), ("a.jsonl", bytes(100), "binary data, not text"),
    ("a.txt", b"w" * 144 + bytes(16), "binary data, not text"), ("a.txt", b"%PDF-1.7\n%\xe2\xe3", "it is a PDF file"),
    ("a.jsonl", b"\n<!DOCTYPE html><html>", "it is an HTML page, as a server sends"),
    ("a.txt", b"<html>", "it is an HTML page, of which the model would learn the markup"),
    ("a.md.gz", gzip.compress(b"\xef\xbb\xbf <?xml version='1.0'?>\n<!-- of a\nserver --><HTML lang=en>"),
     "`html: keep`"),
    ("a.md", b"---\nlayout: page\ntitle: a\n---\n\n<html>", "`html: keep`"),
    ("a.txt", b"---\r\nlang: en\r\n---\r\n<!doctype html>", "`html: keep`"),
    ("a.txt", b"<head><title>a</title>", "`html: keep`"), ("a.md", b"\n<body class='x'>\n<p>", "`html: keep`"),
    ("a.jsonl", b"<HEAD>", "it is an HTML page, as"), ("a.txt", b"\xef\xbb\xbf" * 2 + b"<html>", "`html: keep`"),
    ("a.jsonl", "parquet", "it is a Parquet file; name it .parquet, or set the source's `format: parquet`"),
    ("a.parquet", "arrow", "it is an Arrow file")])
def test_a_file_is_named_for_what_it_is(tmp_path, name, data, reason):
    (tmp_path / name).write_bytes(file_bytes(data, tmp_path) if isinstance(data, str) else data)
    documents, (rejection,) = read(tmp_path / name)
    assert documents == [] and rejection.lost and rejection.record is None
    assert reason in rejection.reason and "latin1" not in rejection.reason, rejection.reason


@pytest.mark.parametrize(("name", "data", "wanted"), [
    ("a.txt", b"<htmlx>", ["<htmlx>"]), ("a.txt", b"<header>", ["<header>"]),
    ("a.txt", b"---\na\n---\nb <html>", ["---\na\n---\nb <html>"]), ("a.txt", b"BZh is a word", ["BZh is a word"]),
    ("a.txt", b"w" * 145 + bytes(16), ["w" * 145 + "\0" * 16]), ("a.txt", bytes(15), ["\0" * 15]),
    ("a.txt", ("x" * 4095 + "ü\0").encode(), ["x" * 4095 + "ü\0"]), ("a.txt", b"", [""]), ("a.txt.gz", b"", [""]),
    ("a.jsonl", b"\xef\xbb\xbf" + LINES, ["one", "two"]), ("a.JSONL.GZ", GZIPPED, ["one", "two"]),
    ("a.jsonl.zst", (b"\x50\x2a\x4d\x18\4\0\0\0" + bytes(4) + ZSTD) * 2, ["one", "two"] * 2)])  # as pzstd writes it
def test_what_is_right_is_read(tmp_path, name, data, wanted):
    (tmp_path / name).write_bytes(data)
    documents, rejections = read(tmp_path / name)
    assert texts(documents) == wanted and rejections == []


@pytest.mark.parametrize("name", ["a.html", "A.HTM", "a.xhtml.gz", "a.txt"])
def test_pages_are_read_where_they_are_to_be_kept(tmp_path, name):
    (tmp_path / name).write_bytes(gzip.compress(b"<html>") if name.endswith(".gz") else b"<html>")
    if name != "a.txt":
        refused(UserError, rf"1 files are HTML pages \({name}\).*html: keep", read, tmp_path / name)
    assert texts(read(files_source(tmp_path / name, html="keep"))[0]) == ["<html>"]


def test_a_document_that_is_binary_further_on_is_not_taken_for_latin_1(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"x" * 5000 + b"\n\n\0\xff\0" + b"\n\ncaf\xe9")
    _, rejections = read(files_source(tmp_path / "a.txt", separator="\n\n"))
    assert ["binary" in rejection.reason for rejection in rejections] == [True, False]
    assert "iconv -f latin1" in rejections[1].reason


def test_a_name_that_is_not_utf_8(tmp_path):
    """tests/stages/test_shard.py has such a name of a file of JSON lines."""
    (tmp_path / os.fsdecode(b"caf\xe9 \xff.parquet")).write_bytes(file_bytes("parquet", tmp_path))
    documents, rejections = read(tmp_path / "*")
    assert documents[0].id == "caf\\xe9 \\xff.parquet:1" and rejections == []


def test_names_that_cannot_be_told_apart_are_refused(tmp_path):
    for name in (b"a\xe9.txt", b"a\\xe9.txt"):
        (tmp_path / os.fsdecode(name)).write_text("x")
    refused(UserError, "two files are called s/a", read, tmp_path / "*.txt")
