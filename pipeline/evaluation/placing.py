"""Places a model on this rank's device for measuring: whole if it fits, else sharded over as few ranks as possible."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from drover.model.attention.backend import Where, choose
from drover.model.config import ModelConfig
from drover.model.llama import Llama
from drover.model.names import parameter_shapes
from drover.pipeline.config.training import ParallelConfig
from drover.pipeline.core.console import Watch
from drover.pipeline.core.errors import UserError
from drover.pipeline.formats.interface import Weights
from drover.pipeline.formats.weights import load_model
from drover.pipeline.parallel.host_memory import always_return_freed_memory, free_memory
from drover.pipeline.parallel.ranks import ALONE, Ranks

SHARE = 0.6
"""The share of free memory for weights: activations, logits and caches need the rest."""


@dataclass(frozen=True)
class Placed:
    """A model on its device.

    Attributes:
        model: in evaluation mode, without gradients.
        shards: neighbouring ranks that hold it together; 1: each holds the whole model.
        together: a context to enter around all calls; it keeps ranks that share a model in step.
    """

    model: Llama
    shards: int = 1
    together: AbstractContextManager[Any] = field(default_factory=nullcontext)

    @property
    def broken(self) -> bool:
        """Whether a call failed on this rank while others wait for it, so that the ranks cannot continue together."""
        return bool(getattr(self.together, "broken", False))

    def divide(self, ranks: Ranks, work: Sequence[Any], function: Callable[[Any], Any], watch: Watch = iter
               ) -> list[Any]:
        """Results of `function` in the order of `work`, each computed by one rank, on every rank.

        watch: of this rank's part.

        Raises:
            UserError: another rank failed, which would otherwise keep this one waiting.
        """
        made = list[Any]()
        error = None
        try:
            with self.together:
                made = [function(item) for item in watch(work[ranks.rank::ranks.world])]
        except Exception as failure:
            if self.broken:
                raise
            error = failure
        message = None if error is None else str(error) if isinstance(error, UserError) else \
            f"{type(error).__name__} on rank {ranks.rank}: {error}"
        parts = ranks.gather((made, message))
        if error is not None:
            raise error
        if failed := next((other for _, other in parts if other is not None), None):
            raise UserError(failed)
        return [parts[number % ranks.world][0][number // ranks.world] for number in range(len(work))]


def place(weights: Weights, device: torch.device, dtype: torch.dtype, *, ranks: Ranks = ALONE,
          dp_shard: int | None = None, say: Callable[[str], None] = lambda text: None) -> Placed:
    """The model with these weights.

    Args:
        ranks: all ranks that hold the model and call it together.
        dp_shard: the number of neighbouring ranks that share it, a divisor of all; None: as few as SHARE of the free
            memory of the rank that has least allows.
        say: prints the layout; called on rank 0.

    Raises:
        UserError: the weights cannot be read.
    """
    config = weights.config
    attention = choose("auto", Where(device, dtype, compiled=False, head_dim=config.head_width))
    allowed = SHARE * min(ranks.gather(free_memory(device)))
    shards = dp_shard or fewest(config, dtype, allowed, ranks.world)
    if ranks.is_rank_zero and attention.fallback:
        say(attention.fallback)
    if ranks.is_rank_zero and shards > 1:
        say(f"weights sharded over {shards} ranks (FSDP2, all-gathered block by block): "
            f"{needed(config, dtype, shards) / 1e9:.3g} GB on each, where weights may take {allowed / 1e9:.3g} GB; "
            f"whole they take {needed(config, dtype, 1) / 1e9:.3g} GB. Every new token of a text all-gathers all of "
            f"them once. If memory runs out, use more ranks, or evaluate.dtype=bfloat16")
    if shards == 1:
        model = load_model(weights, device, dtype)
        model.backend = attention.backend
        return Placed(model)
    from drover.pipeline.parallel.forward_only import InStep, sharded
    from drover.pipeline.parallel.grid import Grid

    if device.type == "cpu":
        always_return_freed_memory()
    grid = Grid(ranks, ParallelConfig(dp_shard=shards, dp_replicate=ranks.world // shards))
    model = sharded(config, lambda name, shape, offset, size: weights.read(name, offset, size), grid, dtype,
                    attention.backend)
    return Placed(model, shards, InStep(model, grid.mesh["shard"].get_group(), device))


def needed(config: ModelConfig, dtype: torch.dtype, shards: int) -> int:
    """Bytes of weights on one rank: its share and, if sharded, the two largest units all-gathered, twice each."""
    sizes: dict[str, int] = {}
    for name, shape in parameter_shapes(config).items():
        unit = ".".join(name.split(".")[:2]) if name.startswith("layers.") else name.split(".")[0]
        sizes[unit] = sizes.get(unit, 0) + math.prod(shape) * dtype.itemsize
    total = sum(sizes.values())
    return total if shards == 1 else -(-total // shards) + 2 * sum(sorted(sizes.values())[-2:])


def fewest(config: ModelConfig, dtype: torch.dtype, allowed: float, world: int) -> int:
    """The smallest divisor of `world` such that weights sharded over it take at most `allowed` bytes on each rank;
    `world` if none is enough."""
    return next((shards for shards in range(1, world + 1)
                 if world % shards == 0 and needed(config, dtype, shards) <= allowed), world)
