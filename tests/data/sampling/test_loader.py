"""From token shards to batches, and from samples back to documents."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drover.pipeline.data.provenance import documents_of, named, pieces
from drover.pipeline.data.sampling.loader import Prefetcher
from drover.pipeline.data.shard_table import Shards
from tests.data.sampling.plain_loader import plain_batch
from tests.token_shards import BATCH_TENSORS, assert_same_batches, training_data, write_numbered

LENGTHS = [[5, 42, 2, 3, 27], [100], [9, 9, 0, 9, 62], [30, 0, 0, 1]]


@given(lengths=st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=12), min_size=2, max_size=6).filter(
           lambda own: min(sum(map(sum, own[::2])), sum(map(sum, own[1::2]))) > 24),
       length=st.integers(1, 24), shares=st.none() | st.tuples(st.integers(1, 5), st.integers(1, 5)),
       asked=st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 9), st.integers(-8, 40), st.integers(1, 12)),
                      min_size=1, max_size=6))
@settings(max_examples=40, deadline=None)
def test_batches_are_those_of_the_plain_loader(tmp_path_factory, lengths, length, shares, asked):
    """Over mixtures, shards of few and many documents, empty ones too, sizes, and requests in steps and at random. The
    shards that a batch is read from are known before, and the place of each token after."""
    folder = tmp_path_factory.mktemp("shards")
    mixture = None if shares is None else dict(zip(("web", "code"), shares, strict=True))
    data = training_data(folder, write_numbered(folder, lengths), length, mixture)
    pools, read = [list(shards) for shards in data.shards], set()
    plain = Shards.__getitem__

    def noted(self, index):
        read.add(int(self.rows[index]))
        return plain(self, index)
    assert sum(map(len, pools)) == len(lengths)
    for first, count, step, times in asked:
        for samples in (np.maximum(0, first + turn * step + np.arange(count)) for turn in range(times)):
            read.clear()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Shards, "__getitem__", noted)
                batch = data.batch_of(samples)
            assert_same_batches(batch, plain_batch(pools, data.order, length, samples))
            assert read == set(data.shard_rows(samples).tolist())
            for (sequences, number), row in zip(data.located(samples), batch.tokens, strict=True):
                assert np.concatenate([span.shard.tokens(*span[1:]) for span in sequences.spans(number)]).tolist() == \
                    row.tolist()


def test_documents_are_named_once_with_their_source_and_samples(tmp_path):
    data = training_data(tmp_path, write_numbered(tmp_path, LENGTHS), mixture={"web": 1.0, "code": 1.0})
    documents = documents_of(data, [(0, 3), (8, 11)])
    assert len({(item.shard, item.document) for item in documents}) == len(documents) > 3
    assert {(item.shard, item.key, item.document, sample) for item in documents for sample in item.samples} == {
        (piece.shard.path.name, piece.key, piece.document, piece.sample) for piece in pieces(
            data, np.array([0, 1, 2, 8, 9, 10]))}
    one, text = documents[0], named(documents)
    assert one.record() == {**vars(one), "samples": list(one.samples)} and one.source == one.shard.partition("-")[0]
    assert text.startswith(f"{one.source}/{one.key} ({one.shard}, document {one.document}), ")
    assert text.count("/") == 3 and text.endswith(f" and {len(documents) - 3} more")
    assert "more" not in named(documents[:3])


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
