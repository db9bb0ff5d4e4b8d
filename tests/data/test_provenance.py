"""From sample numbers back to documents: exactly those whose tokens are in the batch."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.data.provenance import documents_of, named, pieces
from pipeline.data.sampling.loader import TrainingData
from pipeline.data.token_shards import TokenShard
from tests.token_shards import write_documents

LENGTHS = {"a": [3, 40, 0, 1, 25, 90], "b": [100, 2, 60]}


@pytest.fixture
def data(tmp_path):
    """Two sources of one shard each; every token of a document is its number, so that it can be told from its ids."""
    shards, number = {}, 0
    for name, lengths in LENGTHS.items():
        documents, keys = [], []
        for length in lengths:
            number += 1
            documents.append(np.full(length + 2, number))
            keys.append(f"{number:032x}")
        path = tmp_path / f"{name}.arrow"
        record = write_documents(path, documents, [1] * len(keys), keys, dtype="uint16", metadata={})
        shards[name] = [TokenShard(path, {**record, "source": name, "bytes": path.stat().st_size})]
    return TrainingData(shards, 16, 5, {"a": 1.0, "b": 1.0}, None)


def test_pieces_hold_the_tokens_of_their_samples(data):
    numbers = np.array([7, 2, 3, 11])
    batch = data.batch_of(numbers)
    for row, number in enumerate(numbers):
        ids = [piece.ids() for piece in pieces(data, numbers) if piece.sample == number]
        assert np.concatenate(ids).tolist() == batch.tokens[row].tolist()
    for piece in pieces(data, numbers):
        assert set(piece.ids().tolist()) == {int(piece.key, 16)} and piece.stop - piece.start == len(piece.ids())


def test_documents_are_named_once_with_their_source_and_samples(data):
    documents = documents_of(data, [(0, 3), (8, 11)])
    batch, numbers = data.batch_of(np.array([0, 1, 2, 8, 9, 10])), [0, 1, 2, 8, 9, 10]
    assert len({item.key for item in documents}) == len(documents) > 3
    assert {int(item.key, 16) for item in documents} == set(batch.tokens.flatten().tolist())
    for item in documents:
        assert item.source == ("a" if int(item.key, 16) <= 6 else "b") and item.shard == f"{item.source}.arrow"
        assert list(item.samples) == [number for number, row in zip(numbers, batch.tokens.tolist(), strict=True)
                                      if int(item.key, 16) in row]
    assert documents[0].record() == {"source": documents[0].source, "shard": documents[0].shard, "document":
                                     documents[0].document, "key": documents[0].key,
                                     "samples": list(documents[0].samples)}
    text = named(documents)
    assert all(item.key in text for item in documents[:3]) and documents[3].key not in text
    assert text.endswith(f"and {len(documents) - 3} more")
