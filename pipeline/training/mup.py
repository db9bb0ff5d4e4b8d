"""muP: initial values and learning rates by width, so that one learning rate suits all widths (Yang et al. 2022).

With r = width / `train.mup_base_width`, the initial values and the learning rate of a parameter are multiplied by:

| parameter | initial values | rate of AdamW | rate of Muon |
|---|---|---|---|
| matrices of the blocks | r^-1/2 | 1/r | r^-1/2 |
| the norm before the output | 1/r | 1/r | 1/r |
| output matrix, if it is not the embedding | r^1/2: as in the base | 1 | 1 |
| embedding, other norms | 1 | 1 | 1 |

Muon's updates have equal singular values; those of AdamW add up in few directions, whose singular value grows faster
with the width. The second row is muP's factor 1/r of the logits: under AdamW, a weight of 1/r that moves at 1/r of the
rate has the effect of such a factor. So the trained network is a plain Llama.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from drover.pipeline.config.tree import Config
from drover.pipeline.parallel.fsdp import InitialValues

LAST_NORM = "norm.weight"


def is_block_matrix(name: str) -> bool:
    """Whether a parameter is a matrix within a block: no embedding, output matrix or norm."""
    return name.startswith("layers.") and name.endswith(".weight") and not name.endswith("norm.weight")


def rate_factor(name: str, config: Config) -> float:
    """The factor on a parameter's learning rate. 1 without muP."""
    ratio = width_ratio(config)
    if is_block_matrix(name):
        return ratio ** (-0.5 if config.train.optimizer == "muon" else -1)
    return 1 / ratio if name == LAST_NORM else 1.0


def scaled(values: InitialValues, config: Config) -> InitialValues:
    """Initial values by muP from those of the usual initialization. They are the same without muP."""
    ratio = width_ratio(config)

    def result(name: str, shape: Sequence[int], offset: Sequence[int], size: Sequence[int]) -> Tensor:
        value = values(name, shape, offset, size)
        if is_block_matrix(name):
            return value * ratio ** -0.5
        return value * {LAST_NORM: 1 / ratio, "output.weight": ratio ** 0.5}.get(name, 1)
    return values if ratio == 1 else result


def width_ratio(config: Config) -> float:
    """The model's width over the base's; 1 without muP."""
    return config.model.dim / (config.train.mup_base_width or config.model.dim)
