"""Files read in parts: every document once, in order, as if the file were read whole; and what parts say of it."""

import codecs
import hashlib
import json
import os
from itertools import chain, pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pipeline.config.data import FilesSource, ShardConfig
from pipeline.contract.content_hash import hash_of_blocks
from pipeline.data import sources, streams
from pipeline.data.documents import Rejection
from pipeline.data.reading import unit_documents
from pipeline.data.sources import reading_units
from pipeline.data.zstd_frames import frame_starts
from pipeline.errors import UserError
from tests.block_digests import block_digests

SETTINGS = settings(max_examples=100, deadline=None,
                    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Parts of any size, and hashes of blocks of a few bytes."""
    monkeypatch.setattr(sources, "LEAST_PART", 1)


def source_of(path, **fields):
    return FilesSource(kind="files", name="s", paths=[str(path)], **fields)


def payload_of(path, *borders, megabytes=128.0, **fields):
    """The payload of a unit that reads the pieces of a file between these borders."""
    about = path.stat()
    pieces = [{"name": f"s/{path.name}", "path": str(path), "bytes": about.st_size, "mtime_ns": about.st_mtime_ns,
               "start": start, "stop": stop} for start, stop in pairwise(borders)]
    return {"name": "s-00000", "source": source_of(path, **fields).model_dump(mode="json"), "pieces": pieces,
            "max_document_mb": megabytes}


def read(payload):
    """(texts, ids, rejections, records of what was read)."""
    seen = []
    items = list(unit_documents(payload, seen.append))
    documents = [item[0] for item in items if not isinstance(item, Rejection)]
    return ([document.text for document in documents], [document.id for document in documents],
            [item for item in items if isinstance(item, Rejection)], seen)


def in_parts(path, borders, **fields):
    """What each part gives, in order, each read as a unit of its own."""
    found = [read(payload_of(path, start, stop, **fields)) for start, stop in pairwise(borders)]
    return [list(chain.from_iterable(part[field] for part in found)) for field in range(4)]


def all_borders(size, inner):
    return [0, *sorted({border % size for border in inner} - {0}), size] if size > 1 else [0, size]


LINE = st.one_of(
    st.sampled_from([b"", b" ", "\u2028".encode(), b"\r", b'{"text": "cut', b'{"text": "\xe2\x82"}', b"\xff", b"7"]),
    st.text(alphabet="ab\u2028\x85\r\u20ac\U0001f600\0 ", max_size=6).map(lambda text: json.dumps(
        {"text": text}, ensure_ascii=False).encode()))


@SETTINGS
@given(rows=st.lists(LINE, min_size=1, max_size=12), bom=st.booleans(), end=st.sampled_from([b"", b"\n", b"\r\n"]),
       joint=st.sampled_from([b"\n", b"\r\n", b"\n\n"]), inner=st.lists(st.integers(0, 1000), max_size=8))
def test_lines(tmp_path, rows, bom, end, joint, inner):
    path = tmp_path / "f.jsonl"
    data = b"\xef\xbb\xbf" * bom + joint.join(rows) + end
    if not data:
        return
    path.write_bytes(data)
    whole = read(payload_of(path, 0, len(data)))
    parts = in_parts(path, all_borders(len(data), inner))
    assert parts[0] == whole[0]
    assert [(own.reason, own.documents, own.lost) for own in parts[2]] == [
        (own.reason, own.documents, own.lost) for own in whole[2]]
    if len(all_borders(len(data), inner)) > 2:
        for text, name in zip(parts[0], parts[1], strict=True):
            offset = int(name.partition("@")[2])
            assert json.loads(data[offset:].partition(b"\n")[0])["text"] == text


@SETTINGS
@given(separator=st.sampled_from(["\n\n", "\n", "--", "aba", "abaaba", "aabaa", "abab", "<|end|>", "\u20ac", "aXa"]),
       pieces=st.lists(st.sampled_from(["a", "b", "ab", "aba", "\n", "\n\n\n", "-", "X", "<|end|>", "\u20ac", "<",
                                        "abaaba", "aabaa"]), max_size=24),
       bom=st.booleans(), inner=st.lists(st.integers(0, 1000), max_size=10))
@example(separator="\n\n", pieces=["\n\n\n"] * 8, bom=False, inner=list(range(24)))
@example(separator="aba", pieces=["aba"] * 5 + ["b", "aba"], bom=False, inner=list(range(24)))
def test_separators_that_may_overlap(tmp_path, separator, pieces, bom, inner):
    path, text = tmp_path / "f.txt", "".join(pieces)
    data = b"\xef\xbb\xbf" * bom + text.encode()
    if not data:
        return
    path.write_bytes(data)
    expected = text.split(separator)
    expected = expected if expected[-1] else expected[:-1]
    assert read(payload_of(path, 0, len(data), separator=separator))[0] == expected
    borders = all_borders(len(data), inner)
    texts, ids, rejections, _ = in_parts(path, borders, separator=separator)
    assert texts == expected and rejections == []
    if len(borders) > 2:
        for found, name in zip(texts, ids, strict=True):
            assert data[int(name.partition("@")[2]):].startswith(found.encode())


@SETTINGS
@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=30), kind=st.sampled_from(["lines", "separated"]),
       inner=st.lists(st.integers(0, 1000), max_size=6), limit=st.integers(3, 30), bom=st.booleans())
def test_what_is_too_long_costs_itself_alone_wherever_the_borders_are(tmp_path, sizes, kind, inner, limit, bom):
    ending = "jsonl" if kind == "lines" else "txt"
    path, fields = tmp_path / f"f.{ending}", {} if kind == "lines" else {"separator": "||"}
    rows = ['{"text":"' + "x" * size + '"}' if kind == "lines" else f"{number:x}" * size
            for number, size in enumerate(sizes)]
    data = ("\n" if kind == "lines" else "||").join(rows).encode()
    if not data:
        return
    data = codecs.BOM_UTF8 * bom + data
    path.write_bytes(data)
    limit += 11 * (kind == "lines")
    texts, _, rejections, _ = in_parts(path, all_borders(len(data), inner), megabytes=limit / 1e6, **fields)
    short = [row for row in rows if len(row) <= limit]
    if kind == "separated" and not rows[-1]:
        short = short[:-1]  # nothing after the last separator
    assert texts == ([json.loads(row)["text"] for row in short] if kind == "lines" else short)
    assert len(rejections) == sum(len(row) > limit for row in rows)
    for own in rejections:
        assert "longer than shard.max_document_mb" in own.reason and own.documents == 1 and not own.lost
        if isinstance(own.record, str):
            assert data[int(own.record):].startswith(tuple(row.encode() for row in rows if len(row) > limit))


def frame(data, skipped=b""):
    """A zstd frame with `data`, after one that holds nothing to be read."""
    before = b"\x53\x2a\x4d\x18" + len(skipped).to_bytes(4, "little") + skipped if skipped else b""
    return before + zstandard.ZstdCompressor(write_checksum=len(data) % 2 == 0).compress(data)


@SETTINGS
@given(rows=st.lists(LINE, min_size=1, max_size=12), cuts=st.lists(st.integers(0, 200), max_size=6),
       inner=st.lists(st.integers(0, 1000), max_size=8), separator=st.sampled_from([None, "\n\n", "\n", "aba"]),
       skipped=st.sampled_from([b"", b"x", zstandard.compress(b'{"text": "hidden"}\n')]))
def test_frames_that_end_in_the_middle_of_records(tmp_path, rows, cuts, inner, separator, skipped):
    data = b"\n".join(rows).replace(b"b", b"aba" if separator == "aba" else b"\n\n")
    path = tmp_path / ("f.jsonl.zst" if separator is None else "f.txt.zst")
    parts = [data[start:stop] for start, stop in pairwise(all_borders(len(data), cuts) if data else [0, 0])]
    path.write_bytes(b"".join(frame(part, skipped) for part in parts))
    size, fields = path.stat().st_size, {} if separator is None else {"separator": separator}
    whole = read(payload_of(path, 0, size, **fields))
    for borders in (all_borders(size, inner), [*range(0, size, max(1, size // 20)), size]):
        texts, ids, rejections, _ = in_parts(path, borders, **fields)
        assert texts == whole[0] and [own.reason for own in rejections] == [own.reason for own in whole[2]]
        assert len(set(ids)) == len(ids)
        if len(parts) == 1:
            assert ids == whole[1]  # as before: a single frame is read in one go
    starts = frame_starts(path, tmp_path / "frames")
    assert len(starts) == len(parts) and (frame_starts(path, tmp_path / "frames") == starts).all()
    assert len(list((tmp_path / "frames").iterdir())) == 1
    (tmp_path / "frames" / next((tmp_path / "frames").iterdir()).name).unlink()


def test_frames_are_found_among_blocks_of_every_kind(tmp_path):
    """Stored, repeated and compressed blocks, sizes unknown and known, and whole frames as the content of others."""
    incompressible, zeros = os.urandom(300_000), bytes(400_000)
    texts = [incompressible, zeros, b"words " * 90_000, frame(b"inner") * 9, b""]
    parts = [zstandard.ZstdCompressor(write_content_size=known).compress(text) for text in texts
             for known in (True, False)]
    (tmp_path / "f.zst").write_bytes(b"".join(parts))
    assert frame_starts(tmp_path / "f.zst").tolist() == [sum(map(len, parts[:number])) for number in range(len(parts))]
    (tmp_path / "g.zst").write_bytes(b"".join(parts)[:-30])
    assert frame_starts(tmp_path / "g.zst").tolist() == frame_starts(tmp_path / "f.zst").tolist()[
        :sum(sum(map(len, parts[:number])) < sum(map(len, parts)) - 38 for number in range(len(parts)))]


@SETTINGS
@given(groups=st.lists(st.integers(0, 6), min_size=1, max_size=8), inner=st.lists(st.integers(0, 5000), max_size=8))
def test_row_groups(tmp_path, groups, inner):
    path, first = tmp_path / "f.parquet", 0
    schema = pa.schema([("text", pa.string()), ("other", pa.int64())])
    with pq.ParquetWriter(path, schema) as writer:
        for rows in groups:
            texts = [f"row {first + number} " + "x" * number * 50 for number in range(rows)]
            writer.write_table(pa.table({"text": texts, "other": list(range(rows))}, schema), max(1, rows))
            first += rows
    size = path.stat().st_size
    whole = read(payload_of(path, 0, size))
    assert len(whole[0]) == sum(groups)
    assert in_parts(path, all_borders(size, inner))[:3] == list(whole[:3])  # ids too: a footer knows the numbers


@SETTINGS
@given(batches=st.lists(st.integers(0, 4), min_size=1, max_size=8), inner=st.lists(st.integers(0, 5000), max_size=8),
       stream=st.booleans())
def test_record_batches(tmp_path, batches, inner, stream):
    path, first = tmp_path / "f.arrow", 0
    schema = pa.schema([("text", pa.string())])
    with pa.OSFile(str(path), "wb") as sink, (pa.ipc.new_stream if stream else pa.ipc.new_file)(sink, schema) as writer:
        for rows in batches:
            texts = pa.array([f"row {first + number} " + "x" * number * 50 for number in range(rows)], pa.string())
            writer.write_batch(pa.record_batch([texts], schema=schema))
            first += rows
    size = path.stat().st_size
    whole, borders = read(payload_of(path, 0, size)), all_borders(size, inner)
    parts = in_parts(path, borders)
    assert parts[0] == whole[0] and len(whole[0]) == sum(batches)
    if len(borders) > 2 and not stream:
        assert parts[1] == [f"f.arrow@{batch}:{row + 1}" for batch, rows in enumerate(batches) for row in range(rows)]


@pytest.mark.parametrize("ending", ["parquet", "arrow", "jsonl"])
def test_what_is_wrong_with_the_file_as_a_whole_is_said_once(tmp_path, ending):
    path = tmp_path / f"f.{ending}"
    path.write_bytes(b"PAR1 and no more" * 10 if ending != "jsonl" else b"\x1f\x8b" * 80)
    size = path.stat().st_size
    _, _, rejections, seen = in_parts(path, [0, size // 3, size // 2, size])
    assert [own.lost for own in rejections] == [True] and len(seen) == 3


def test_parts_say_what_the_file_holds(tmp_path, monkeypatch):
    path = tmp_path / "f.jsonl"
    rows = [json.dumps({"text": f"{number} " * (number % 50)}) for number in range(3000)]
    path.write_text("\n".join(rows))
    size = path.stat().st_size
    for module in ("pipeline.contract.content_hash", "pipeline.data.streams"):
        monkeypatch.setattr(f"{module}.BLOCK_BYTES", 1000)
    monkeypatch.setattr(streams, "BUFFER", 4096)
    whole = read(payload_of(path, 0, size))[3]
    assert whole == [{"path": str(path), "name": "s/f.jsonl", "bytes": size, "mtime_ns": path.stat().st_mtime_ns,
                      "whole": True, "start": 0, "digests": [hashlib.sha256(path.read_bytes()).hexdigest()]}]
    borders = [0, 1, 999, 1000, 1001, 70_000, 70_500, 70_999, size - 1, size]
    seen = in_parts(path, borders)[3]
    assert [own["start"] for own in seen] == borders[:-1] and not any(own["whole"] for own in seen)
    for own, stop in zip(seen, borders[1:], strict=True):
        assert own["digests"] == block_digests(path, own["start"], stop)
    made = hash_of_blocks(chain.from_iterable(own["digests"] for own in seen))
    assert made == hash_of_blocks(block_digests(path, 0, size))


def test_nothing_is_read_twice(tmp_path, monkeypatch):
    """Hashing included: a part reads its own bytes and what its last record needs beyond them."""
    import gzip
    path = tmp_path / "f.jsonl"
    rows = [json.dumps({"text": f"{number} " * 20}) for number in range(5000)]
    path.write_text("\n".join(rows))
    packed = tmp_path / "g.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes() + os.urandom(1000).hex().encode(), mtime=0))
    monkeypatch.setattr("pipeline.data.streams.BLOCK_BYTES", 10_000)
    monkeypatch.setattr(streams, "BUFFER", 1000)
    taken, opened = [], open

    def counted(file, *arguments, **options):
        made = opened(file, *arguments, **options)
        if options.get("buffering") == 0:
            def readinto(buffer, own=made.readinto):
                count = own(buffer)
                taken.append(count)
                return count
            made = Wrapped(made, readinto)
        return made
    monkeypatch.setattr("builtins.open", counted)
    size = path.stat().st_size
    read(payload_of(path, 0, size))
    assert sum(taken) == size
    taken.clear()
    read(payload_of(path, 100_000, 200_000))
    assert 100_000 <= sum(taken) < 103_000
    taken.clear()
    read(payload_of(packed, 0, packed.stat().st_size))
    assert sum(taken) == packed.stat().st_size


class Wrapped:
    """A file whose readinto is another."""

    def __init__(self, file, readinto):
        self.file, self.readinto = file, readinto

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()


@pytest.mark.parametrize("change", ["size", "time", "while it is read"])
def test_a_file_that_changes_is_refused_by_name(tmp_path, change):
    path = tmp_path / "f.jsonl"
    path.write_text('{"text": "one"}\n' * 9)
    payload = payload_of(path, 0, path.stat().st_size)
    if change == "size":
        path.write_text('{"text": "one"}\n' * 8)
    elif change == "time":
        os.utime(path, ns=(1, 1))
    items = unit_documents(payload)
    if change == "while it is read":
        next(items)
        os.utime(path, ns=(1, 1))
    with pytest.raises(UserError, match=r"f\.jsonl is not what it was when the stage shard began"):
        list(items)


def make(path, size):
    with open(path, "wb") as file:
        file.truncate(size)
    return (f"s/{path.name}", path)


def test_large_files_are_cut_by_their_size_and_small_ones_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "LEAST_PART", 1000)
    files = [make(tmp_path / name, size) for name, size in (
        ("a.jsonl", 900), ("b.jsonl", 5000), ("c.jsonl", 10), ("d.jsonl", 20), ("e.jsonl.gz", 9000),
        ("f.parquet", 2001), ("g.jsonl", 2000), ("h.csv", 9000), ("i.txt", 9000))]
    config = ShardConfig(sources=[source_of(tmp_path / "*")], shard_mb=0.001)
    units = reading_units(config, files)
    assert [name for name, _ in units] == [f"s-{number:05d}" for number in range(len(units))]
    cut = [[(Path(piece["path"]).name, piece["start"], piece["stop"]) for piece in payload["pieces"]]
           for _, payload in units]
    assert cut == [[("a.jsonl", 0, 900)], *([("b.jsonl", start, start + 1000)] for start in range(0, 5000, 1000)),
                   [("c.jsonl", 0, 10), ("d.jsonl", 0, 20), ("e.jsonl.gz", 0, 9000)], [("f.parquet", 0, 1000)],
                   [("f.parquet", 1000, 2001)], [("g.jsonl", 0, 2000)], [("h.csv", 0, 9000)], [("i.txt", 0, 9000)]]
    for asked in ({"separator": "||", "format": "txt"}, {"format": "jsonl"}):
        config = ShardConfig(sources=[source_of(tmp_path / "*", **asked)], shard_mb=0.001)
        assert len(reading_units(config, [make(tmp_path / "i.txt", 9000)])) == 9
    monkeypatch.setattr(sources, "LEAST_PART", 3000)  # parts are not made smaller than that, however small shards are
    assert len(reading_units(config, [make(tmp_path / "i.jsonl", 9000)])) == 3
    assert len(reading_units(config, [make(tmp_path / "i.jsonl", 6000)])) == 1


def test_a_file_of_50_gb_keeps_64_workers_busy(tmp_path):
    units = reading_units(ShardConfig(sources=[source_of(tmp_path / "*")]), [make(tmp_path / "a.jsonl", 50 * 10**9)])
    sizes = [payload["pieces"][0]["stop"] - payload["pieces"][0]["start"] for _, payload in units]
    assert sum(sizes) == 50 * 10**9 and len(sizes) > 10 * 64 and max(sizes) < 1.2 * 64e6
    assert all(payload["pieces"][0]["start"] % (1 << 23) == 0 for _, payload in units)  # each block hashed by one
