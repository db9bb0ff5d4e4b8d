"""Text files in other encodings than UTF-8, and files that are not what their name says, which are named for what they
are."""

import gzip
import lzma

import pytest
import zstandard

from drover.pipeline.data import streams
from tests.data.source_files import COMPRESS, file_bytes, files_source, lines, read, texts

WORDS = ["größer ü", "“naïve” €", "ein\nzwei"]


@pytest.mark.parametrize(("encoding", "words"), [
    ("cp1252", WORDS), ("utf-16", WORDS), ("UTF_32_BE", WORDS), ("utf-16", ["\u4e0a\U0001f600 ü"]),
    ("iso2022_jp", ["価格"])])
@pytest.mark.parametrize("name", ["f.jsonl", "f.json", "f.csv", "f.txt", "f.jsonl.gz"])
def test_text_is_read_in_its_encoding(tmp_path, monkeypatch, name, encoding, words):
    monkeypatch.setattr(streams, "CHUNK", 3)  # characters are cut by the end of what was read
    text = "\n\n".join(words) if "txt" in name else lines({"text": word} for word in words).decode()
    if "csv" in name:
        text = "text\r\n" + "".join(f'"{word}"\r\n' for word in words)
    (tmp_path / name).write_bytes(COMPRESS[".gz" * name.endswith("gz")](text.encode(encoding)))
    documents, rejections = read(files_source(tmp_path / name, encoding=encoding,
                                              separator="\n\n" if "txt" in name else None))
    assert texts(documents) == words and rejections == []


@pytest.mark.parametrize(("encoding", "data", "bad"), [
    ("utf-16-le", "ü\n".encode("utf-16-le") + b"\x00\xd8" + "x\ny\n".encode("utf-16-le"), [2]),
    ("utf-16", "ü\nü".encode("utf-16") + b"x", [2]), ("cp1252", b"\xfc\n\x81\n\xfc", [2]),
    ("shift_jis", "価\n格".encode("shift_jis") + b"\x81\n\x81\xff\n", [2, 3]), ("ascii", b"a\n\xfc\nb", [2])])
def test_what_cannot_be_decoded_is_rejected_where_it_is(tmp_path, encoding, data, bad):
    (tmp_path / "f.txt").write_bytes(data)
    documents, rejections = read(files_source(tmp_path / "f.txt", separator="\n", encoding=encoding))
    assert all(f"bytes that {encoding} has not" in rejection.reason for rejection in rejections)
    assert [rejection.record for rejection in rejections] == bad and "\ufffd" not in "".join(texts(documents))
    assert {int(document.id.partition(":")[2]) for document in documents}.isdisjoint(bad)


@pytest.mark.parametrize(("encoding", "data", "reason"), [
    ("latin-1", "größer".encode(), "it is UTF-8, not iso8859-1"),
    ("utf-16-le", b"plain text", "it is UTF-8, not utf-16-le"),
    ("utf-16", b"plain text", "no byte-order mark of UTF-16"), ("cp1252", "ü".encode("utf-16"), "`encoding: utf-16`"),
    ("utf-16", "ü".encode("utf-32"), "`encoding: utf-32`"), ("latin-1", b"%PDF-1.7\n", "it is a PDF file"),
    ("utf-16", "<html>".encode("utf-16"), "it is an HTML page"), ("latin-1", b"\x01\0\0\xff" * 9, "binary data")])
def test_a_file_in_another_encoding_is_named_for_what_it_is(tmp_path, encoding, data, reason):
    (tmp_path / "f.txt").write_bytes(data)
    documents, (rejection,) = read(files_source(tmp_path / "f.txt", encoding=encoding))
    assert documents == [] and reason in rejection.reason and rejection.lost


