"""The portable checkpoint: what any ranks wrote in pieces, any others read in other pieces, bit for bit."""

import errno
import json
import random
import resource
import signal
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import drover.pipeline.formats.sharded_tensors as checkpoint
import drover.pipeline.formats.tensor_file as tensor_file
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import sha256_file
from drover.pipeline.formats.sharded_tensors import (
    INDEX,
    CheckpointReader,
    Index,
    TensorShard,
    overlapping,
    rectangles,
    write_index,
    write_part,
)
from tests.formats.cutting import cut, part_of, piece, rectangle, whole, write_checkpoint
from tests.refusal import refused

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]
SHAPES = st.lists(st.integers(0, 9), max_size=3)


def random_bits(shape, dtype, seed=0):
    """Any bit pattern the type has, NaNs among them."""
    generator = torch.Generator().manual_seed(seed)
    most = 2 if dtype == torch.bool else 256
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(most, (count,), generator=generator, dtype=torch.uint8).view(dtype).view(tuple(shape))


def same(a, b):
    one, other = (each.contiguous().reshape(-1).view(torch.uint8) for each in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(one, other)


@settings(max_examples=120, deadline=None)
@given(shape=SHAPES, dtype=st.sampled_from(DTYPES), ranks=st.integers(1, 4), cuts=st.integers(0, 7),
       seed=st.integers(0, 2**32 - 1))
def test_any_rectangle_of_any_pieces_is_read_back(shape, dtype, ranks, cuts, seed):
    chance, tensor = random.Random(seed), random_bits(shape, dtype, seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for record in write_checkpoint(folder, {"model.x": tensor}, ranks, cuts, seed):
            path = folder / record["path"]
            assert (record["bytes"], record["sha256"]) == (path.stat().st_size, sha256_file(path))
        with CheckpointReader(folder) as reader:
            assert reader.names() == ["model.x"] and reader.names("exp_avg.") == []
            assert reader.shape("model.x") == tensor.shape and reader.dtype("model.x") == dtype
            assert same(reader.read("model.x"), tensor)
            for _ in range(5):
                part = rectangle(shape, chance)
                assert same(reader.read("model.x", *part), part_of(tensor, *part))


@given(shape=SHAPES, seed=st.integers(0))
def test_a_flat_range_is_the_elements_of_its_rectangles(shape, seed):
    chance, tensor = random.Random(seed), torch.arange(torch.Size(shape).numel()).view(tuple(shape))
    start = chance.randint(0, tensor.numel())
    stop = chance.randint(start, tensor.numel())
    result = [part_of(tensor, offset, size).reshape(-1) for offset, size in rectangles(shape, start, stop)]
    assert all(part.numel() for part in result) and len(result) <= max(1, 2 * len(shape) - 1)
    assert torch.equal(torch.cat([torch.empty(0, dtype=torch.int64), *result]), torch.arange(start, stop))


@pytest.mark.parametrize(("block", "run"), [(1, 1), (100, 1 << 30), (1 << 30, 1 << 30), (1 << 30, 1)])
def test_every_way_of_reading_gives_the_same(tmp_path, monkeypatch, block, run):
    """Straight, row by row, in blocks: whichever the sizes choose."""
    monkeypatch.setattr(tensor_file, "_BLOCK", block)
    monkeypatch.setattr(tensor_file, "_RUN", run)
    tensor, chance = random_bits((13, 6, 11), torch.float32), random.Random(1)
    write_checkpoint(tmp_path, {"x": tensor}, cuts=6)
    with CheckpointReader(tmp_path) as reader:
        for part in (rectangle(tensor.shape, chance) for _ in range(30)):
            assert same(reader.read("x", *part), part_of(tensor, *part))


def test_the_library_reads_the_files(tmp_path):
    """Alone in its file a piece has the tensor's name; types of all widths lie in one file."""
    path, tensor = tmp_path / "a.safetensors", torch.randn(5, 4)
    alone = {"model.w": random_bits((4, 3), torch.bfloat16), "flag": torch.tensor([True, False, True]),
             "exp_avg.w": torch.randn(4, 3, dtype=torch.float64), "step": torch.tensor(7), "empty": torch.zeros(0, 5)}
    pieces = [piece(tensor, *part) for part in rectangles(tensor.shape, 3, 17)]
    write_part(path, {**{name: [whole(each)] for name, each in alone.items()}, "cut": pieces})
    expected = alone | {"cut@0,3": tensor[:1, 3:], "cut@1,0": tensor[1:4], "cut@4,0": tensor[4:, :1]}
    result = load_file(path)
    assert result.keys() == expected.keys() and all(same(result[name], each) for name, each in expected.items())
    for nothing in ({}, {"x": [TensorShard(torch.zeros(0, 4), (3, 0), (3, 4))]}):
        write_part(path, nothing)
        assert load_file(path) == {}


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_more_files_than_are_kept_open(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_OPEN_FILES", 2)
    tensor = torch.randn(7, 3)
    write_index(tmp_path, Index.joined(write_part(tmp_path / str(row), {"x": [piece(tensor, (row, 0), (1, 3))]})
                                       for row in range(7)))
    before = open_files()
    with CheckpointReader(tmp_path) as reader:
        for _ in range(2):
            assert torch.equal(reader.read("x"), tensor)
            assert open_files() == before + 2
    assert open_files() == before


@settings(max_examples=60, deadline=None)
@given(shape=st.lists(st.integers(1, 6), max_size=3), cuts=st.integers(1, 6), seed=st.integers(0))
def test_holes_and_overlaps_are_refused(shape, cuts, seed):
    chance, tensor = random.Random(seed), torch.zeros(shape)
    pieces = [rectangle for rectangle in cut(shape, cuts, chance) if torch.Size(rectangle[1]).numel()]
    victim = pieces.pop(chance.randrange(len(pieces)))
    with tempfile.TemporaryDirectory() as name:
        for wrong in ([*pieces, victim, victim], pieces, [*pieces, *pieces[:1]]):
            part = write_part(Path(name) / "part", {"x": [piece(tensor, *entry) for entry in wrong]})
            if part.tensors:
                refused(ValueError, r"x .* do not cover it exactly once", write_index, Path(name), part)
        assert not (Path(name) / INDEX).exists()


def cut_off(path, left=-1):
    path.write_bytes(path.read_bytes()[:left])


@pytest.mark.parametrize("damage", [
    Path.unlink, cut_off, lambda path: write_part(path, {"x": [whole(torch.zeros(9, 9))]})])
def test_a_damaged_part_is_named(tmp_path, damage):
    write_checkpoint(tmp_path, {"x": torch.randn(6, 4)}, ranks=1, cuts=0)
    damage(tmp_path / "rank-00000.safetensors")
    with CheckpointReader(tmp_path) as reader:
        assert "\n" not in refused(UserError, r"rank-00000\.safetensors", reader.read, "x")


@pytest.mark.parametrize(("damage", "message"), [
    (Path.unlink, "missing or damaged"),
    (lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 2})), "its form is not 4")])
