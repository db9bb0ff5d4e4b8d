"""Bits per byte of validation text: a loss that can be compared across vocabularies.

    bits per byte = sum of nats over all targets / (ln 2 x UTF-8 bytes of the original text)

Every token of a document but its BOS is a target exactly once, including its EOS. Attention and positions restart at
each document. A document longer than the window is cut into consecutive windows that overlap by one token. After a cut
the model predicts without the text before it, so the result is slightly worse than the model is. The result does not
depend on the number of ranks: batches are formed before they are distributed, and the sums of all windows are added in
a fixed order.

Also imported by training ranks: numpy and torch only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from drover.model.loss import IGNORED
from drover.pipeline.core.console import Watch
from drover.pipeline.data.sampling.packing import Pieces, best_fit
from drover.pipeline.evaluation.scores import Measurement

Forward = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(tokens, labels, documents, positions), each (batch, length) -> the nats of each target, (batch, length)."""


@dataclass(frozen=True)
class ValidationText:
    """The validation documents of one source.

    Attributes:
        documents: ids of each document, from BOS to EOS; may be read on access.
        text_bytes: UTF-8 bytes of their original text.
        lengths: tokens of each document, if known without reading them.
    """

    documents: Sequence[np.ndarray]
    text_bytes: int
    lengths: Sequence[int] | None = None


@dataclass(frozen=True)
class TextPiece:
    """Pairs (token, next token) [start, stop) of a document, which lie in one window."""

    document: int
    start: int
    stop: int


class ValidationBatch(NamedTuple):
    """Windows ready for the model.

    windows: their numbers among all windows, (windows,) int64; empty for a batch that only keeps ranks in step. inputs:
    tokens, labels, documents and positions, (batch, length) int64 each, as the model takes them.
    """

    windows: Tensor
    inputs: tuple[Tensor, ...]


class ValidationBatches:
    """This rank's share of the batches; every rank has the same number of them, because a sharded model needs all
    ranks in each forward pass. Documents are read for the batch that holds them, so a rank holds what it is measuring.

    Args:
        texts: validation documents by source.
        length: tokens per window.
        batch: windows per batch.
        rank, world: this process among all.
    """

    def __init__(self, texts: Mapping[str, ValidationText], *, length: int, batch: int, rank: int = 0,
                 world: int = 1) -> None:
        self.texts = dict(texts)
        self.length = length
        self.batch = batch
        self.rank = rank
        self.world = world
        self._windows: list[tuple[str, list[TextPiece]]] = []
        self.targets: dict[str, int] = {}
        for name, text in self.texts.items():
            lengths = text.lengths or list(map(len, text.documents))
            self.targets[name] = sum(max(0, count - 1) for count in lengths)
            self._windows += [(name, pieces) for pieces in pack_windows(lengths, length)]

    @property
    def sources(self) -> list[str]:
        """The source of each window."""
        return [name for name, _ in self._windows]

    def __len__(self) -> int:
        return math.ceil(math.ceil(len(self._windows) / self.batch) / self.world)

    def __iter__(self) -> Iterator[ValidationBatch]:
        for turn in range(len(self)):
            first = (turn * self.world + self.rank) * self.batch
            yield self._build(range(first, min(first + self.batch, len(self._windows))))

    @property
    def pieces(self) -> Iterator[tuple[int, str, TextPiece]]:
        """Every piece with the number of its window and its source, in the order of the windows."""
        return ((number, name, piece) for number, (name, pieces) in enumerate(self._windows) for piece in pieces)

    def _build(self, windows: range) -> ValidationBatch:
        shape = (max(1, len(windows)), self.length)
        tokens, labels = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
        documents, positions = np.full(shape, -1, np.int64), np.zeros(shape, np.int64)
        for row, window in enumerate(windows):
            name, pieces = self._windows[window]
            at = 0
            for number, piece in enumerate(pieces):
                ids = self.texts[name].documents[piece.document][piece.start:piece.stop + 1]
                place = slice(at, at + piece.stop - piece.start)
                tokens[row, place], labels[row, place] = ids[:-1], ids[1:]
                documents[row, place] = number
                positions[row, place] = np.arange(piece.stop - piece.start)
                at = place.stop
        return ValidationBatch(torch.tensor(windows, dtype=torch.int64),
                            tuple(map(torch.from_numpy, (tokens, labels, documents, positions))))


def pack_windows(lengths: Sequence[int], window: int) -> list[list[TextPiece]]:
    """Place documents of so many tokens into windows of `window` (token, next token) pairs, by best fit.

    A document of n tokens has n - 1 pairs. Whole windows are cut off long ones; what is left, like short documents,
    goes to the fullest window that still has room, longest first.
    """
    pairs = np.maximum(0, np.asarray(lengths, np.int64) - 1)
    documents = np.arange(len(pairs)).repeat(-(-pairs // window))
    starts, sizes, _ = Pieces(np.zeros_like(pairs), pairs, np.zeros(len(pairs), bool)).cut(window)
    order, ends = best_fit(sizes, window)
    pieces = [TextPiece(*map(int, result)) for result in zip(documents[order], starts[order], (starts + sizes)[order],
                                                           strict=True)]
    return [pieces[first:end] for first, end in pairwise(ends.tolist())]


@torch.no_grad()
def measure(forward: Forward, batches: ValidationBatches, device: torch.device | str = "cpu",
            copies: int = 1, together: AbstractContextManager[Any] | None = None, watch: Watch = iter,
            by_document: bool = False) -> dict[str, Measurement]:
    """Nats, targets and bytes of each source, the same on every rank.

    Called by all ranks together when there are several; `copies` of them (a tensor-parallel group) hold equal
    batches and nats. `forward` gets tensors on `device`. For a `drover.model.llama.Llama` it is
    `model(tokens, labels, documents=documents, positions=positions, reduction="none")`, the model being in evaluation
    mode.

    together: a context for the measurement alone, which may synchronize ranks by collectives. by_document: also the
    nats of each document.
    """
    sources = batches.sources
    device = torch.device(device)
    pieces = [*batches.pieces] if by_document else []
    ends = np.searchsorted([window for window, _, _ in pieces], range(len(sources) + 1)).tolist()
    sums = torch.zeros(len(sources) + len(pieces), dtype=torch.float64, device=device)
    with together or nullcontext():
        for windows, inputs in watch(batches):
            losses = forward(*(tensor.to(device) for tensor in inputs))
            nats = losses.sum(dim=1, dtype=torch.float64)
            if len(windows):
                sums[windows.to(sums.device)] = nats
            for window, row in zip(windows.tolist(), losses, strict=False) if by_document else ():
                sizes = [piece.stop - piece.start for _, _, piece in pieces[ends[window]:ends[window + 1]]]
                own = np.add.reduceat(row.double().cpu().numpy(), np.cumsum([0, *sizes[:-1]]))
                place = len(sources) + ends[window]
                sums[place:place + len(own)] = torch.from_numpy(own)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(sums)  # every window is zero on all ranks but the copies: the sum is exact
        sums /= copies
    per_window = sums[:len(sources)].tolist()
    documents = {name: np.zeros(len(text.documents) if by_document else 0) for name, text in batches.texts.items()}
    for (_, name, piece), value in zip(pieces, sums[len(sources):].tolist(), strict=True):
        documents[name][piece.document] += value
    return {name: Measurement(math.fsum(value for value, source in zip(per_window, sources, strict=True)
                                        if source == name), batches.targets[name], text.text_bytes,
                              tuple(documents[name].tolist()))
            for name, text in batches.texts.items()}