LINES = b'{"text": "one"}\n{"text": "two"}\n'
GZIPPED, ZSTD = gzip.compress(LINES, mtime=0), zstandard.compress(LINES)
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize(("name", "data", "reason"), [
    ("a.jsonl", POINTER, "it is a Git LFS pointer; run `git lfs pull`"),
    ("a.jsonl", GZIPPED, "it is a gzip file; add .gz to its name"), ("a.txt", ZSTD, "it is a zstd file; add .zst"),
    ("a.jsonl", b"PK\x03\x04\x14", "it is a zip file; unpack it"),
    ("a.csv", lzma.compress(LINES), "it is an xz file; unpack"),
    ("a.jsonl.gz", gzip.compress(GZIPPED, mtime=0), "it is a gzip file"),
    ("a.jsonl.gz", ZSTD, "its name ends in .gz, but it is a zstd file"),
    ("a.jsonl.gz", LINES, "its name ends in .gz, but it is no gzip data; rename it"),
    ("a.txt", "words ü".encode("utf-16"), "it is UTF-16 text with a byte-order mark; set the source's `enc"),
    ("a.txt", "words and words ".encode("utf-16-le"), "it is UTF-16 text without a byte-order mark; set the "
                                                      "source's `encoding: utf-16-le`"),
    ("a.txt", b"\x01\x02\0\xff" * 9, "binary data, not text"),
    ("a.txt", b"w" * 144 + bytes(16), "binary data, not text"),
    ("a.jsonl", b"\n<!DOCTYPE html><html>", "it is an HTML page, as a server sends"),
    ("a.txt", b"<html>", "it is an HTML page; name it .html, or set the source's `format: html`"),
    ("a.md.gz", gzip.compress(b"\xef\xbb\xbf <?xml version='1.0'?>\n<!-- of a\nserver --><HTML lang=en>"),
     "`html: keep`"),
    ("a.md", b"---\nlayout: page\ntitle: a\n---\n\n<html>", "`html: keep`"),
    ("a.jsonl", "parquet", "it is a Parquet file; name it .parquet, or set the source's `format: parquet`"),
    ("a.parquet", "arrow", "it is an Arrow file")])
def test_a_file_is_named_for_what_it_is(tmp_path, name, data, reason):
    (tmp_path / name).write_bytes(file_bytes(data, tmp_path) if isinstance(data, str) else data)
    documents, (rejection,) = read(tmp_path / name)
    assert documents == [] and rejection.lost and rejection.record is None
    assert reason in rejection.reason and "latin1" not in rejection.reason, rejection.reason


@pytest.mark.parametrize(("name", "data", "wanted"), [
    ("a.txt", b"<header>", ["<header>"]),
    ("a.txt", b"---\na\n---\nb <html>", ["---\na\n---\nb <html>"]), ("a.txt", b"BZh is a word", ["BZh is a word"]),
    ("a.txt", b"w" * 145 + bytes(16), ["w" * 145 + "\0" * 16]),
    ("a.txt", ("x" * 4095 + "ü\0").encode(), ["x" * 4095 + "ü\0"]), ("a.txt.gz", b"", [""]),
    ("a.jsonl", b"\xef\xbb\xbf" + LINES, ["one", "two"]), ("a.JSONL.GZ", GZIPPED, ["one", "two"]),
    ("a.jsonl.zst", (b"\x50\x2a\x4d\x18\4\0\0\0" + bytes(4) + ZSTD) * 2, ["one", "two"] * 2)])  # as pzstd writes it
def test_what_is_right_is_read(tmp_path, name, data, wanted):
    (tmp_path / name).write_bytes(data)
    documents, rejections = read(tmp_path / name)
    assert texts(documents) == wanted and rejections == []


@pytest.mark.parametrize("name", ["a.html", "A.HTM", "a.xhtml.gz", "a.txt"])
def test_pages_are_read_as_they_are_where_they_are_to_be_kept(tmp_path, name):
    (tmp_path / name).write_bytes(gzip.compress(b"<html>") if name.endswith(".gz") else b"<html>")
    assert texts(read(files_source(tmp_path / name, html="keep"))[0]) == ["<html>"]