def test_an_index_that_cannot_be_read_is_named(tmp_path, damage, message):
    """Damaged ones are tried by tests/test_fuzz.py."""
    write_checkpoint(tmp_path, {"x": torch.randn(6, 4)})
    damage(tmp_path / INDEX)
    assert "\n" not in refused(UserError, message, CheckpointReader, tmp_path)


@contextmanager
def files_of(most):
    """No file of this process can grow beyond so many bytes."""
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_writes_that_come_up_short_are_continued(tmp_path):
    """A file system may take less than it was given, and a limit may be hit in the middle."""
    with files_of(2000), pytest.raises(OSError) as caught:
        write_part(tmp_path / "x", {"x": [whole(torch.randn(1000))]})
    assert caught.value.errno == errno.EFBIG and (tmp_path / "x").stat().st_size == 2000


def test_tensors_that_are_cut_alike_share_a_cut_which_loses_no_piece_however_parts_are_joined():
    """ZeRO stage 3's ranges of 36 ranks, joined as a tree of ranks joins them."""
    owned = [list(rectangles((96, 40), start, min(start + 107, 96 * 40))) for start in range(0, 96 * 40, 107)]
    parts = [Index.of({"path": f"{rank}"}, dict.fromkeys(("x", "y"), ("F32", (96, 40), pieces)))
             for rank, pieces in enumerate(owned)]
    index = Index.joined(Index.joined(parts[at:at + 5]) for at in range(0, 36, 5))
    index.check()
    [cut] = index.cuts
    assert list(overlapping(cut, (0, 0), (96, 40))) == [
        (rank, rectangle) for rank, pieces in enumerate(owned) for rectangle in pieces]
