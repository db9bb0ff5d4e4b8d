"""Every format of files, damaged: what is read all the same, and what is named as unreadable."""

import gzip
import json
import random
import zlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.source_files import (
    COMPRESS,
    file_bytes,
    files_source,
    read,
    table,
    texts,
)


def zipped_lines(count):
    """So many documents as JSON lines, packed."""
    lines = "".join(json.dumps({"text": f"{own} {random.Random(own).random()}"}) + "\n" for own in range(count))
    return gzip.compress(lines.encode(), mtime=0)


@pytest.mark.parametrize("count", [20, 2000])
@pytest.mark.parametrize("behind", [bytes(512), bytes(70_000), bytes(3) + zipped_lines(7)],
                         ids=["few", "many", "between members"])
def test_zeros_behind_gzip_data_are_padding(tmp_path, count, behind):
    (tmp_path / "f.jsonl.gz").write_bytes(zipped_lines(count) + behind)
    documents, rejections = read(files_source(tmp_path / "f.jsonl.gz"))
    assert rejections == [] and len(documents) == count + (7 if any(behind) else 0)


def test_gzip_data_is_read_up_to_its_damage(tmp_path):
    """Every line that can be unpacked, and one rejection, wherever the data breaks."""
    data = zipped_lines(2000)
    plain = zlib.decompressobj(31).decompress(data)
    for name, broken, whole in (("cut", data[:-3000], zlib.decompressobj(31).decompress(data[:-3000]).count(b"\n")),
                                ("garbage", data + b"hello", 2000), ("checksum", data[:-8] + b"ABCD" + data[-4:], 2000),
                                ("second", data + data[:12], 2000), ("header", data + data[:5], 2000)):
        (tmp_path / f"{name}.jsonl.gz").write_bytes(broken)
        documents, rejections = read(files_source(tmp_path / f"{name}.jsonl.gz"))
        assert [document.text for document in documents] == [
            json.loads(line)["text"] for line in plain.splitlines()[:whole]], name
        assert [(own.record, own.lost) for own in rejections] == [(whole + 1, True)], name
        assert "from here on" in rejections[0].reason


def test_a_bad_line_costs_itself_alone(tmp_path):
    lines = [b'{"text": "good"}', b'{"text": "cut', b'{"text": "bad \xff byte"}', b'{"body": "other"}', b'{"text": 7}',
             b'{"text": null}', b'["text"]', b"", b'{"text": "half \\ud83d pair"}', b'{"text": "also good"}', b"NaN",
             b"[" * 100_000, b'"text"']
    (tmp_path / "f.jsonl").write_bytes(b"\n".join(lines))
    documents, rejections = read(files_source(tmp_path / "f.jsonl"))
    assert [(document.id, document.text) for document in documents] == [("f.jsonl:1", "good"),
                                                                       ("f.jsonl:10", "also good")]
    assert [rejection.record for rejection in rejections] == [2, 3, 4, 5, 6, 7, 9, 11, 12, 13]
    reasons = [rejection.reason for rejection in rejections]
    assert "not JSON" in reasons[0] and "UTF-8" in reasons[1] and "body" in reasons[2]
    assert "a int" in reasons[3] and "null" in reasons[4] and "a list" in reasons[5] and "surrogate" in reasons[6]
    assert "a str, not an object" in reasons[9]
    assert all(json.loads(rejection.line())["source"] == "s" for rejection in rejections)


def test_broken_utf8_in_a_text_file_is_rejected(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"caf\xe9")
    (tmp_path / "good.txt").write_text("café")
    documents, rejections = read(files_source(tmp_path / "*.txt"))
    assert texts(documents) == ["café"]
    assert [(rejection.file, rejection.record) for rejection in rejections] == [("bad.txt", None)]


@pytest.mark.parametrize("ending", [".gz", ".zst"])
@pytest.mark.parametrize("harm", ["cut", "overwritten"])
def test_a_damaged_archive_keeps_what_stands_before_the_damage(tmp_path, ending, harm):
    records = [{"text": f"{number} {number ** 5}"} for number in range(60_000)]
    data = COMPRESS[ending]("".join(json.dumps(record) + "\n" for record in records).encode())
    half = len(data) // 2
    damaged = data[:half] if harm == "cut" else data[:half] + bytes(200) + data[half + 200:]
    (tmp_path / f"f.jsonl{ending}").write_bytes(damaged)
    documents, rejections = read(files_source(tmp_path / f"f.jsonl{ending}"))
    assert 1000 < len(documents) < 60_000
    # With gzip the damage may first show as broken lines; the last word is that the file breaks off.
    assert rejections[-1].lost and rejections[-1].file == f"f.jsonl{ending}"
    assert rejections[-1].record is not None and "from here on" in rejections[-1].reason
    if harm == "cut":
        assert texts(documents) == [record["text"] for record in records[:len(documents)]] and len(rejections) == 1


def test_csv_rows_of_other_length_and_an_open_quote(tmp_path):
    (tmp_path / "f.csv").write_text('id,text\n1,good\n2\n3,a,b\n\n4,"also\ngood"\n5,"never closed\n6,swallowed\n')
    documents, rejections = read(files_source(tmp_path / "f.csv", id_field="id"))
    assert [(document.id, document.text) for document in documents] == [("1", "good"), ("4", "also\ngood")]
    assert [(rejection.record, rejection.lost) for rejection in rejections] == [(2, False), (3, False), (5, True)]


def test_an_unclosed_json_array_is_named(tmp_path):
    (tmp_path / "f.json").write_text('[{"text": "a"}, {"text": "b"}, {"te')
    documents, rejections = read(files_source(tmp_path / "f.json"))
    assert texts(documents) == ["a", "b"]
    assert [(rejection.record, rejection.lost) for rejection in rejections] == [(3, True)]


def test_a_torn_row_group_costs_its_own_rows(tmp_path):
    records = [{"text": f"row {number} " + str(number ** 9) * 30} for number in range(900)]
    path = tmp_path / "f.parquet"
    pq.write_table(table(records), path, row_group_size=300, use_dictionary=False)
    column = pq.ParquetFile(path).metadata.row_group(1).column(0)
    data = bytearray(path.read_bytes())
    start = column.data_page_offset
    data[start:start + 100] = b"\xff" * 100
    path.write_bytes(data)
    documents, rejections = read(files_source(path))
    assert texts(documents) == [record["text"] for record in records[:300] + records[600:]]
    assert [document.id for document in documents][300] == "f.parquet:601"
    assert [(rejection.record, rejection.documents) for rejection in rejections] == [(301, 300)]


@pytest.mark.parametrize("kind", ["parquet", "arrow", "arrow stream"])
def test_a_cut_columnar_file_is_named(tmp_path, kind):
    path = tmp_path / f"f.{kind.split()[0]}"
    data = file_bytes(kind, tmp_path)
    path.write_bytes(data[:len(data) * 3 // 5])
    documents, rejections = read(files_source(path))
    assert len(documents) < 3 and len(rejections) == 1
    assert rejections[0].lost and rejections[0].file == path.name


def test_a_broken_value_in_a_column_costs_itself_alone(tmp_path):
    values = pa.array([b"good", b"bad \xff", None, b"fine"]).view(pa.string())
    with pa.OSFile(str(tmp_path / "f.arrow"), "wb") as sink, \
            pa.ipc.new_file(sink, pa.schema([("text", pa.string())])) as writer:
        writer.write_batch(pa.record_batch([values], ["text"]))
    documents, rejections = read(files_source(tmp_path / "f.arrow"))
    assert texts(documents) == ["good", "fine"]
    assert [rejection.record for rejection in rejections] == [2, 3]
