"""Every format of files, whole: what is read, and which fields."""

import json

import pyarrow as pa
import pytest

from drover.pipeline.data import readers
from tests.data.source_files import (
    COMPRESS,
    RECORDS,
    batch,
    file_bytes,
    files_source,
    lines,
    lost,
    read,
    texts,
    write_batches,
)


@pytest.mark.parametrize("ending", COMPRESS)
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "arrow", "arrow stream"])
def test_each_format_gives_the_same_documents(tmp_path, kind, ending):
    path = tmp_path / f"f.{kind.split()[0]}{ending}"
    path.write_bytes(COMPRESS[ending](file_bytes(kind, tmp_path)))
    documents, rejections = read(files_source(path, id_field="name", meta_fields=["stars"]))
    assert rejections == [] and texts(documents) == [record["text"] for record in RECORDS]
    assert [document.id for document in documents] == ["a", "b", "c"]
    if kind != "csv":  # a CSV file knows no numbers
        assert [document.meta for document in documents] == [{"stars": 1}, {"stars": 2}, {"stars": None}]


def test_an_id_of_more_than_64_bits_is_one(tmp_path):
    (tmp_path / "f.jsonl").write_text(f'{{"text": "a", "name": {2**100}}}')
    [document], _ = read(files_source(tmp_path / "f.jsonl", id_field="name"))
    assert document.id == str(2**100)


@pytest.mark.parametrize("content", [
    json.dumps(RECORDS), lines(RECORDS).decode(), f"{json.dumps(RECORDS[:2])}\n{json.dumps(RECORDS[2:])} []\n",
    f"{json.dumps(RECORDS[:1])}[] {json.dumps(RECORDS[1])}\n{json.dumps(RECORDS[2])}"],
    ids=["array", "values", "arrays", "both"])
def test_json_is_arrays_or_values_in_a_row(tmp_path, monkeypatch, content):
    monkeypatch.setattr(readers, "CHUNK", 7)  # values and numbers are cut by the end of what was read
    (tmp_path / "f.json").write_text(f" {content} \n")
    documents, rejections = read(files_source(tmp_path / "f.json", meta_fields=["stars"]))
    assert [(own.id, own.text, own.meta["stars"]) for own in documents] == [
        (f"f.json:{number}", record["text"], record["stars"]) for number, record in enumerate(RECORDS, 1)]
    assert rejections == []


@pytest.mark.parametrize(("content", "reason"), [
    *((f'[{{"text": "a"}}] {after}', "something stands after the array's end")
      for after in ("<html>busy</html>", "]", ', {"text": "b"}', "\0" * 9)),
    ('{"text": "a"} ]', "a ']' closes nothing"), ('[{"text": "a"}, {"te', "not JSON from here on"),
    (f'{{"text": "a"}} {"[" * 20_000}', "nested too deeply to be read"), ('[{"text": "a"}', "ends inside an array")])
def test_what_cannot_be_read_of_json_is_told(tmp_path, content, reason):
    (tmp_path / "f.json").write_text(content)
    documents, [rejection] = read(tmp_path / "f.json")
    assert texts(documents) == ["a"] and lost([rejection]) == [(2, True)] and reason in rejection.reason


@pytest.mark.parametrize("kind", ["parquet", "csv", "arrow"])
def test_a_column_that_is_missing_or_holds_numbers_is_no_text(tmp_path, kind):
    path = tmp_path / f"f.{kind}"
    path.write_bytes(file_bytes(kind, tmp_path))
    documents, [rejection] = read(files_source(path, text_field="body"))
    assert documents == [] and "body" in rejection.reason and "text, name, stars" in rejection.reason
    if kind != "csv":
        _, rejections = read(files_source(path, text_field="stars"))
        assert rejections and all("int64" in rejection.reason for rejection in rejections)


def test_meta_becomes_plain_json(tmp_path):
    write_batches(tmp_path / "f.parquet", batch(
        ("text", ["a"]), ("when", pa.array([0], pa.timestamp("s"))), ("score", [float("nan")]),
        ("tags", [[1.5, float("inf")]])))
    [document], _ = read(files_source(tmp_path / "f.parquet", meta_fields=["when", "score", "tags"]))
    assert document.meta == {"when": "1970-01-01 00:00:00", "score": None, "tags": [1.5, None]}
