"""Every format of files, whole: what is read, and which fields."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.data import framing, readers
from tests.data.source_files import COMPRESS, RECORDS, file_bytes, files_source, read, texts


@pytest.mark.parametrize("ending", COMPRESS)
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "arrow", "arrow stream"])
def test_each_format_gives_the_same_documents(tmp_path, kind, ending):
    path = tmp_path / f"f.{kind.split()[0]}{ending}"
    path.write_bytes(COMPRESS[ending](file_bytes(kind, tmp_path)))
    documents, rejections = read(files_source(path, id_field="name", meta_fields=["stars"]))
    assert rejections == []
    assert texts(documents) == [record["text"] for record in RECORDS]
    assert [document.id for document in documents] == ["a", "b", "c"]
    if kind != "csv":  # a CSV file knows no numbers
        assert [document.meta for document in documents] == [{"stars": 1}, {"stars": 2}, {"stars": None}]


@pytest.mark.parametrize("ending", COMPRESS)
def test_text_files_are_one_document_or_split(tmp_path, ending):
    (tmp_path / f"f.txt{ending}").write_bytes(COMPRESS[ending](b"\xef\xbb\xbffirst\r\nline\n\nsecond\n"))
    whole, _ = read(files_source(tmp_path / "f.*"))
    assert [(document.id, document.text) for document in whole] == [(f"f.txt{ending}", "first\r\nline\n\nsecond\n")]
    parts, _ = read(files_source(tmp_path / "f.*", separator="\n\n"))
    assert texts(parts) == ["first\r\nline", "second\n"]
    assert [document.id for document in parts] == [f"f.txt{ending}:1", f"f.txt{ending}:2"]


def test_a_separator_is_found_across_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(framing, "CHUNK", 5)
    stories = [f"story {number} " * number for number in range(1, 9)]
    (tmp_path / "f.txt").write_text("<|end|>".join(stories) + "<|end|>")
    assert texts(read(files_source(tmp_path / "f.txt", separator="<|end|>"))[0]) == stories


@pytest.mark.parametrize("content", [json.dumps(RECORDS), "\n".join(map(json.dumps, RECORDS)), json.dumps(RECORDS[0])])
def test_json_is_an_array_or_values_in_a_row(tmp_path, monkeypatch, content):
    monkeypatch.setattr(readers, "CHUNK", 7)  # values and numbers are cut by the end of what was read
    (tmp_path / "f.json").write_text(f" {content} \n")
    documents, rejections = read(files_source(tmp_path / "f.json", meta_fields=["stars"]))
    expected = RECORDS if content.count("name") == 3 else RECORDS[:1]
    assert texts(documents) == [record["text"] for record in expected] and rejections == []
    assert [document.meta["stars"] for document in documents] == [record["stars"] for record in expected]


@pytest.mark.parametrize("content", ['[{"text": "a"}, {"text": "b"}]\n[{"text": "c"}] []\n',
                                     '[{"text": "a"}][] {"text": "b"}\n{"text": "c"}'])
def test_what_stands_after_an_array_of_json_is_read(tmp_path, monkeypatch, content):
    monkeypatch.setattr(readers, "CHUNK", 7)
    (tmp_path / "f.json").write_text(content)
    documents, rejections = read(files_source(tmp_path / "f.json"))
    assert [(document.id, document.text) for document in documents] == [
        ("f.json:1", "a"), ("f.json:2", "b"), ("f.json:3", "c")] and rejections == []


@pytest.mark.parametrize("after", ["<html>busy</html>", "]", ', {"text": "b"}', "\0" * 9])
def test_what_cannot_be_read_after_an_array_of_json_is_told(tmp_path, after):
    (tmp_path / "f.json").write_text(f'[{{"text": "a"}}] {after}')
    documents, rejections = read(files_source(tmp_path / "f.json"))
    assert texts(documents) == ["a"]
    assert [(own.record, own.reason, own.lost) for own in rejections] == [
        (2, "something stands after the array's end", True)]


@pytest.mark.parametrize("kind", [pa.large_string(), pa.dictionary(pa.int32(), pa.string()), pa.string_view(),
                                  pa.binary()], ids=str)
def test_text_columns_of_every_kind(tmp_path, kind):
    column = pa.array(["a", "ü"]).cast(kind) if not pa.types.is_dictionary(kind) else \
        pa.array(["a", "ü"]).dictionary_encode()
    with pa.OSFile(str(tmp_path / "f.arrow"), "wb") as sink, \
            pa.ipc.new_file(sink, pa.schema([("text", kind)])) as writer:
        writer.write_batch(pa.record_batch([column], ["text"]))
    assert texts(read(files_source(tmp_path / "f.arrow"))[0]) == ["a", "ü"]


@pytest.mark.parametrize("kind", ["parquet", "csv", "arrow"])
def test_a_missing_column_names_those_that_are_there(tmp_path, kind):
    path = tmp_path / f"f.{kind}"
    path.write_bytes(file_bytes(kind, tmp_path))
    documents, [rejection] = read(files_source(path, text_field="body"))
    assert documents == [] and "body" in rejection.reason and "text, name, stars" in rejection.reason


def test_a_column_of_numbers_is_not_text(tmp_path):
    (tmp_path / "f.parquet").write_bytes(file_bytes("parquet", tmp_path))
    _, rejections = read(files_source(tmp_path / "f.parquet", text_field="stars"))
    assert rejections and all("int64" in rejection.reason for rejection in rejections)


def test_meta_becomes_plain_json(tmp_path):
    rows = pa.table({"text": ["a"], "when": pa.array([0], pa.timestamp("s")), "score": [float("nan")],
                     "tags": [[1.5, float("inf")]]})
    pq.write_table(rows, tmp_path / "f.parquet")
    [document], _ = read(files_source(tmp_path / "f.parquet", meta_fields=["when", "score", "tags"]))
    assert document.meta == {"when": "1970-01-01 00:00:00", "score": None, "tags": [1.5, None]}
