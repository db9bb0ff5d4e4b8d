"""The index of a checkpoint: no piece is lost, however it is put together; it grows with ranks plus tensors."""

import json
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.formats.shard_index import Entry, Index, check_cover, overlapping, rectangles, run_of
from pipeline.formats.sharded_tensors import INDEX, CheckpointReader, whole, write_index, write_part
from tests.formats.cutting import cut, piece

SHAPE = (96, 40)


def rows(rank, ranks, shape=SHAPE):
    """FSDP2's, as torch.chunk cuts."""
    step = -(-shape[0] // ranks)
    start, stop = min(shape[0], rank * step), min(shape[0], (rank + 1) * step)
    return [((start, 0), (stop - start, shape[1]))] if stop > start else []


def rows_of_a_slice(axis, tensor_ranks):
    """Tensor parallelism along an axis, FSDP2 in the slice."""
    def owned(rank, ranks):
        width = SHAPE[axis] // tensor_ranks
        shape = (width, SHAPE[1]) if axis == 0 else (SHAPE[0], width)
        at = width * (rank % tensor_ranks)
        return [((start + at, 0) if axis == 0 else (start, at), size)
                for (start, _), size in rows(rank // tensor_ranks, ranks // tensor_ranks, shape)]
    return owned


def flat_range(rank, ranks):
    """ZeRO stage 3."""
    step = -(-SHAPE[0] * SHAPE[1] // ranks)
    return list(rectangles(SHAPE, rank * step, min(SHAPE[0] * SHAPE[1], (rank + 1) * step)))


LAYOUTS = {"rows": rows, "tensor by rows": rows_of_a_slice(0, 4), "tensor by columns": rows_of_a_slice(1, 4),
           "three by rows": rows_of_a_slice(0, 3), "flat": flat_range}


def index_of(owned, ranks, names=("model.x",), arity=8):
    """Joined as a tree of ranks joins it."""
    parts = []
    for rank in range(ranks):
        runs = run_of(0, SHAPE, owned(rank, ranks))
        parts.append(Index(({"path": f"rank-{rank:05}.safetensors"},),
                           {name: Entry("F32", SHAPE, tuple(runs)) for name in names if runs}))
    while len(parts) > 1:
        parts = [Index.joined(parts[at:at + arity]) for at in range(0, len(parts), arity)]
    return parts[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_even_cuts_are_a_few_runs_and_lose_no_piece(layout):
    owned = LAYOUTS[layout]
    for ranks, arity in ((24, 2), (48, 5), (48, 1000)):
        entry = index_of(owned, ranks, arity=arity).tensors["model.x"]
        check_cover("model.x", entry)
        assert sorted(overlapping(entry, (0, 0), SHAPE)) == sorted(
            (rank, rectangle) for rank in range(ranks) for rectangle in owned(rank, ranks))
        assert len(entry.runs) <= 8, entry.runs


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_more_costs_the_same_on_any_number_of_ranks(layout, tmp_path):
    def size(ranks, tensors):
        names = [f"model.{number:02}" for number in range(tensors)]
        return write_index(tmp_path, index_of(LAYOUTS[layout], ranks, names))["bytes"]

    few, many = (size(ranks, 41) - size(ranks, 1) for ranks in (24, 96))
    assert many < 1.5 * few and few < 40 * 500


@settings(max_examples=60, deadline=None)
@given(shape=st.lists(st.integers(0, 6), max_size=3), files=st.integers(1, 9), cuts=st.integers(0, 9),
       seed=st.integers(0))
def test_any_pieces_joined_in_any_order_are_all_there(shape, files, cuts, seed):
    chance = random.Random(seed)
    owned = [[] for _ in range(files)]
    for offset, size in cut(shape, cuts, chance):
        owned[chance.randrange(files)].append((offset, size))
    parts = []
    for held in owned:
        kept = [found for found in held if torch.Size(found[1]).numel()]
        runs = run_of(0, shape, kept)
        parts.append(Index(({"path": "x"},), {"x": Entry("F32", tuple(shape), tuple(runs))} if runs else {}))
    while len(parts) > 1:
        at = chance.randrange(len(parts) - 1)
        parts[at:at + 2] = [Index.joined(parts[at:at + 2])]
    assert len(parts[0].files) == files
    if "x" in parts[0].tensors:
        entry = parts[0].tensors["x"]
        check_cover("x", entry)
        found = sorted(overlapping(entry, (0,) * len(shape), shape))
        assert found == sorted((file, part) for file, held in enumerate(owned) for part in held
                               if torch.Size(part[1]).numel())


OF_FORM_1 = {"version": 1, "files": ["rank-00000.safetensors", "rank-00001.safetensors"], "tensors": {
    "model.w": {"dtype": "F32", "shape": [4, 3], "pieces": [[0, [0, 0], [2, 3]], [1, [2, 0], [2, 3]]]},
    "exp_avg.w": {"dtype": "F32", "shape": [4, 3], "pieces": [
        [0, [0, 0], [1, 3]], [0, [1, 0], [1, 2]], [1, [1, 2], [1, 1]], [1, [2, 0], [2, 3]]]},
    "model.norm": {"dtype": "F32", "shape": [5], "pieces": [[0, [0], [3]], [1, [3], [2]]]},
    "random.cpu.0": {"dtype": "U8", "shape": [2], "pieces": [[0, [0], [2]]]},
    "random.cpu.1": {"dtype": "U8", "shape": [2], "pieces": [[1, [0], [2]]]}}}
"""As the first version of the form was written, whose files were as today's."""


def test_an_index_of_the_first_form_is_still_read(tmp_path):
    weight, moment, norm = torch.randn(4, 3), torch.randn(4, 3), torch.randn(5)
    state = torch.tensor([1, 2], dtype=torch.uint8)
    for rank, (mine, moments, normed) in enumerate([
            (((0, 0), (2, 3)), [((0, 0), (1, 3)), ((1, 0), (1, 2))], ((0,), (3,))),
            (((2, 0), (2, 3)), [((1, 2), (1, 1)), ((2, 0), (2, 3))], ((3,), (2,)))]):
        write_part(tmp_path / f"rank-{rank:05}.safetensors", {
            "model.w": piece(weight, *mine), "exp_avg.w": [piece(moment, *one) for one in moments],
            "model.norm": piece(norm, *normed), f"random.cpu.{rank}": whole(state + rank)})
    (tmp_path / INDEX).write_text(json.dumps(OF_FORM_1, separators=(",", ":")))
    with CheckpointReader(tmp_path) as reader:
        assert reader.names("random.") == ["random.cpu.0", "random.cpu.1"]
        assert torch.equal(reader.read("model.w"), weight) and torch.equal(reader.read("model.norm"), norm)
        assert torch.equal(reader.read("exp_avg.w"), moment)
        assert torch.equal(reader.read("exp_avg.w", (1, 1), (2, 2)), moment[1:3, 1:])
        assert torch.equal(reader.read("random.cpu.1"), state + 1)
