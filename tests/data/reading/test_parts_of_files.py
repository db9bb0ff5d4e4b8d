"""Files read in parts: every document once, in order, as if the file were read whole; and what parts say of it."""

import codecs
import hashlib
import json
import os
from itertools import chain, pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from drover.pipeline.config.data import ShardConfig
from drover.pipeline.contract.inputs import gathered, listed_files
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import changed_ns
from drover.pipeline.data import sources, streams
from drover.pipeline.data.reading import unit_documents
from drover.pipeline.data.sources import reading_units
from drover.pipeline.storage.object_files import content_hash
from tests.data.source_files import batch, files_source, lines, payload_of, separated, texts, write_batches
from tests.refusal import refused


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(streams, "CHUNK", 7)


def read(payload):
    """(texts, ids, rejections, records of what was read)."""
    seen = []
    documents, rejections = separated(unit_documents(payload, seen.append))
    return texts(documents), [document.id for document in documents], rejections, seen


def in_parts(path, borders, **fields):
    """What each part gives, in order, each read as a unit of its own."""
    parts = [read(payload_of(path, start, stop, **fields)) for start, stop in pairwise(borders)]
    return [list(chain.from_iterable(part[field] for part in parts)) for field in range(4)]


def all_borders(size, inner):
    return [0, *sorted({border % max(size, 1) for border in inner} - {0}), size]


LINE = st.one_of(
    st.sampled_from([b"", b" ", "\u2028".encode(), b"\r", b'{"text": "cut', b'{"text": "\xe2\x82"}', b"\xff", b"7",
                     b"x" * 60]),
    st.text(alphabet="ab\u2028\x85\r\u20ac\U0001f600\0 ", max_size=6).map(lambda text: json.dumps(
        {"text": text}, ensure_ascii=False).encode()))
INNER = st.lists(st.integers(0, 5000), max_size=8)


LIMITS = st.integers(3, 40).map(lambda limit: limit / 1e6) | st.just(128.0)


@settings(max_examples=150)
@given(rows=st.lists(LINE, min_size=1, max_size=12), joint=st.sampled_from([b"\n", b"\r\n", b"\n\n"]), inner=INNER,
       bom=st.booleans(), megabytes=LIMITS)
def test_lines(tmp_path, rows, joint, inner, bom, megabytes):
    """How separators are found has the next test."""
    path, data = tmp_path / "f.jsonl", codecs.BOM_UTF8 * bom + joint.join(rows)
    path.write_bytes(data)
    undivided, parts = ((result[0], [(own.reason, own.documents, own.lost, own.lost_bytes) for own in result[2]])
                        for result in (read(payload_of(path, megabytes=megabytes)),
                                       in_parts(path, all_borders(len(data), inner), megabytes=megabytes)))
    assert parts == undivided


@settings(max_examples=150)
@given(separator=st.sampled_from(["\n\n", "\n", "--", "aba", "abaaba", "aabaa", "abab", "<|end|>", "\u20ac", "aXa"]),
       pieces=st.lists(st.sampled_from(["a", "b", "ab", "aba", "\n", "\n\n\n", "-", "X", "<|end|>", "\u20ac", "<",
                                        "abaaba", "aabaa", "x" * 30]), min_size=1, max_size=24),
       bom=st.booleans(), megabytes=LIMITS)
@example(separator="\n\n", pieces=["\n\n\n"] * 8, bom=False, megabytes=1.0)
@example(separator="abaaba", pieces=["abaaba", "aba", "abaaba", "b"] * 3, bom=False, megabytes=1.0)
def test_texts_between_separators(tmp_path, separator, pieces, bom, megabytes):
    path, text = tmp_path / "f.txt", "".join(pieces)
    path.write_bytes(codecs.BOM_UTF8 * bom + text.encode())
    *every, last = (own.encode() for own in text.split(separator))
    limit = max(len(separator.encode()), round(megabytes * 1e6))
    every += [last] if last else []
    texts, _, rejections, _ = read(payload_of(path, separator=separator, megabytes=limit / 1e6))
    assert [own.encode() for own in texts] == [own for own in every if len(own) <= limit]
    assert len(rejections) == sum(len(own) > limit for own in every)
    assert all("longer than shard.max_document_mb" in own.reason for own in rejections)


