"""The index of a checkpoint: no piece is lost, however it is put together; it grows with ranks plus tensors."""

import pytest

from drover.pipeline.formats.shard_index import Index, overlapping, rectangles

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


def index_of(owned, ranks, names, arity):
    """Joined as a tree of ranks joins it."""
    parts = [Index.of({"path": f"rank-{rank:05}.safetensors"}, {name: ("F32", SHAPE, owned(rank, ranks))
                                                                for name in names if owned(rank, ranks)})
             for rank in range(ranks)]
    while len(parts) > 1:
        parts = [Index.joined(parts[at:at + arity]) for at in range(0, len(parts), arity)]
    return parts[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_that_are_cut_alike_share_a_cut_which_loses_no_piece(layout):
    owned = LAYOUTS[layout]
    for ranks, arity in ((24, 2), (48, 5), (48, 1000)):
        index = index_of(owned, ranks, ("model.x", "model.y"), arity)
        index.check()
        [cut] = index.cuts
        assert list(overlapping(cut, (0, 0), SHAPE)) == [
            (rank, rectangle) for rank in range(ranks) for rectangle in owned(rank, ranks)]
