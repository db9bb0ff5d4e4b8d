"""From token shards to batches, and from samples back to documents."""

import threading
import time
from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from drover.pipeline.data.sampling.loader import Prefetcher
from drover.pipeline.data.token_shards import Shards
from tests.data.sampling.phased import DOCUMENTS
from tests.refusal import refused
from tests.token_shards import SOURCES, assert_same_batches, training_data, write_numbered
from tests.waiting import HANG_S


@given(documents=DOCUMENTS, length=st.integers(1, 24),
       shares=st.none() | st.tuples(st.integers(1, 5), st.integers(1, 5)),
       wanted=st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 9), st.integers(-8, 40), st.integers(1, 12)),
                      min_size=1, max_size=6), packed=st.booleans())
@settings(max_examples=40)
def test_batches_are_their_samples_whatever_was_read_before(tmp_path_factory, documents, length, shares, wanted,
                                                             packed):
    """In steps and at random. The shards that a batch is read from are known before. What a sample is made of,
    test_phases.py has."""
    folder, read, plain = tmp_path_factory.mktemp("shards"), set(), Shards.__getitem__
    table, mixture = write_numbered(folder, documents), shares and dict(zip(SOURCES, shares, strict=True))
    data, alone = (training_data(folder, table, length, mixture, packed) for _ in range(2))

    def noted(self, index):
        read.add(int(self.rows[index]))
        return plain(self, index)
    for first, count, step, times in wanted:
        for samples in (np.maximum(0, first + turn * step + np.arange(count)) for turn in range(times)):
            read.clear()
            with patch.object(Shards, "__getitem__", noted):
                batch = data.batch_of(samples)
            assert read == set(data.shard_rows(samples).tolist())
            for row, sample in zip(batch.split(1), samples, strict=True):
                assert_same_batches(row, alone.batch_of(np.array([sample])))


def test_the_prefetcher_reads_ahead_in_threads_keeps_the_order_and_raises_without_waiting():
    started, free = [], threading.Event()

    def make(step):
        started.append(step)
        if step == 3:
            raise OSError("disk gone")
        if step == 4:
            assert free.wait(HANG_S)
        time.sleep(0.02 if step % 3 == 0 else 0.0)
        return step, threading.current_thread()
    ahead = Prefetcher(make, range(20), 4)
    results = [ahead.next() for _ in range(3)]
    assert [step for step, _ in results] == [0, 1, 2] and max(started) <= 3 + 4
    assert threading.current_thread() not in dict(results).values()
    refused(OSError, "disk gone", ahead.next)
    free.set()
    assert [ahead.next()[0] for _ in range(16)] == list(range(4, 20)) and sorted(started) == list(range(20))
    ahead.close()
