"""Data over phases, of running text and of packed documents, over a few token shards."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
from hypothesis import strategies as st

from drover.pipeline.data.exclusion import Excluded
from drover.pipeline.parallel.messages import decode, encode
from tests.token_shards import SOURCES, plan_of

LENGTHS = (8, 12, 16, 24)
DOCUMENTS = st.lists(st.lists(st.integers(0, 90) | st.integers(0, 900), min_size=1, max_size=10), min_size=2,
                     max_size=4).filter(lambda own: min(sum(map(sum, own[::2])), sum(map(sum, own[1::2]))) > 24)
"""Lengths of documents, by shard; the shards are of the two sources in turn."""
EXCLUDED = st.lists(st.tuples(st.integers(0, 80), st.integers(1, 9)), max_size=3).map(
    lambda parts: Excluded((first, first + count) for first, count in parts))


@st.composite
def plans(draw, least=1, lengths=LENGTHS):
    """Phases of random lengths, batches, mixtures and ends."""
    phases, until = [], 0
    for _ in range(draw(st.integers(least, 4))):
        length = draw(st.sampled_from(lengths))
        batch = length * draw(st.integers(1, 6))
        until += batch * draw(st.integers(1, 9)) - draw(st.integers(0, batch - 1))
        mixture = draw(st.none() | st.fixed_dictionaries({name: st.integers(0, 5) for name in SOURCES}).filter(
            lambda shares: sum(shares.values())))
        phases.append({"until": until, "sequence_length": length, "batch_tokens": batch, "mixture": mixture})
        until = plan_of(phases).tokens
    return phases


def spans_of(data, samples):
    """What each sample reads: the source, its epoch, and pieces of shards."""
    result = data.order.locate(samples)
    return [(pool, epoch, [(span.shard.path.name, span.start, span.stop) for span in sequences.spans(number)])
            for pool, epoch, (sequences, number) in zip(result.pool.tolist(), result.epoch.tolist(),
                                                        data.located(samples), strict=True)]


def times_read(data, samples):
    """How often each token of each shard is read, by source and epoch."""
    seen, sizes = {}, {shard.path.name: shard.token_count for shards in data.shards for shard in shards}
    for pool, epoch, spans in spans_of(data, samples):
        for name, start, stop in spans:
            tokens = seen.setdefault((pool, epoch), {}).setdefault(name, np.zeros(sizes[name], np.int64))
            tokens[start:stop] += 1
    return seen


def by_three_ranks(function):
    """What `function(group)` gives on each of three ranks, which run beside each other."""
    barrier, boxes = threading.Barrier(3), [None] * 3

    def together(rank):
        def gather(value):
            boxes[rank] = value
            barrier.wait(60)
            result = decode(encode(boxes), "a rank")
            barrier.wait(60)
            return result
        return function(SimpleNamespace(rank=rank, world=3, gather=gather))

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(together, range(3)))


def contents(folder):
    """The bytes of all files, by their paths in a folder."""
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
