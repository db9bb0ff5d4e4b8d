"""Every format of every source, whole and damaged: what is read, in which order, and what is named as unreadable."""

import csv
import gzip
import json
import random
import subprocess
import sys
import sysconfig
import zlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from pipeline.config.data import FilesSource, HubSource, ShardConfig, StdlibSource
from pipeline.config.tree import Config
from pipeline.data import framing, readers
from pipeline.data.documents import Rejection
from pipeline.data.reading import unit_documents
from pipeline.data.sources import input_files, reading_units
from pipeline.errors import UserError

RECORDS = [{"text": "one\ntwo", "name": "a", "stars": 1},
           {"text": 'comma, "quote", ü €  \u2028', "name": "b", "stars": 2},
           {"text": "x" * 3000 + "\r\nend", "name": "c", "stars": None}]
COMPRESS = {"": lambda data: data, ".gz": lambda data: gzip.compress(data, mtime=0),
            ".zst": zstandard.ZstdCompressor().compress}


def config_of(*sources, **settings):
    return Config(shard=ShardConfig(sources=list(sources), **settings))


def read(*sources, **settings):
    """(documents, rejections) of the sources, through files and units as the stage reads them."""
    config = config_of(*sources, **settings)
    items = [item for _, payload in reading_units(config.shard, input_files(config))
             for item in unit_documents(payload)]
    return ([item[0] for item in items if not isinstance(item, Rejection)],
            [item for item in items if isinstance(item, Rejection)])


def files_source(*paths, **fields):
    return FilesSource(kind="files", name="s", paths=[str(path) for path in paths], **fields)


def texts(documents):
    return [document.text for document in documents]


def table(records=RECORDS):
    return pa.table({name: [record[name] for record in records] for name in records[0]})


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def file_bytes(kind, folder):
    """RECORDS in the format `kind`, as bytes."""
    path = folder / "made"
    if kind == "jsonl":
        return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS).encode()
    if kind == "json":
        return json.dumps(RECORDS, indent=2).encode()
    if kind == "csv":
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(RECORDS[0]))
            writer.writeheader()
            writer.writerows(RECORDS)
    elif kind == "parquet":
        pq.write_table(table(), path, row_group_size=2)
    else:
        with pa.OSFile(str(path), "wb") as sink, \
                (pa.ipc.new_file if kind == "arrow" else pa.ipc.new_stream)(sink, table().schema) as writer:
            writer.write_table(table(), max_chunksize=2)
    return path.read_bytes()


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


