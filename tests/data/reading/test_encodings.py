"""Text files in other encodings than UTF-8, and what is read of them where the encoding is another one."""

import codecs
import random

import pytest

from drover.pipeline.data import streams
from drover.pipeline.data.sources import reading_units
from drover.pipeline.data.streams import recoder
from tests.data.source_files import COMPRESS, batch, config_of, files_source, lines, read, texts, write_batches

WORDS = ["größer ü", "“naïve” €", "ein\nzwei"]


@pytest.mark.parametrize(("encoding", "words"), [
    ("cp1252", WORDS), ("utf-16", WORDS), ("utf-16-le", WORDS), ("UTF_32_BE", WORDS), ("koi8-r", ["Это текст"]),
    ("utf-16", ["\u4e0a\U0001f600 ü"]), ("gb18030", ["这是文字"]), ("shift_jis", ["価格は千円です。"]),
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


@pytest.mark.parametrize(("name", "encoding", "text"), [
    ("f.txt", "latin-1", "größer " * 9), ("f.jsonl.gz", "cp1252", '{"text": "größer, früher, über, öfter, älter"}'),
    ("f.csv", "shift_jis", "x\n価格は千円です。\n"), ("f.jsonl", "gb18030", '{"text": "Größe"}')])
def test_a_file_that_is_utf_8_only_beyond_its_head_is_named(tmp_path, name, encoding, text):
    ascii_text = {"f.txt": "plain\n", "f.csv": "text\n"}.get(name, '{"text": "plain"}\n') * 20_000
    for own, is_named in ((text.encode(), True), (text.encode(encoding), False)):
        (tmp_path / name).write_bytes(COMPRESS[".gz" * name.endswith("gz")](ascii_text.encode() + own))
        documents, rejections = read(files_source(tmp_path / name, encoding=encoding))
        assert [f"it is UTF-8, not {codecs.lookup(encoding).name};" in rejection.reason and rejection.lost
                for rejection in rejections] == [True] * is_named
        assert "\u00c3" not in "".join(texts(documents))


@pytest.mark.parametrize("encoding", ["utf-16-be", "utf-32-le", "cp932", "gb18030", "euc_kr", "utf-7", "cp1252"])
def test_any_bytes_are_recoded_wherever_they_are_cut(encoding):
    """Text that is cut anywhere is read as it is by the tests above."""
    rng = random.Random(1)
    for data in (rng.randbytes(40) for _ in range(200)):
        recode = recoder(encoding)
        recode(data[:rng.randint(0, 40)], False)
        recode(data, True)


def test_parquet_has_its_own_encoding(tmp_path):
    write_batches(tmp_path / "f.parquet", batch(("text", ["größer"])))
    assert texts(read(files_source(tmp_path / "f.parquet", encoding="utf-16"))[0]) == ["größer"]


def test_only_files_in_utf_8_are_read_in_parts(tmp_path):
    path = tmp_path / "f.jsonl"
    path.write_bytes(lines([{"text": "a"}]))
    record = {"name": "s/f.jsonl", "path": str(path), "bytes": 10**9, "mtime_ns": 0}
    assert [len(reading_units(config_of(files_source(path, encoding=encoding)).shard, [record]))
            for encoding in ("utf-16", "UTF8")] == [1, 16]
