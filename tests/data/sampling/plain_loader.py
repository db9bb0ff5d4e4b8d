"""The loader as it is written most plainly: a window at a time, and everything of its rows asked for by itself.

What a batch is, is defined here; pipeline/data/sampling makes the same in fewer calls.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from drover.pipeline.data.sampling.batch import IGNORED, Batch
from drover.pipeline.data.sampling.order import Order
from drover.pipeline.data.token_shards import TokenShard


def plain_batch(parts: Sequence[Sequence[TokenShard]], order: Order, length: int, samples: Sequence[int]) -> Batch:
    """The samples with these numbers. parts: the shards of each of the order's pools."""
    rows, lengths = [], []
    for sample in samples:
        pool, _, _, sequence = (int(found[0]) for found in order.locate(np.array([sample])))
        shards, at = parts[pool], sequence * length
        bases = np.cumsum([0, *(shard.token_count for shard in shards)])
        window = np.concatenate([shard.tokens(0, shard.token_count) for shard in shards])[at:at + length + 1]
        starts = {start - at for shard, base in zip(shards, bases, strict=False)
                  for start in (shard.read_offsets()[:-1] + base).tolist()}
        # A document cut by the window's edge starts anew there.
        own = np.diff([*(place for place in range(length) if place in starts | {0}), length]).tolist()
        rows.append((window[:-1], [IGNORED if place in starts else int(window[place])
                                   for place in range(1, length + 1)],
                     np.repeat(np.arange(len(own)), own), np.concatenate([np.arange(length) for length in own])))
        lengths.append(tuple(own))
    tokens, labels, documents, positions = (
        torch.tensor(np.array(part).astype(kind)) for part, kind in zip(
            zip(*rows, strict=True), ("int64", "int64", "int32", "int64"), strict=True))
    return Batch(tokens, labels, documents, positions, targets=int((labels != IGNORED).sum()), lengths=tuple(lengths),
                 padding=(0,) * len(rows))
