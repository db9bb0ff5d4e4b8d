"""Every format of files, whole: what is read, and which fields."""

import json

import pyarrow as pa
import pytest

from drover.pipeline.data import readers
from drover.pipeline.data.streams import HEAD
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


@pytest.mark.parametrize(("content", "reason"), [
    *((f'[{{"text": "a"}}] {after}', "something stands after the array's end")
      for after in ("<html>busy</html>", "]", ', {"text": "b"}', "\0" * 9)),
    ('{"text": "a"} ]', "a ']' closes nothing"), ('[{"text": "a"}, {"te', "not JSON from here on"),
    (f'{{"text": "a"}} {"[" * 20_000}', "nested too deeply to be read"), ('[{"text": "a"}', "ends inside an array")])
def test_what_cannot_be_read_of_json_is_told(tmp_path, content, reason):
    (tmp_path / "f.json").write_text(content)
    documents, [rejection] = read(tmp_path / "f.json")
    assert texts(documents) == ["a"] and lost([rejection]) == [(2, True)] and reason in rejection.reason


def test_ids_and_meta_become_plain_json(tmp_path):
    (tmp_path / "f.jsonl").write_text(f'{{"text": "a", "name": {2**100}}}')
    assert read(files_source(tmp_path / "f.jsonl", id_field="name"))[0][0].id == str(2**100)
    write_batches(tmp_path / "f.parquet", batch(
        ("text", ["a"]), ("when", pa.array([0], pa.timestamp("s"))), ("score", [float("nan")]),
        ("tags", [[1.5, float("inf")]])))
    [document], _ = read(files_source(tmp_path / "f.parquet", meta_fields=["when", "score", "tags"]))
    assert document.meta == {"when": "1970-01-01 00:00:00", "score": None, "tags": [1.5, None]}


