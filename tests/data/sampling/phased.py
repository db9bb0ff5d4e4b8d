"""Data over phases, of running text and of packed documents, over a few token shards."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from hypothesis import strategies as st

from pipeline.config.phases import PhasePlan
from pipeline.config.training import TrainConfig
from pipeline.data.exclusion import Excluded
from pipeline.data.sampling.packed_data import PackedData, PhasePackings, lengths_of
from pipeline.data.sampling.packing_plan import Alone, Planning, make
from pipeline.data.sampling.phased_data import PhasedData
from pipeline.data.shard_table import OpenShards, Shards
from pipeline.parallel.messages import decode, encode
from tests.token_shards import SOURCES

LENGTHS = (8, 12, 16, 24)
DOCUMENTS = st.lists(st.lists(st.integers(0, 90) | st.integers(0, 900), min_size=1, max_size=10), min_size=2,
                     max_size=4).filter(lambda own: min(sum(map(sum, own[::2])), sum(map(sum, own[1::2]))) > 24)
"""Lengths of documents, by shard; the shards are of the two sources in turn."""
EXCLUDED = st.lists(st.tuples(st.integers(0, 80), st.integers(1, 9)), max_size=3).map(
    lambda parts: Excluded((first, first + count) for first, count in parts))


def plan_of(phases, **train):
    return PhasePlan.of(TrainConfig.model_validate({"sequence_length": 16, "batch_tokens": 64, "phases": phases,
                                                    **train}))


@st.composite
def plans(draw, least=1, lengths=LENGTHS, steps=9):
    """Phases of random lengths, batches, mixtures and ends."""
    phases, until = [], 0
    for _ in range(draw(st.integers(least, 4))):
        length = draw(st.sampled_from(lengths))
        batch = length * draw(st.integers(1, 6))
        until += batch * draw(st.integers(1, steps)) - draw(st.integers(0, batch - 1))
        mixture = draw(st.none() | st.fixed_dictionaries({name: st.integers(0, 5) for name in SOURCES}).filter(
            lambda shares: sum(shares.values())))
        phases.append({"until": until, "sequence_length": length, "batch_tokens": batch, "mixture": mixture})
        until = plan_of(phases).tokens
    return phases


def planned(folder, table, length=16, group=None, place="packing"):
    """The packing of all documents, and what was said while it was planned."""
    said = []
    planning = Planning.whole(folder / place / str(length), OpenShards(folder, table), length)
    return make(planning, group or Alone(), said.append), said


def phased(kind, folder, table, plan, planner=None, said=None):
    """The data of a plan, `cut` from running text or `packed`. The packings are planned by one process alone unless
    `planner` does it."""
    opened = OpenShards(folder, table)
    shards = {source: Shards(opened, table.rows("train", source)) for source in SOURCES}
    if kind == "cut":
        return PhasedData(shards, plan, 3, table.content("train"), 60_000)
    planner = planner or (lambda planning: make(planning, Alone(), [].append if said is None else said.append))
    packings = PhasePackings(folder / "packing", shards, lengths_of(plan), planner)
    return PackedData(packings, plan, 3, table.content("train"), 60_000)


def spans_of(data, samples):
    """What each sample reads: the source, its epoch, and pieces of shards."""
    pools, epochs = (found.tolist() for found in data.order.locate(samples)[:2])
    return [(pool, epoch, [(span.shard.path.name, span.start, span.stop) for span in stream.spans(number)])
            for pool, epoch, (stream, number) in zip(pools, epochs, data.located(samples), strict=True)]


def times_read(data, samples):
    """How often each token of each shard is read, by source and epoch."""
    seen, sizes = {}, {shard.path.name: shard.token_count for stream in data.streams for shard in stream.shards}
    for pool, epoch, spans in spans_of(data, samples):
        for name, start, stop in spans:
            tokens = seen.setdefault((pool, epoch), {}).setdefault(name, np.zeros(sizes[name], np.int64))
            tokens[start:stop] += 1
    return seen


def read_packed(bins, number):
    """Read a packed sequence, whose tokens number its shard's: the shard, the spans, the tokens, those of them that
    are a label. Every label is the next token of the shard, and is where `place` says."""
    row, spans = np.zeros(bins.length + 1, np.uint32), bins.spans(number)
    starts, used = bins.fill(number, row)
    [shard] = {span.shard for span in spans}
    tokens = [token for span in spans for token in span.shard.tokens(span.start, span.stop).tolist()]
    assert tokens == row[:used].tolist() and not row[used:bins.length].any()
    labels = [place + 1 for place in range(used) if place + 1 not in starts.tolist()]
    for place in labels:
        found, at = bins.place(number, place)
        assert found is shard and found.tokens(at, at + 1)[0] == row[place] == row[place - 1] + 1
    return shard, spans, tokens, row[labels].tolist()


def by_three_ranks(function):
    """What `function(group)` gives on each of three ranks, which run beside each other."""
    barrier, boxes = threading.Barrier(3), [None] * 3

    class Together:
        def __init__(self, rank):
            self.rank, self.world = rank, 3

        def gather(self, value):
            boxes[self.rank] = value
            barrier.wait(60)
            found = decode(encode(boxes), "a rank")
            barrier.wait(60)
            return found

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(function, map(Together, range(3))))


def contents(folder):
    """The bytes of all files, by their paths in a folder."""
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
