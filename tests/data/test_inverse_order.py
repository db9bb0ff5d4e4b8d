"""The order backwards: a sequence's samples, a document's readings; exactly those that the order gives forwards."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.provenance import pieces, readings
from pipeline.data.sampling.loader import TrainingData
from pipeline.data.sampling.order import PERIOD, Pool, SampleOrder, permute, unpermute
from pipeline.data.token_shards import TokenShard
from tests.token_shards import write_documents


@given(size=st.integers(1, 1 << 40), seed=st.integers(0, 1 << 64), part=st.integers(-3, 1 << 20), data=st.data())
def test_unpermute_undoes_permute(size, seed, part, data):
    numbers = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20)), np.int64)
    key = (seed, part, 7)
    assert unpermute(permute(numbers, size, key), size, key).tolist() == numbers.tolist()
    assert permute(unpermute(numbers, size, key), size, key).tolist() == numbers.tolist()


@given(size=st.integers(1, 300), seed=st.integers(0, 1000))
def test_unpermute_is_the_inverse_table(size, seed):
    table = permute(np.arange(size), size, (seed,))
    assert unpermute(np.arange(size), size, (seed,)).tolist() == np.argsort(table).tolist()


@settings(deadline=None, max_examples=30)
@given(tokens=st.lists(st.integers(200, 3000), min_size=1, max_size=3), seed=st.integers(0, 99), data=st.data(),
       below=st.one_of(st.integers(0, 500), st.integers(PERIOD - 5, PERIOD + 500)))
def test_each_sequence_has_the_samples_that_locate_gives(tokens, seed, data, below):
    shares = data.draw(st.lists(st.one_of(st.just(0.0), st.floats(0.001, 5)), min_size=len(tokens),
                                max_size=len(tokens)).filter(lambda found: sum(found) > 0))
    order = SampleOrder([Pool(str(place), count) for place, count in enumerate(tokens)], 16, seed, shares)
    pools, _, sequences = order.locate(np.arange(below))
    for pool, count in enumerate(order.counts):
        drawn = data.draw(st.lists(st.integers(0, int(count) - 1), unique=True, max_size=6))
        asked = np.array(sorted(drawn), np.int64)
        samples, of = order.inverse(pool, asked, below)
        wanted = np.flatnonzero((pools == pool) & np.isin(sequences, asked))
        assert samples.tolist() == wanted.tolist() and of.tolist() == sequences[wanted].tolist()


@pytest.mark.parametrize("mixture", [None, {"a": 1.0, "b": 3.0}, {"a": 1.0, "b": 0.0}])
def test_a_documents_readings_are_the_pieces_that_name_it(tmp_path, mixture):
    draw, shards = np.random.default_rng(4), {}
    for name in ("a", "b"):
        shards[name] = []
        for number in range(3):
            lengths, path = draw.integers(0, 70, 12), tmp_path / f"{name}-{number}.arrow"
            record = write_documents(path, [np.zeros(length) for length in lengths], lengths.tolist(),
                                     [f"{row:032x}" for row in range(12)], dtype="uint16", metadata={})
            shards[name].append(TokenShard(path, {**record, "source": name, "bytes": path.stat().st_size}))
    data, below = TrainingData(shards, 16, 3, mixture, None), 1300
    assert max(data.order.epochs(below).values()) > 3
    seen = {}
    for piece in pieces(data, np.arange(below)):
        seen.setdefault((piece.shard.path, piece.document), []).append((piece.sample, piece.start, piece.stop))
    epochs = data.order.locate(np.arange(below))[1]
    for pool, stream in enumerate(data.streams):
        for index, shard in enumerate(stream.shards):
            for document in range(shard.documents):
                found = readings(data, pool, index, document, below)
                assert [(one.sample, one.start, one.stop) for one in found] == seen.pop((shard.path, document), [])
                assert [one.epoch for one in found] == [int(epochs[one.sample]) for one in found]
    assert not seen