LONG = [{"text": f"{number} " + "x" * (HEAD // 3)} for number in range(9)]
JSON = [json.dumps(record) for record in LONG]


@pytest.mark.parametrize("ending", ["jsonl", "json", "jsonl.gz", "json.zst"])
@pytest.mark.parametrize("content", [
    "\r".join(JSON), "".join(JSON), json.dumps(LONG),
    "\n".join(json.dumps(record, indent=1) for record in LONG), "[\n" + ",\n".join(JSON) + "\n]\n",
    ",\n".join(JSON) + ",", f"{JSON[0]}\n{JSON[1]}{JSON[2]}\n" + "\r".join(JSON[3:]),
    "\n".join(f"\ufeff{own}" for own in JSON),
    "".join(f"\x1e{own}\n" for own in JSON),
    json.dumps({"a": {"b": LONG}, "c": [1]}) + "\r\n\r\n\n",
    f"{json.dumps(LONG[:3])} {JSON[3]}\n" + "\n".join(JSON[4:])],
    ids=["cr", "nothing", "array", "indented values", "array of lines", "commas at ends", "mixed", "marks", "sequence",
         "wrapped twice", "array and values"])
def test_records_that_do_not_stand_on_lines_of_their_own_are_read(tmp_path, monkeypatch, content, ending):
    monkeypatch.setattr(readers, "CHUNK", 7)  # values are cut by the end of what was read
    path = tmp_path / f"f.{ending}"
    path.write_bytes(COMPRESS[path.suffix if ending.count(".") else ""](content.encode()))
    documents, rejections = read(path)
    assert rejections == [] and texts(documents) == [record["text"] for record in LONG]


def test_a_first_line_that_is_broken_or_long_makes_no_other_json(tmp_path):
    for first in ('{"text": "cut', '{"text": "cut", "x": ', '{"text": "cut' + "x" * (HEAD - 60), "[[[", '["text"]',
                  '{"text": "' + "x" * HEAD):
        (tmp_path / "f.jsonl").write_text("\n".join([first, *JSON]))
        documents, [rejection] = read(tmp_path / "f.jsonl")
        assert texts(documents) == [record["text"] for record in LONG] and rejection.record == 1 and not rejection.lost
        assert rejection.lost_bytes == len(first) + 1


def test_a_large_object_is_named_with_what_to_do(tmp_path):
    (tmp_path / "f.json").write_text(json.dumps({"data": [{"text": "x" * 99}] * 9000}))
    _, [rejection] = read(files_source(tmp_path / "f.json"), max_document_mb=0.5)
    assert "jq -c '.FIELD[]'" in rejection.reason and rejection.lost_bytes == (tmp_path / "f.json").stat().st_size


def test_lists_that_are_no_records_stay_what_they_are(tmp_path):
    """A conversation is no list of records where there are others, and of two lists none is known to be meant."""
    pages = [{"messages": [{"text": "a"}]}, {"messages": [{"text": "b"}]}]
    for content in (lines(pages), json.dumps({"train": [{"text": "a"}], "test": [{"text": "b"}]}).encode()):
        for name in ("f.jsonl", "f.json"):
            (tmp_path / name).write_bytes(content)
            documents, rejections = read(tmp_path / name)
            assert documents == [] and len(rejections) == len(content.splitlines())
            assert sum(own.lost_bytes for own in rejections) in range(len(content) - len(rejections), len(content) + 2)


@pytest.mark.parametrize("name", ["f.jsonl", "f.json", "f.parquet", "f.arrow"])
def test_a_text_in_an_object_is_read(tmp_path, name):
    records = [{"content": {"text": "a", "lang": "en"}, "m": {"n": {"id": "1"}}},
               {"content": {"text": "b", "lang": "de"}, "m": {"n": {"id": "2"}}}, {"content": None, "m": None}]
    if name.startswith("f.json"):
        (tmp_path / name).write_bytes(lines(records))
    else:
        write_batches(tmp_path / name, pa.RecordBatch.from_pylist(records))
    documents, [rejection] = read(files_source(
        tmp_path / name, text_field="content.text", id_field="m.n.id", meta_fields=["content.lang"]))
    assert [(own.id, own.text, own.meta) for own in documents] == [
        ("1", "a", {"content.lang": "en"}), ("2", "b", {"content.lang": "de"})]
    assert "no field named content.text" in rejection.reason
    if not name.startswith("f.json"):
        _, [rejection] = read(files_source(tmp_path / name, text_field="content.body"))
        assert "the column 'content' holds struct" in rejection.reason


@pytest.mark.parametrize(("name", "content", "fields"), [
    ("f.csv", 'n;text\n1;"a;\nb"\n2;c, d\n', {"delimiter": ";"}), ("f.tsv", 'n\ttext\n1\t"a;\nb"\n2\tc, d\n', {}),
    ("f.csv", "n|text\n1|'a;\nb'\n2|c, d\n", {"delimiter": "|", "quote": "'"}),
    ("f.csv", 'n,text\r1,"a;\nb"\r2,"c, d"\r', {}),
    ("f.csv", '\ufeffsep=;\r\n"n";"text"\r\n1;"a;\nb"\r\n2;c, d\r\n', {}),
    ("f.csv.gz", 'SEP=|\n\nn;text\n1;"a;\nb"\n2;c, d\n', {"delimiter": ";"}),
    ("f.csv", '\n\nn,text\n1,"a;\nb"\n2,"c, d"\n', {})])
def test_dialects_of_csv(tmp_path, name, content, fields):
    (tmp_path / name).write_bytes(COMPRESS[".gz" * name.endswith("gz")](content.encode()))
    documents, rejections = read(files_source(tmp_path / name, id_field="n", **fields))
    assert rejections == [] and [(own.id, own.text) for own in documents] == [("1", "a;\nb"), ("2", "c, d")]


def test_values_without_quotes(tmp_path):
    (tmp_path / "f.tsv").write_text('n\ttext\n1\t"a\n2\tb"\n')
    assert texts(read(files_source(tmp_path / "f.tsv", quote=""))[0]) == ['"a', 'b"']
    (tmp_path / "f.tsv").write_text('n\ttext\n1\t"Yes" she said\n')
    assert "set the source's `quote: \"\"`" in read(tmp_path / "f.tsv")[1][0].reason
    assert texts(read(files_source(tmp_path / "f.tsv", quote=""))[0]) == ['"Yes" she said']
