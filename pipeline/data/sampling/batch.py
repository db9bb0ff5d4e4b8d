"""A batch: sequences of tokens with their labels, documents and positions, made of rows all at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor

IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """Sequences ready for the model; every tensor is (sequences, length).

    Attributes:
        tokens: int64 ids.
        labels: int64, the next token; -100 where the next token starts another document, and for padding.
        documents: int32, number of the document within its sequence; attention stays inside one.
        positions: int64, 0 at each document's (or, where it was cut, sequence's) start.
        targets: how many labels count.
        lengths: the lengths of the documents of each sequence, on the host, so that reading them waits for no device.
            Padding counts as the last document.
        padding: tokens of padding at the end of each sequence.
    """

    tokens: Tensor
    labels: Tensor
    documents: Tensor
    positions: Tensor
    targets: int
    lengths: tuple[tuple[int, ...], ...]
    padding: tuple[int, ...] = ()

    def split(self, sequences: int) -> Iterator[Batch]:
        """Micro-batches of so many sequences."""
        for number, parts in enumerate(zip(*(tensor.split(sequences) for tensor in (
                self.tokens, self.labels, self.documents, self.positions)), strict=True)):
            tokens, labels, documents, positions = parts
            own = slice(number * sequences, (number + 1) * sequences)
            yield Batch(tokens, labels, documents, positions, int((labels != IGNORED).sum()), self.lengths[own],
                        self.padding[own])

    def to(self, device: torch.device) -> Batch:
        """The same batch on `device`."""
        if device.type == "cpu":
            return self
        tokens, labels, documents, positions = (
            tensor.pin_memory().to(device, non_blocking=True)
            for tensor in (self.tokens, self.labels, self.documents, self.positions))
        return Batch(tokens, labels, documents, positions, self.targets, self.lengths, self.padding)


def assemble(rows: np.ndarray, starts: Sequence[np.ndarray], used: Sequence[int]) -> Batch:
    """A batch of sequences of `length` tokens, by a few calls for all rows together.

    Args:
        rows: (sequences, length + 1) ids of any width; the last of a row is but the label of the one before.
        starts: of each row the places at which documents begin, each once; length is one of them where the label is
            another document's. The beginning of a row counts as one, too: the rest of a document that was cut there
            is a document of its own.
        used: tokens of each row before its padding, which must begin as a document of its own.
    """
    import torch  # here: tools that look up samples need none

    count, length = rows.shape[0], rows.shape[1] - 1
    size = count * length
    labels = rows[:, 1:].astype(np.int64)
    place = np.concatenate(starts)
    row_starts = np.arange(0, size + length, length)
    at = row_starts[:-1].repeat([len(places) for places in starts]) + place
    inside = place > 0
    labels.reshape(-1)[at[inside] - 1] = IGNORED
    ignored = int(np.count_nonzero(inside))
    padding = [length - tokens for tokens in used]
    for row, tokens in enumerate(padding):
        if tokens:
            labels[row, length - tokens:] = IGNORED
            ignored += tokens
    first = np.concatenate([row_starts, at[inside & (place < length)]])
    first.sort()  # where documents begin, over all rows, and the end of the last
    lengths, first = first[1:] - first[:-1], first[:-1]
    bounds = first.searchsorted(row_starts)  # of rows among documents
    numbers = np.arange(len(first), dtype=np.int32) - bounds[:-1].astype(np.int32).repeat(bounds[1:] - bounds[:-1])
    listed = lengths.tolist()
    return Batch(torch.from_numpy(rows[:, :-1].astype(np.int64)), torch.from_numpy(labels),
                 torch.from_numpy(numbers.repeat(lengths).reshape(count, length)),
                 torch.from_numpy((_places(size) - first.repeat(lengths)).reshape(count, length)), size - ignored,
                 tuple(tuple(listed[start:stop]) for start, stop in pairwise(bounds.tolist())), tuple(padding))


@lru_cache(4)
def _places(size: int) -> np.ndarray:
    return np.arange(size)


def pack(windows: Sequence[tuple[np.ndarray, np.ndarray]]) -> Batch:
    """Windows of length + 1 tokens, with the places where documents start, as a batch of sequences of `length`."""
    return assemble(np.stack([tokens for tokens, _ in windows]), [starts for _, starts in windows],
                    [len(tokens) - 1 for tokens, _ in windows])
