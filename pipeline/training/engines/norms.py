"""Norms of each parameter's gradient, weight and update: where a training becomes unstable, and what learns nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from drover.pipeline.parallel.pipeline_parallel import parameter_names
from drover.pipeline.training.engines.engine import Engine
from drover.pipeline.training.guards import json_number

KINDS = ("gradient", "weight", "update")
Norms = dict[str, tuple[float | str, ...]]
"""By parameter or layer, of each of KINDS; what is no number as text."""


@contextmanager
def measured(engine: Engine, device: torch.device) -> Iterator[Norms]:
    """Measure the engine's step within. The norms of every parameter of the whole model are there afterwards, on all
    ranks: of its gradient before clipping, of its weight and of its update after it, as masters hold them.

    Every rank calls it alike, after `before_update` was set, which is called too. One sum over ranks of three numbers
    a parameter. While the update is made, this rank's part of the weights is in memory twice.
    """
    found: Norms = {}
    names = parameter_names(engine.model)
    rows = {name: row for row, name in enumerate(names)}
    sums = torch.zeros(len(names), len(KINDS), dtype=torch.float64, device=device)
    before: list[Tensor] = []
    called = engine.before_update

    def weights() -> dict[str, list[Tensor]]:
        """This rank's part; each element of the whole is on one rank."""
        return {name.removeprefix("model."): [piece.tensor for piece in pieces]
                for name, pieces in engine.state_shards().items() if name.startswith("model.")}

    def add(kind: str, tensors: dict[str, list[Tensor]]) -> None:
        flat = [(rows[name], tensor) for name, pieces in tensors.items() for tensor in pieces if tensor.numel()]
        if flat:
            squares = torch.stack(torch._foreach_norm([tensor for _, tensor in flat])).double().square()
            sums[:, KINDS.index(kind)].index_add_(0, torch.tensor([row for row, _ in flat], device=device), squares)

    @torch.no_grad()
    def look() -> None:
        called()
        own, gradients = weights(), engine.gradients()
        # Ranks that hold copies all give the gradient; the one that gives the weight counts.
        add("gradient", {name: [piece.tensor for piece in gradients.get(name, ())] for name in own})
        before.extend(tensor.clone() for pieces in own.values() for tensor in pieces)

    engine.before_update = look
    try:
        yield found
    finally:
        engine.before_update = called
    with torch.no_grad():
        after = weights()
        add("weight", after)
        kept = iter(before)
        add("update", {name: [next(kept).sub_(now) for now in pieces] for name, pieces in after.items()})
    dist.all_reduce(sums)
    found |= {name: tuple(json_number(float(f"{value:.6g}")) for value in norms)
              for name, norms in zip(names, sums.sqrt().tolist(), strict=True)}


def layer_norms(norms: Norms) -> dict[str, dict[str, float | str]]:
    """Of each kind, by layer: a block (`layers.3`), or what lies before and after them (`tok_embeddings`)."""
    squares = defaultdict[str, list[float]](lambda: [0.0] * len(KINDS))
    for name, values in norms.items():
        parts = name.split(".")
        row = squares[".".join(parts[:2]) if parts[0] == "layers" else parts[0]]
        for index, value in enumerate(values):
            row[index] += float(value) ** 2
    return {f"{kind}_norms": {layer: json_number(float(f"{row[index] ** 0.5:.6g}")) for layer, row in squares.items()}
            for index, kind in enumerate(KINDS)}
