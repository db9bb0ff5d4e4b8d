"""From token shards to batches, and from samples back to documents."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.provenance import documents_of, named, pieces
from pipeline.data.sampling.batch import pack
from pipeline.data.sampling.loader import Prefetcher
from pipeline.data.sampling.lookahead import MOST, Lookahead
from pipeline.data.sampling.order import Pool, SampleOrder
from pipeline.data.sampling.streams import TokenStream, Windows
from pipeline.data.token_shards import TokenShard
from tests.data.sampling.plain_loader import plain_batch, plain_pack
from tests.token_shards import BATCH_TENSORS, assert_same_batches, training_data, write_numbered

LENGTHS = [[5, 42, 2, 3, 27], [100], [9, 9, 0, 9, 62], [30, 0, 0, 1]]


@given(lengths=st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=12), min_size=2, max_size=6).filter(
           lambda own: min(sum(map(sum, own[::2])), sum(map(sum, own[1::2]))) > 24),
       length=st.integers(1, 24), shares=st.none() | st.tuples(st.integers(1, 5), st.integers(1, 5)),
       asked=st.lists(st.one_of(
           st.lists(st.integers(0, 20_000), min_size=1, max_size=9),
           st.tuples(st.integers(0, 5000), st.integers(1, 9), st.integers(1, 40), st.integers(1, 12))),
           min_size=1, max_size=6))
@settings(max_examples=40, deadline=None)
def test_batches_are_those_of_the_plain_loader(tmp_path_factory, lengths, length, shares, asked):
    """Over mixtures, shards of few and many documents, empty ones too, sizes, and requests in steps and at random."""
    folder = tmp_path_factory.mktemp("shards")
    mixture = None if shares is None else dict(zip(("web", "code"), shares, strict=True))
    data = training_data(folder, write_numbered(folder, lengths), length, mixture)
    pools = [list(stream.shards) for stream in data.streams]
    assert sum(map(len, pools)) == len(lengths)
    for request in asked:
        if isinstance(request, list):
            batches = [np.array(request)]
        else:
            first, count, step, times = request
            batches = [first + turn * step + np.arange(count) for turn in range(times)]
        for samples in batches:
            assert_same_batches(data.batch_of(samples), plain_batch(pools, data.order, samples))


@given(rows=st.integers(1, 5), length=st.integers(1, 12), data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_pack_is_the_plain_one(rows, length, data):
    windows = [(np.arange(length + 1), np.array(sorted(data.draw(st.sets(st.integers(0, length)))), dtype=np.int64))
               for _ in range(rows)]
    assert_same_batches(pack(windows), plain_pack(windows))


@pytest.mark.parametrize("length", [1, 7, 60, 130])
def test_windows_know_the_shards_that_they_are_read_from(tmp_path, length):
    table = write_numbered(tmp_path, LENGTHS)
    shards = [TokenShard(tmp_path / table.path(row), table.record(row)) for row in range(4)]
    windows, row = Windows(shards, length), np.empty(length + 1, np.uint32)
    for number in range(windows.pool("all").sequences(length)):
        assert windows.fill(number, row)[1] == length
        read = [span.shard.tokens(span.start, span.stop) for span in windows.spans(number)]
        assert np.array_equal(np.concatenate(read), row[:-1])
        for place in (0, length // 2, length):
            shard, at = windows.place(number, place)
            assert shard.tokens(at, at + 1)[0] == row[place]
        with_label = windows.stream.spans(number * length, (number + 1) * length + 1)
        assert windows.rows(np.array([number])).tolist() == [shards.index(span.shard) for span in with_label]


def test_the_shards_within_stretches_of_tokens():
    class Shard:
        def __init__(self, count):
            self.token_count = count
    stream = TokenStream([Shard(count) for count in (10, 5, 20, 1, 30)])
    for starts, wanted in (([9], [0, 1]), ([34], [2, 3, 4]), ([62], [4]), ([0, 62], [0, 4]), ([0, 8, 9, 10], [0, 1])):
        assert stream.shards_within(np.array(starts), np.array(starts) + 4).tolist() == wanted


def test_documents_are_named_once_with_their_source_and_samples(tmp_path):
    data = training_data(tmp_path, write_numbered(tmp_path, LENGTHS), mixture={"web": 1.0, "code": 1.0})
    expected, samples = {}, [0, 1, 2, 8, 9, 10]
    for piece in pieces(data, np.array(samples)):
        expected.setdefault((piece.shard.path.name, piece.document), []).append(piece.sample)
        assert piece.key.endswith(f"{piece.document:016x}")
    documents = documents_of(data, [(0, 3), (8, 11)])
    assert {(item.shard, item.document): list(item.samples) for item in documents} == expected
    assert len(documents) == len(expected) > 3 and {sample for own in expected.values() for sample in own} == {*samples}
    one = documents[0]
    assert one.record() == {**vars(one), "samples": list(one.samples)}
    assert one.source == one.shard.partition("-")[0] and one.key.endswith(f"{one.document:016x}")
    text = named(documents)
    assert text.startswith(f"{one.source}/{one.key} ({one.shard}, document {one.document}), ")
    assert text.count("/") == 3 and text.endswith(f" and {len(documents) - 3} more")
    assert "more" not in named(documents[:3])
    assert next(pieces(data, np.array([3, 1]))).sample == 3


def test_a_batch_is_split_into_micro_batches_with_their_own_targets(tmp_path):
    batch = training_data(tmp_path, write_numbered(tmp_path, LENGTHS)).batch(0, 12)
    parts = list(batch.split(5))
    assert sum(part.targets for part in parts) == batch.targets and [len(part.tokens) for part in parts] == [5, 5, 2]
    assert all(part.targets == int((part.labels >= 0).sum()) for part in parts)
    for name in BATCH_TENSORS:
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(batch, name))
    for name in ("lengths", "padding"):
        assert sum((getattr(part, name) for part in parts), ()) == getattr(batch, name)


@pytest.mark.parametrize("threads", [1, 4])
def test_the_prefetcher_keeps_the_order_of_slow_and_fast_batches(threads):
    started = []

    def make(step):
        started.append(step)
        time.sleep(0.02 if step % 3 == 0 else 0.0)
        return step
    ahead = Prefetcher(make, range(20), threads)
    assert [ahead.next() for _ in range(3)] == [0, 1, 2] and max(started) <= 3 + threads
    assert [ahead.next() for _ in range(17)] == list(range(3, 20)) and sorted(started) == list(range(20))
    ahead.close()


def test_an_error_while_reading_ahead_reaches_the_loop():
    def make(step):
        raise OSError("disk gone")
    ahead = Prefetcher(make, range(3), threads=1)
    with pytest.raises(OSError, match="disk gone"):
        ahead.next()
    ahead.close()


class Counting:
    """An order of two pools, that counts for how many samples it is asked each time."""

    def __init__(self):
        self.order = SampleOrder([Pool("a", 3001), Pool("b", 801)], 10, seed=5, shares=[2, 1])
        self.asked, self.lookahead = [], Lookahead(self.locate)

    def locate(self, samples):
        self.asked.append(np.size(samples))
        return self.order.locate(samples)

    def compare(self, samples):
        """Ask for samples; `samples` may be changed after that."""
        found, wanted = self.lookahead.locate(samples), self.order.locate(samples)
        assert all(map(np.array_equal, found, wanted))


@given(requests=st.lists(st.tuples(st.integers(0, 4000), st.integers(1, 20)), min_size=1, max_size=6),
       step=st.integers(-8, 60))
@settings(max_examples=25, deadline=None)
def test_places_that_are_found_ahead_are_the_orders(requests, step):
    counting = Counting()
    for first, count in requests:
        samples = first + np.arange(count)
        for _ in range(4):
            counting.compare(np.maximum(0, samples))
            samples += step


def test_requests_in_steps_are_answered_with_few_calls():
    """A rank's share of a batch: 8 of 64 samples. Others' numbers are not looked at, and what is kept is bounded."""
    counting, samples = Counting(), np.arange(8)
    for _ in range(6000):
        counting.lookahead.locate(samples)
        samples += 64
        assert len(counting.lookahead._found) * 8 <= MOST
    assert len(counting.asked) < 20 and max(counting.asked) == MOST and sum(counting.asked) < 8 * 6000 + MOST
    counting.asked.clear()
    draw = np.random.default_rng(0)
    for _ in range(50):  # at random each request costs what it asks for
        counting.lookahead.locate(draw.permutation(1000)[:16])
    assert counting.asked == [16] * 50
