"""From token shards to batches: labels, document boundaries, and the same samples however they are asked for."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.sampling.batch import IGNORED, pack
from pipeline.data.sampling.loader import Prefetcher, TrainingData
from pipeline.data.sampling.streams import Windows
from pipeline.data.token_shards import TokenShard
from tests.data.sampling.plain_loader import plain_batch, plain_pack
from tests.token_shards import write_documents

BOS, EOS = 1, 2


def make_shard(folder, name, lengths, first):
    """Documents of so many inner tokens, whose ids count up from `first`, as a real shard on disk."""
    documents = []
    for length in lengths:
        documents.append(np.array([BOS, *range(first, first + length), EOS]))
        first += length
    path = folder / f"{name}.arrow"
    record = write_documents(path, documents, [1] * len(lengths), ["00" * 16] * len(lengths), dtype="uint32",
                             metadata={})
    return TokenShard(path, {**record, "source": name, "bytes": path.stat().st_size})


@pytest.fixture
def shards(tmp_path):
    """Three shards with documents of very different lengths, one shard of a single document."""
    return [make_shard(tmp_path, "a", [3, 40, 0, 1, 25], 1000), make_shard(tmp_path, "b", [100], 2000),
            make_shard(tmp_path, "c", [7, 7, 7, 7, 60], 3000)]


def everything(shards):
    return np.concatenate([shard.tokens(0, shard.token_count) for shard in shards]).astype(np.int64)


def test_windows_are_read_across_shards(shards):
    whole = everything(shards)
    for length in (1, 7, 60, 130):
        windows = Windows(shards, length)
        for number in range(windows.pool("all").sequences(length)):
            row = np.empty(length + 1, np.uint32)
            starts, used = windows.fill(number, row)
            assert used == length and np.array_equal(row, whole[number * length:(number + 1) * length + 1])
            assert np.array_equal(starts, np.flatnonzero(row == BOS))
            read = [span.shard.tokens(span.start, span.stop) for span in windows.spans(number)]
            assert np.array_equal(np.concatenate(read), row[:-1])
            for place in (0, length // 2, length):
                shard, at = windows.place(number, place)
                assert shard.tokens(at, at + 1)[0] == row[place]


def assert_same(found, wanted):
    """Two batches, to the last bit, in types too."""
    for name in ("tokens", "labels", "documents", "positions"):
        one, other = getattr(found, name), getattr(wanted, name)
        assert one.dtype == other.dtype and one.is_contiguous() and torch.equal(one, other), name
    assert (found.targets, found.lengths, found.padding) == (wanted.targets, wanted.lengths, wanted.padding)


@given(lengths=st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=12), min_size=2, max_size=4),
       length=st.integers(1, 24), shares=st.none() | st.lists(st.integers(1, 5), min_size=4, max_size=4),
       asked=st.lists(st.one_of(
           st.lists(st.integers(0, 20_000), min_size=1, max_size=9),
           st.tuples(st.integers(0, 5000), st.integers(1, 9), st.integers(1, 40), st.integers(1, 12))),
           min_size=1, max_size=6), seed=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_batches_are_those_of_the_plain_loader(tmp_path_factory, lengths, length, shares, asked, seed):
    """Over mixtures, shards of few and many documents, empty ones too, sizes, and requests in steps and at random."""
    folder = tmp_path_factory.mktemp("shards")
    parts = {}
    for number, own in enumerate(lengths):
        empty = write_documents(folder / f"empty-{number}.arrow", [np.empty(0, "uint32")], [1], ["00" * 16],
                                dtype="uint32", metadata={})
        size = (folder / f"empty-{number}.arrow").stat().st_size
        parts[str(number)] = [make_shard(folder, f"a{number}", own, 10),
                              TokenShard(folder / f"empty-{number}.arrow", {**empty, "source": "x", "bytes": size}),
                              make_shard(folder, f"b{number}", [*own, length], 5000)]
    mixture = None if shares is None else dict(zip(parts, shares, strict=False))
    data = TrainingData(parts, length, seed, mixture, None)
    pools = [[shard for part in parts.values() for shard in part]] if mixture is None else list(parts.values())
    for request in asked:
        if isinstance(request, list):
            batches = [np.array(request)]
        else:
            first, count, step, times = request
            batches = [first + turn * step + np.arange(count) for turn in range(times)]
        for samples in batches:
            assert_same(data.batch_of(samples), plain_batch(pools, data.order, samples))


@given(rows=st.integers(1, 5), length=st.integers(1, 12), data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_pack_is_the_plain_one(rows, length, data):
    windows = [(np.arange(length + 1), np.array(sorted(data.draw(st.sets(st.integers(0, length)))), dtype=np.int64))
               for _ in range(rows)]
    assert_same(pack(windows), plain_pack(windows))


def test_labels_are_inputs_shifted_by_one_and_never_cross_a_document(shards):
    data = TrainingData({"all": shards}, 16, 0, None, None)
    batch = data.batch(0, 12)
    whole = everything(shards)
    _, _, sequences = data.order.locate(np.arange(12))
    for row, sequence in enumerate(sequences):
        window = whole[sequence * 16:sequence * 16 + 17]
        assert np.array_equal(batch.tokens[row], window[:-1])
        wanted = np.where(window[1:] == BOS, IGNORED, window[1:])
        assert np.array_equal(batch.labels[row], wanted)
    assert BOS not in batch.labels
    # EOS is predicted exactly at true document ends, and nothing is predicted from it.
    assert torch.equal(batch.labels[batch.tokens == EOS], torch.full_like(batch.labels[batch.tokens == EOS], IGNORED))
    assert batch.targets == int((batch.labels != IGNORED).sum())


def test_documents_and_positions_start_anew_at_every_bos(shards):
    batch = TrainingData({"all": shards}, 16, 0, None, None).batch(0, 12)
    for row in range(12):
        document, position = 0, 0
        for place in range(16):
            if place and batch.tokens[row, place] == BOS:
                document, position = document + 1, 0
            assert (batch.documents[row, place], batch.positions[row, place]) == (document, position)
            position += 1


def test_lengths_of_documents_are_those_of_the_documents_numbers(shards):
    batch = TrainingData({"all": shards}, 16, 0, None, None).batch(0, 12)
    assert [list(row) for row in batch.lengths] == [row.unique_consecutive(return_counts=True)[1].tolist()
                                                    for row in batch.documents]
    assert len({len(row) for row in batch.lengths}) > 1
    assert [row for part in batch.split(5) for row in part.lengths] == list(batch.lengths)


def test_an_epoch_uses_every_token_as_input_once(shards):
    data, whole = TrainingData({"all": shards}, 16, 3, None, None), everything(shards)
    count = (len(whole) - 1) // 16
    batch = data.batch(0, count)
    rows = sorted(batch.tokens.tolist())
    assert rows == sorted(whole[:count * 16].reshape(count, 16).tolist())


@given(cuts=st.lists(st.integers(1, 59), max_size=5), world=st.sampled_from([1, 2, 3, 4]),
       threads=st.integers(1, 4))
@settings(max_examples=25, deadline=None)
def test_batches_do_not_depend_on_ranks_cuts_or_threads(tmp_path_factory, cuts, world, threads):
    folder = tmp_path_factory.mktemp("shards")
    parts = {"a": [make_shard(folder, "a", [30, 50, 90], 10)], "b": [make_shard(folder, "b", [200, 10], 500)]}
    mixture = {"a": 2.0, "b": 1.0}
    whole = TrainingData(parts, 8, 0, mixture, None).batch(0, 60)
    again, rows = TrainingData(parts, 8, 0, mixture, None), []
    edges = sorted({0, 60, *cuts})
    pieces = [(int(part[0]), len(part)) for start, stop in pairwise(edges)
              for part in np.array_split(np.arange(start, stop), world) if len(part)]
    ahead = Prefetcher(lambda number: again.batch(*pieces[number]), range(len(pieces)), threads)
    for _ in pieces:
        rows.append(ahead.next())
    ahead.close()
    for name in ("tokens", "labels", "documents", "positions"):
        assert torch.equal(torch.cat([getattr(row, name) for row in rows]), getattr(whole, name))


def test_the_prefetcher_keeps_the_order_of_slow_and_fast_batches():
    def make(step):
        time.sleep(0.02 if step % 3 == 0 else 0.0)
        return pack([(np.arange(step, step + 5), np.array([0]))])
    ahead = Prefetcher(make, range(20), threads=4)
    assert [int(ahead.next().tokens[0, 0]) for _ in range(20)] == list(range(20))
    ahead.close()


def test_an_error_while_reading_ahead_reaches_the_loop():
    def make(step):
        raise OSError("disk gone")
    ahead = Prefetcher(make, range(3), threads=1)
    with pytest.raises(OSError, match="disk gone"):
        ahead.next()
    ahead.close()


def test_split_gives_micro_batches_with_their_own_targets(shards):
    batch = TrainingData({"all": shards}, 16, 0, None, None).batch(0, 12)
    parts = list(batch.split(4))
    assert sum(part.targets for part in parts) == batch.targets and len(parts) == 3
    assert torch.equal(torch.cat([part.tokens for part in parts]), batch.tokens)


def test_a_batch_of_numbers_is_those_samples_in_that_order(shards):
    data = TrainingData({"all": shards}, 16, 0, None, None)
    whole, some = data.batch(0, 12), data.batch_of(np.array([9, 0, 4, 5]))
    for name in ("tokens", "labels", "documents", "positions"):
        assert torch.equal(getattr(some, name), getattr(whole, name)[[9, 0, 4, 5]])
    assert some.targets == int((some.labels != IGNORED).sum())
