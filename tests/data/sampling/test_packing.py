"""Best-fit packing beside the plainest one, a piece at a time; and its plan: found, remade or refused. What it makes,
test_phases.py compares."""

import shutil
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drover.pipeline.core.errors import UserError
from drover.pipeline.data.sampling.packing import Alone, best_fit, make_plan, read_plan
from tests.data.sampling.phased import by_three_ranks, contents
from tests.refusal import refused
from tests.token_shards import training_data, write_numbered

FEW = [[30, 5, 9, 16, 3], [7, 40], [3]]


def packed(folder, table, **options):
    return training_data(folder, table, packed=True, **options)


def plainly_packed(lengths, room):
    """Best fit from the longest piece on, each looked at by itself: the room that each bin is left with."""
    left = []
    for length in sorted(lengths, reverse=True):
        fits = [(free, number) for number, free in enumerate(left) if free >= length]
        if fits:
            left[min(fits)[1]] -= length
        else:
            left.append(room - length)
    return left


@given(room=st.integers(1, 60), data=st.data())
@settings(max_examples=200)
def test_bins_are_those_of_a_piece_at_a_time(room, data):
    lengths = data.draw(st.lists(st.integers(1, room), max_size=120))
    order, ends = best_fit(np.array(lengths, np.int64), room)
    assert sorted(order.tolist()) == list(range(len(lengths))) and ends[0] == 0 and ends[-1] == len(lengths)
    bins = [order[start:stop].tolist() for start, stop in pairwise(ends.tolist())]
    left = [room - sum(lengths[piece] for piece in own) for own in bins]
    assert all(own for own in bins) and min(left, default=0) >= 0
    assert sorted(left) == sorted(plainly_packed(lengths, room))
    for own in bins:  # the longest first; equal ones by their place
        assert own == sorted(own, key=lambda piece: (-lengths[piece], piece))


def test_the_plan_is_part_of_what_the_order_is_and_is_counted(tmp_path):
    table = write_numbered(tmp_path, [[16, 10, 6, 33], [0, 20]])
    data = packed(tmp_path, table)
    assert data.packing_facts() == {"16": {"sequences": 7, "padding_share": 1 - 85 / (7 * 16), "documents": 5,
                                           "documents_cut": 2, "cut_share": 0.4}}

    def planner(planning):
        changed = read_plan(planning, pytest.fail)
        changed.sha256[0, 0] ^= 1
        return changed
    others = packed(tmp_path, table, planner=planner), training_data(tmp_path, table)
    assert len({one.order.plan_sha256 for one in (data, *others)}) == 3


@pytest.mark.parametrize("harm", ["cut", "changed", "of another shard"])
def test_what_is_damaged_of_a_plan_is_planned_again(tmp_path, harm):
    table, logged = write_numbered(tmp_path, FEW), []
    first, before = packed(tmp_path, table), contents(tmp_path)
    other, path = (first.packings[0].path(row) for row in range(2))
    full = path.read_bytes()
    path.write_bytes({"cut": full[:-1], "changed": full[:-1] + b"x", "of another shard": other.read_bytes()}[harm])
    if harm == "cut":
        refused(UserError, r"has [\d,]+ bytes instead of", first.batch_of, np.arange(8))
    again = packed(tmp_path, table, said=logged)
    assert len(logged) == 1 and "packing of 1 of 3 token shards in sequences of 16" in logged[0]
    assert again.order.plan_sha256 == first.order.plan_sha256 and contents(tmp_path) == before
    packed(tmp_path, table, planner=lambda packing: make_plan(packing, Alone(), pytest.fail))


def test_ranks_plan_together_what_one_plans_alone(tmp_path):
    """Each of three does its part, none writes another's, and all end up with the same, faults too."""
    table = write_numbered(tmp_path, [*FEW, [20, 20], [9]])
    alone, files = packed(tmp_path, table), contents(tmp_path)
    shutil.rmtree(tmp_path / "packing")

    def together(group):
        logged = []
        return packed(tmp_path, table, planner=lambda packing: make_plan(packing, group, logged.append)), logged
    made = by_three_ranks(together)
    assert {data.order.plan_sha256 for data, _ in made} == {alone.order.plan_sha256} and contents(tmp_path) == files
    assert [len(logged) for _, logged in [*made, *by_three_ranks(together)]] == [1, 0, 0, 0, 0, 0]
    (tmp_path / table.paths[3]).unlink()
    made[0][0].packings[0].path(3).unlink()

    assert all(by_three_ranks(lambda group: refused(UserError, "cannot be read", together, group)))


@pytest.mark.parametrize("kind", [False, True])
def test_the_shard_of_an_id_beyond_the_vocabulary_is_named(tmp_path, kind):
    data = training_data(tmp_path, write_numbered(tmp_path, [[30, 4], [7, 40]]), packed=kind)
    every = np.arange(sum(sequences.count for sequences in data.spaces[0]))
    data.vocabulary = 48
    data.batch_of(every)
    data.vocabulary = 47
    refused(UserError, r"code-00001.arrow holds the id 47, but the vocabulary has 47 ids",
            data.batch_of, every)
