"""The loader as it is written most plainly: a window at a time, and everything of its rows asked for by itself.

What a batch is, is defined here; pipeline/data/sampling makes the same in fewer calls.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pipeline.data.sampling.batch import IGNORED, Batch
from pipeline.data.sampling.order import SampleOrder
from pipeline.data.token_shards import TokenShard


def plain_window(shards: Sequence[TokenShard], start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [start, stop) of shards laid end to end, and the places among them where documents start."""
    tokens = np.concatenate([shard.tokens(0, shard.token_count) for shard in shards]).astype(np.int64)
    bases = np.cumsum([0, *(shard.token_count for shard in shards)])
    begins = np.unique(np.concatenate([shard.read_offsets()[:-1] + base
                                       for shard, base in zip(shards, bases, strict=False)]))
    return tokens[start:stop], begins[(begins >= start) & (begins < stop)] - start


def plain_pack(windows: list[tuple[np.ndarray, np.ndarray]]) -> Batch:
    """Windows of length + 1 tokens, with their document starts, as a batch of sequences of `length`."""
    tokens = np.stack([window for window, _ in windows])
    begins = np.zeros(tokens.shape, dtype=bool)
    for row, (_, starts) in enumerate(windows):
        begins[row, starts] = True
    labels = np.where(begins[:, 1:], IGNORED, tokens[:, 1:])
    begins[:, 0] = True  # a document cut by the window's edge starts anew there
    place = np.arange(tokens.shape[1])
    positions = place - np.maximum.accumulate(np.where(begins, place, 0), axis=1)
    documents = np.cumsum(begins, axis=1, dtype=np.int32) - 1
    lengths = tuple(tuple(np.diff(np.flatnonzero(row), append=len(row)).tolist()) for row in begins[:, :-1])
    return Batch(torch.from_numpy(np.ascontiguousarray(tokens[:, :-1])), torch.from_numpy(labels),
                 torch.from_numpy(np.ascontiguousarray(documents[:, :-1])),
                 torch.from_numpy(np.ascontiguousarray(positions[:, :-1])), targets=int((labels != IGNORED).sum()),
                 lengths=lengths, padding=(0,) * len(windows))


def plain_batch(parts: Sequence[Sequence[TokenShard]], order: SampleOrder, samples: Sequence[int]) -> Batch:
    """The samples with these numbers. parts: the shards of each of the order's pools."""
    places = (order.locate(np.array([sample])) for sample in samples)
    return plain_pack([plain_window(parts[int(pool[0])], int(sequence[0]) * order.length,
                                    (int(sequence[0]) + 1) * order.length + 1) for pool, _, sequence in places])