@settings(max_examples=60)
@given(sizes=st.lists(st.integers(0, 6), min_size=1, max_size=8), inner=INNER)
def test_row_groups(tmp_path, sizes, inner):
    path, rows = tmp_path / "f.parquet", [f"row {row} " + "x" * row * 50 for row in range(6)]
    write_batches(path, *(batch(("text", rows))[:size] for size in sizes))
    for borders in ([0, path.stat().st_size], all_borders(path.stat().st_size, inner)):
        assert in_parts(path, borders)[:3] == [[row for size in sizes for row in rows[:size]],
                                               [f"f.parquet:{row + 1}" for row in range(sum(sizes))], []]


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_what_is_wrong_with_the_file_as_a_whole_is_said_once(tmp_path, ending):
    path = tmp_path / f"f.{ending}"
    path.write_bytes(b"PAR1 and no more" * 10 if ending != "jsonl" else b"\x1f\x8b" * 80)
    _, _, rejections, seen = in_parts(path, [0, 50, 80, 160])
    assert [own.lost for own in rejections] == [True] and len(seen) == 3


def test_the_first_part_has_the_hash_of_the_file(tmp_path, monkeypatch):
    """Of whole files, tests/storage/test_object_sources.py has it."""
    path = tmp_path / "f.jsonl"
    path.write_bytes(lines({"text": f"{number} " * (number % 50)} for number in range(3000)))
    size = path.stat().st_size
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(streams, "BUFFER", 1000)
    about = {"path": str(path), "name": "s/f.jsonl", "bytes": size, "mtime_ns": changed_ns(path.stat())}
    of_source = {"source": "s", "file": "f.jsonl"}
    assert read(payload_of(path))[3] == [{**about, **of_source, "sha256": sha256, "documents": 3000}]
    borders = [0, 1, 999, 1000, 1001, 70_500, 70_999, size - 1, size]
    seen = in_parts(path, borders)[3]
    assert sum(part.pop("documents", 0) for part in seen) == 3000
    assert seen == [{**about, **of_source, "sha256": None if start else sha256} for start in borders[:-1]]
    assert content_hash(str(path)) == sha256 and gathered(seen[::-1]) == [{**about, "sha256": sha256}]


@pytest.mark.parametrize("change", ["size", "content", "while it is read"])
def test_a_file_that_changes_is_refused_by_name(tmp_path, change):
    """Also where its time is set back."""
    path = tmp_path / "f.jsonl"
    path.write_text('{"text": "one"}\n' * 9)
    stat, items = path.stat(), unit_documents(payload_of(path))
    if change == "while it is read":
        next(items)
    path.write_text('{"text": "two"}\n' * (8 if change == "size" else 9))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    refused(UserError, r"f\.jsonl is not what it was when the stage began", list, items)


def units_of(folder, files, source=(), **settings):
    """Units of reading files of these sizes that hold nothing; source: fields of their source."""
    for name, size in files.items():
        with open(folder / name, "wb") as file:
            file.truncate(size)
    config = ShardConfig(sources=[files_source(folder / "*", **dict(source))], **settings)
    units = reading_units(config, listed_files([(f"s/{name}", folder / name) for name in files]))
    assert [payload["name"] for payload in units] == [f"s-{number:05d}" for number in range(len(units))]
    return units


def cut(folder, files, shard_mb=0.001, **source):
    """(file, start, stop) of the pieces of each unit."""
    return [[(Path(piece["path"]).name, piece["start"], piece["stop"]) for piece in payload["pieces"]]
            for payload in units_of(folder, files, source, shard_mb=shard_mb)]


def test_large_files_are_cut_by_their_size_and_small_ones_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "LEAST_PART", 1000)
    units = cut(tmp_path, {"b.jsonl": 3000, "c.jsonl": 10, "d.jsonl": 20, "e.jsonl.gz": 9000, "f.parquet": 2001,
                           "g.jsonl": 2000, "h.csv": 9000, "i.txt": 9000})
    assert [" ".join(f"{name}[{start}:{stop}]" for name, start, stop in unit) for unit in units] == [
        "b.jsonl[0:1000]", "b.jsonl[1000:2000]", "b.jsonl[2000:3000]",
        "c.jsonl[0:10] d.jsonl[0:20] e.jsonl.gz[0:9000]", "f.parquet[0:1000]", "f.parquet[1000:2001]",
        "g.jsonl[0:2000]", "h.csv[0:9000]", "i.txt[0:9000]"]
    for fields, counts in (({"separator": "||", "format": "txt"}, [1, 1]), ({"format": "jsonl"}, [9, 1]),
                           ({"format": "jsonl", "encoding": "utf-16"}, [1, 1])):
        assert [len(cut(tmp_path, {name: 9000}, **fields)) for name in ("i.txt", "j.zst")] == counts
    monkeypatch.undo()
    pieces = [piece for [piece] in cut(tmp_path, {"a.jsonl": 50 * 10**9}, ShardConfig().shard_mb)]
    assert all(start % (1 << 23) == 0 and stop - start < 1.2 * 64e6 for _, start, stop in pieces)
