"""Every format of files, damaged or with documents beyond `shard.max_document_mb`: what is read all the same, what is
named as unreadable; a document that is too long is never held in memory."""

import json
import random
import re
import tracemalloc

import pyarrow.parquet as pq
import pytest
import zstandard

from tests.data.source_files import (
    COMPRESS,
    batch,
    file_bytes,
    files_source,
    lines,
    lost,
    read,
    texts,
    write_batches,
)


def numbered(count):
    """So many documents as JSON lines."""
    return lines({"text": f"{own} {random.Random(own).random()}"} for own in range(count))


@pytest.mark.parametrize("ending", ["gz", "zst"])
@pytest.mark.parametrize("harm", [
    lambda data: data[:-3000], lambda data: data + b"hello" * 9, lambda data: data[:-8] + b"ABCD" + data[-4:],
    lambda data: data + data[:12], lambda data: data[:60_000] + b"\xff" * 200 + data[60_200:]],
    ids=["cut", "garbage", "checksum", "second", "overwritten"])
def test_compressed_data_is_read_up_to_its_damage(tmp_path, harm, ending):
    """Of the lines before the damage all but those in the last buffer, and one rejection that names the rest."""
    rows, path = numbered(10_000), tmp_path / f"f.jsonl.{ending}"
    complete = [json.loads(line)["text"] for line in rows.splitlines()]
    path.write_bytes(harm(COMPRESS[f".{ending}"](rows)))
    documents, [*garbage, rejection] = read(path)
    assert texts(documents)[:3000] == complete[:3000] and len(documents) <= len(complete)
    assert rejection.lost and "from here on" in rejection.reason and not any(own.lost for own in garbage)


@pytest.mark.parametrize("window", [24, 28, 31])
def test_zstd_data_of_any_window_is_read(tmp_path, window):
    """As `zstd --long` writes it; zstd asks for the memory of the window only where the text is as long."""
    settings = zstandard.ZstdCompressionParameters.from_level(1, window_log=window, enable_ldm=True)
    stream = zstandard.ZstdCompressor(compression_params=settings).compressobj()
    complete = stream.compress(numbered(5000)) + stream.flush()
    assert zstandard.get_frame_parameters(complete).window_size == 1 << window
    (tmp_path / "f.jsonl.zst").write_bytes(complete + zstandard.compress(numbered(7)))
    documents, rejections = read(tmp_path / "f.jsonl.zst")
    assert rejections == [] and len(documents) == 5007


def test_a_bad_line_costs_itself_alone(tmp_path):
    rows = [b'{"text": "good"}', b'{"text": "cut', b'{"text": "bad \xff byte"}', b'{"body": "other"}', b'{"text": 7}',
            b'{"text": null}', b'["text"]', b"", b'{"text": "half \\ud83d pair"}', b'{"text": "also good"}', b"NaN",
            b"[" * 100_000, b'"text"', b"[" * 20_000 + b"]" * 20_000]
    (tmp_path / "f.jsonl").write_bytes(b"\n".join(rows))
    documents, rejections = read(tmp_path / "f.jsonl")
    assert [(own.id, own.text) for own in documents] == [("f.jsonl:1", "good"), ("f.jsonl:10", "also good")]
    assert [rejection.record for rejection in rejections] == [2, 3, 4, 5, 6, 7, 9, 11, 12, 13, 14]
    reasons = ["not JSON", "bytes that utf-8 has not", "no field named text; the fields are body", "a int",
               "null", "a list", "surrogate", "", "", "a str, not an object", "nested too deeply to be read"]
    for rejection, reason in zip(rejections, reasons, strict=True):
        assert reason in rejection.reason and json.loads(rejection.line())["source"] == "s"


def test_a_field_that_cannot_be_kept_is_named(tmp_path):
    (tmp_path / "f.jsonl").write_bytes(b'{"text": "x", "m": {"k": "\xff"}, "name": "1"}\n'
                                       b'{"text": "x", "m": 1, "name": "\xff"}\n{"text": "\xff", "m": 1, "name": "1"}\n'
                                       b'{"text": "x", "m": 1, "name": null}\n'
                                       b'{"text": "x", "m": ' + b"[" * 800 + b"]" * 800 + b', "name": 5}\n')
    _, rejections = read(files_source(tmp_path / "f.jsonl", id_field="name", meta_fields=["m"]))
    assert all("bytes that utf-8 has not" in own.reason for own in rejections[:3])
    assert [own.reason for own in rejections[3:]] == ["the field 'name' is null, not text or a whole number",
                                                      "a field that is kept as meta is nested too deeply"]


def test_csv_rows_of_other_length_and_an_open_quote(tmp_path):
    (tmp_path / "f.csv").write_text('id,text\r\n1,good\r\n2\n3,a,b\n\n4,"also\ngood"\n5,"never closed\n6,swallowed\n')
    documents, rejections = read(files_source(tmp_path / "f.csv", id_field="id"))
    assert [(document.id, document.text) for document in documents] == [("1", "good"), ("4", "also\ngood")]
    assert lost(rejections) == [(2, False), (3, False), (5, True)]


@pytest.mark.parametrize(("ending", "wanted"), [("parquet", (301, 300, False)), ("arrow", (301, 1, True))])
def test_a_torn_row_group_or_record_batch_costs_its_own_rows(tmp_path, ending, wanted):
    rows, path = [f"row {number} " + str(number ** 9) * 30 for number in range(900)], tmp_path / f"f.{ending}"
    write_batches(path, *(batch(("text", rows[start:start + 300])) for start in (0, 300, 600)))
    data = path.read_bytes()
    if ending == "parquet":
        start = pq.ParquetFile(path).metadata.row_group(1).column(0).dictionary_page_offset
    else:  # the metadata of the second batch, which follows those of the schema and of the first
        start = [match.end() for match in re.finditer(b"\xff{4}", data)][2] + 4
    path.write_bytes(data[:start] + b"\xff" * 32 + data[start + 32:])
    documents, [rejection] = read(path)
    assert texts(documents) == rows[:300] + rows[600:]
    assert (rejection.record, rejection.documents, rejection.lost) == wanted
    assert ending == "arrow" or documents[300].id == "f.parquet:601"


@pytest.mark.parametrize("kind", ["parquet", "arrow", "arrow stream"])
def test_a_cut_columnar_file_is_named(tmp_path, kind):
    path = tmp_path / f"f.{kind.split()[0]}"
    data = file_bytes(kind, tmp_path)
    path.write_bytes(data[:len(data) * 3 // 5])
    documents, [rejection] = read(path)
    assert len(documents) < 3 and rejection.lost and rejection.file == path.name


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
