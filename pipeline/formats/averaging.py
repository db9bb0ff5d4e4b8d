"""The mean of the weights of several checkpoints of a run, as Llama 3 averaged those of its annealing (Polyak 1991)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from pipeline.formats.sharded_tensors import CheckpointReader


class MeanReader:
    """Reads tensors of which each is the mean of that of all the checkpoints; of one checkpoint, its own.

    Sums are float64, in the order of the folders, so that the mean depends on nothing but the weights. Memory is needed
    for two tensors and one in float64. Close it, or use it in a `with`.

    Raises:
        UserError: as `CheckpointReader`.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        with ExitStack() as opening:
            self._readers = [opening.enter_context(CheckpointReader(folder)) for folder in folders]
            self._opened = opening.pop_all()

    def __enter__(self) -> MeanReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def names(self, prefix: str = "") -> list[str]:
        """As `CheckpointReader`."""
        return self._readers[0].names(prefix)

    def shape(self, name: str) -> tuple[int, ...]:
        """As `CheckpointReader`."""
        return self._readers[0].shape(name)

    def read(self, name: str) -> Tensor:
        """The whole tensor, in its own type."""
        first, *others = self._readers
        if not others:
            return first.read(name)
        total = first.read(name).to(torch.float64)
        for reader in others:
            total += reader.read(name)
        return total.div_(len(self._readers)).to(first.dtype(name))
