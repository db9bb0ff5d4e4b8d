"""Documents beyond `shard.max_document_mb`: each costs itself, is named, and is never held in memory."""

import tracemalloc

import pytest

from tests.data.source_files import COMPRESS, files_source, lines, read

REASON = "longer than shard.max_document_mb (1 MB) allows"
LARGE = 20_000_000
"""Bytes of a document that is far too long for memory that is bounded."""


def refused(path, **fields):
    """(texts by id, what is rejected), read in little memory."""
    tracemalloc.start()
    documents, rejections = read(files_source(path, **fields), max_document_mb=1.0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < LARGE / 2
    return ({own.id: own.text for own in documents},
            [(own.record, own.reason, own.documents, own.lost) for own in rejections])


@pytest.mark.parametrize("ending", COMPRESS)
def test_a_line(tmp_path, ending):
    (tmp_path / f"f.jsonl{ending}").write_bytes(COMPRESS[ending](
        b'{"text": "first"}\n{"text": "' + b"x" * LARGE + b'"}\n{"text": "last"}\n' + b"[" * LARGE))
    assert refused(tmp_path / "f.*") == ({f"f.jsonl{ending}:1": "first", f"f.jsonl{ending}:3": "last"},
                                         [(2, REASON, 1, False), (4, REASON, 1, False)])


@pytest.mark.parametrize(("separator", "texts", "record"), [
    (None, {}, None), ("||", {"f.txt:1": "first", "f.txt:3": "last"}, 2), ("<|end|>", {}, 1)])
def test_a_text(tmp_path, separator, texts, record):
    """Whole, between separators, and where a separator never comes."""
    (tmp_path / "f.txt").write_bytes(b"first||" + b"x" * LARGE + b"||last")
    assert refused(tmp_path / "f.txt", separator=separator) == (texts, [(record, REASON, 1, False)])


@pytest.mark.parametrize("data", [
    b'[{"text": "first"}, {"text": "' + b"x" * LARGE + b'"}, {"text": "last"}]',
    b'[{"text": "first"}, {"text": [' + b"1," * (LARGE // 2), b'{"text": "first"}\n{"text": "first"' + b" " * LARGE],
    ids=["text", "brackets", "spaces"])
def test_a_value_of_json_costs_what_follows_it(tmp_path, data):
    (tmp_path / "f.json").write_bytes(data)
    assert refused(tmp_path / "f.json") == ({"f.json:1": "first"}, [(2, REASON, 1, True)])


@pytest.mark.parametrize("text", ["x" * LARGE, '"' + "line\n" * (LARGE // 5) + '"'], ids=["bare", "lines"])
def test_a_field_of_csv_costs_what_follows_it(tmp_path, text):
    (tmp_path / "f.csv").write_text(f"id,text\n1,first\n2,{text}\n3,last\n")
    assert refused(tmp_path / "f.csv", id_field="id") == ({"1": "first"}, [(2, REASON, 1, True)])


def test_bytes_of_utf_8_count_and_not_characters(tmp_path):
    """test_columns.py has the same of columns."""
    for name, text in (("a", "\u20ac" * 333_333 + "x"), ("b", "\u20ac" * 333_334)):
        (tmp_path / f"{name}.txt").write_text(text)
        (tmp_path / f"{name}.json").write_bytes(lines([{"text": "x" * 900_000}, {"text": text}]))
    documents, rejections = read(tmp_path / "*", max_document_mb=1.0)
    assert [own.id for own in documents] == ["a.json:1", "a.json:2", "a.txt", "b.json:1"]
    assert [own.file for own in rejections] == ["b.json", "b.txt"]
