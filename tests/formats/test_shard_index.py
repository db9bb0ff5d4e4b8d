"""The index of a checkpoint: no piece is lost, however it is put together; it grows with ranks plus tensors."""

import pytest

from drover.pipeline.formats.shard_index import Index, overlapping, rectangles

SHAPE = (96, 40)


def rows(rank, ranks):
    """FSDP2's, as torch.chunk cuts."""
    step = -(-SHAPE[0] // ranks)
    start, stop = min(SHAPE[0], rank * step), min(SHAPE[0], (rank + 1) * step)
    return [((start, 0), (stop - start, SHAPE[1]))] if stop > start else []


def flat_range(rank, ranks):
    """ZeRO stage 3."""
    size = SHAPE[0] * SHAPE[1]
    step = -(-size // ranks)
    return list(rectangles(SHAPE, rank * step, min(size, (rank + 1) * step)))


def index_of(owned, ranks, names, arity):
    """Joined as a tree of ranks joins it."""
    parts = [Index.of({"path": f"rank-{rank:05}.safetensors"}, {name: ("F32", SHAPE, owned(rank, ranks))
                                                                for name in names if owned(rank, ranks)})
             for rank in range(ranks)]
    while len(parts) > 1:
        parts = [Index.joined(parts[at:at + arity]) for at in range(0, len(parts), arity)]
    return parts[0]


@pytest.mark.parametrize("owned", [rows, flat_range])
@pytest.mark.parametrize(("ranks", "arity"), [(24, 2), (36, 5), (48, 1000)])
def test_tensors_that_are_cut_alike_share_a_cut_which_loses_no_piece(owned, ranks, arity):
    """Of 36 ranks with rows, the last four own nothing."""
    index = index_of(owned, ranks, ("model.x", "model.y"), arity)
    index.check()
    [cut] = index.cuts
    assert list(overlapping(cut, (0, 0), SHAPE)) == [
        (rank, rectangle) for rank in range(ranks) for rectangle in owned(rank, ranks)]