def test_documents_come_by_file_name_then_record_whatever_the_units(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "sub/a.jsonl", "a0.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_jsonl(tmp_path / name, [{"text": f"{name} {record}"} for record in range(3)])
    source = files_source(tmp_path / "**" / "*.jsonl")
    expected = [f"{name}:{record}" for name in sorted(["b.jsonl", "a.jsonl", "sub/a.jsonl", "a0.jsonl"])
                for record in (1, 2, 3)]
    for megabytes in (1e-5, 1e-4, 1.0):
        assert [document.id for document in read(source, shard_mb=megabytes)[0]] == expected
    assert [name for name, _ in input_files(config_of(source))] == [
        "s/a.jsonl", "s/a0.jsonl", "s/b.jsonl", "s/sub/a.jsonl"]
    assert len(reading_units(ShardConfig(sources=[source], shard_mb=1e-5), input_files(config_of(source)))) == 4


def test_names_do_not_depend_on_where_the_files_lie(tmp_path):
    for place in ("here", "there/and/deeper"):
        (tmp_path / place / "x").mkdir(parents=True)
        (tmp_path / place / "x" / "one.txt").write_text("1")
        (tmp_path / place / "two.txt").write_text("2")
    named = [[name for name, _ in input_files(config_of(files_source(tmp_path / place / "**" / "*.txt")))]
             for place in ("here", "there/and/deeper")]
    assert named == [["s/two.txt", "s/x/one.txt"]] * 2


def test_a_file_is_read_once_however_its_path_is_written(tmp_path, monkeypatch):
    for folder in ("run", "data/a"):
        (tmp_path / folder).mkdir(parents=True)
    write_jsonl(tmp_path / "data" / "a" / "f.jsonl", RECORDS)
    (tmp_path / "run" / "link").symlink_to(tmp_path / "data" / "a")
    monkeypatch.chdir(tmp_path / "run")
    source = files_source("../data/a/*.jsonl", tmp_path / "data" / "a" / "*.jsonl", "link/../a/f.jsonl",
                          f"file://{tmp_path}/run/../data/a/f.jsonl")
    assert input_files(config_of(source)) == [("s/f.jsonl", tmp_path / "data" / "a" / "f.jsonl")]
    through = files_source("link/f.jsonl")
    assert input_files(config_of(through)) == [("s/f.jsonl", tmp_path / "run" / "link" / "f.jsonl")]


def test_stdlib_is_this_pythons_own_sources_without_tests_and_packages():
    names = [name for name, _ in input_files(config_of(StdlibSource(kind="stdlib")))]
    assert {"stdlib/os.py", "stdlib/json/decoder.py", "stdlib/asyncio/tasks.py"} < set(names)
    parts = {part for name in names for part in Path(name).parts}
    assert not parts & {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
    documents, rejections = read(StdlibSource(kind="stdlib"))
    assert len(documents) == len(names) and rejections == []
    ids = {document.id: document.text for document in documents}
    assert ids["json/decoder.py"] == (Path(sysconfig.get_path("stdlib")) / "json" / "decoder.py").read_text("utf-8")


def test_stdlib_sources_are_read_in_the_encoding_they_declare(tmp_path, monkeypatch):
    (tmp_path / "latin.py").write_bytes("# coding: latin-1\nname = 'Grüße'\n".encode("latin-1"))
    (tmp_path / "wrong.py").write_bytes(b"name = '\xff'\n")
    (tmp_path / "unknown.py").write_bytes(b"# coding: klingon\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_it.py").write_text("assert True\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    documents, rejections = read(StdlibSource(kind="stdlib"))
    assert texts(documents) == ["# coding: latin-1\nname = 'Grüße'\n"]
    assert [rejection.file for rejection in rejections] == ["unknown.py", "wrong.py"]
    assert len(read(StdlibSource(kind="stdlib", include_tests=True))[0]) == 2


def test_problems_with_paths_are_told_all_at_once(tmp_path):
    (tmp_path / "notes.md").write_text("x")
    first = FilesSource(kind="files", name="first", paths=[str(tmp_path / "*.txt"), str(tmp_path / "gone.jsonl")])
    second = FilesSource(kind="files", name="second", paths=[str(tmp_path / "*.md")])
    with pytest.raises(UserError) as caught:
        input_files(config_of(first, second))
    message = str(caught.value)
    assert "no file matches" in message and "*.txt" in message
    assert f"{tmp_path / 'gone.jsonl'} does not exist" in message
    assert "second" in message and "notes.md" in message and ".parquet" in message
    assert read(second.model_copy(update={"format": "txt"}))[0][0].text == "x"


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


def hub_source(folder, **fields):
    return HubSource(kind="hf", name="h", dataset=str(folder), **fields)


@pytest.fixture(scope="module")
def dataset_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dataset")
    for part in range(2):
        write_jsonl(folder / f"part-{part}.jsonl", [{"text": f"text {part} {row}", "stars": row} for row in range(20)])
    return folder


@pytest.mark.parametrize("streaming", [True, False])
def test_a_local_hugging_face_dataset(dataset_folder, tmp_path, monkeypatch, streaming):
    import datasets
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    source = hub_source(dataset_folder, streaming=streaming, meta_fields=["stars"], limit=30)
    documents, rejections = read(source)
    assert texts(documents) == [f"text {part} {row}" for part in range(2) for row in range(20)][:30]
    assert rejections == [] and documents[29].id == "train:30" and documents[29].meta == {"stars": 9}
    assert [name for name, _ in input_files(config_of(source))] == ["h/part-0.jsonl", "h/part-1.jsonl"]


def test_a_hugging_face_dataset_that_cannot_be_loaded_says_so(dataset_folder, tmp_path):
    with pytest.raises(UserError, match=r"no column 'body'.*text, stars"):
        read(hub_source(dataset_folder, text_field="body"))
    with pytest.raises(UserError, match=r"(?s)split='nosplit'.*failed"):
        read(hub_source(dataset_folder, split="nosplit"))
    (tmp_path / "f.jsonl").write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(UserError, match=r"reading broke off.*kind: files"):
        read(hub_source(tmp_path))


def test_a_local_dataset_that_is_not_there_is_refused_first(tmp_path):
    (tmp_path / "f.jsonl").write_text("{}")
    for name in (tmp_path / "gone", tmp_path / "f.jsonl"):
        with pytest.raises(UserError, match=r"is no folder.*kind: files"):
            input_files(config_of(hub_source(name)))
    (tmp_path / "bare").mkdir()
    with pytest.raises(UserError, match="holds no files"):
        input_files(config_of(hub_source(tmp_path / "bare")))
    assert input_files(config_of(hub_source("someone/something"))) == []


def test_a_file_that_vanishes_is_not_taken_for_a_broken_one(tmp_path):
    (tmp_path / "f.jsonl").write_text('{"text": "a"}')
    source = files_source(tmp_path / "f.jsonl")
    [(_, payload)] = reading_units(ShardConfig(sources=[source]), input_files(config_of(source)))
    (tmp_path / "f.jsonl").unlink()
    with pytest.raises(UserError, match=r"f\.jsonl cannot be read: No such file"):
        list(unit_documents(payload))


def test_the_launcher_reads_the_list_of_files_without_heavy_libraries():
    code = ("import sys, pipeline.data.sources; "
            "print([name for name in ('torch', 'pyarrow', 'datasets', 'webdataset') if name in sys.modules])")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                            cwd=Path(__file__).resolve().parents[2])
    assert result.stdout.strip() == "[]"
