"""Initial values of a model's parameters, in the rectangles that ranks hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from drover.model.config import ModelConfig
from drover.model.llama import initial_value

InitialValues = Callable[[str, Sequence[int], Sequence[int], Sequence[int]], Tensor]
"""(name of a parameter, its shape, offset, size) -> that rectangle of its initial value, on the host."""


def drawn(config: ModelConfig, seed: int) -> InitialValues:
    """`drover.model.llama.initial_value`. Each rank draws only the rows that it needs, and all layouts get the same
    values.

    It uses as many threads as torch has on this rank (OMP_NUM_THREADS, which launches set to the rank's share of the
    cores).
    """
    workers = torch.get_num_threads()

    def values(name: str, shape: Sequence[int], offset: Sequence[int], size: Sequence[int]) -> Tensor:
        value = initial_value(name, shape, config, seed, range(offset[0], offset[0] + size[0]), workers)
        for dimension in range(1, value.dim()):
            value = value.narrow(dimension, offset[dimension], size[dimension])
        return value
    return values
