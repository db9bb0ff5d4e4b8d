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
    sums = torch.zeros(len(KINDS), len(names), dtype=torch.float64, device=device)
    before: list[Tensor] = []
    called = engine.before_update

    def weights() -> list[tuple[int, Tensor]]:
        """This rank's part, with the row of each piece; each element of the whole is on one rank."""
        return [(rows[key.removeprefix("model.")], piece.tensor) for key, pieces in engine.state_shards().items()
                if key.startswith("model.") for piece in pieces if piece.tensor.numel()]

    def add(kind: str, pieces: list[tuple[int, Tensor]]) -> None:
        if pieces:
            places, tensors = zip(*pieces, strict=True)
            sums[KINDS.index(kind)].index_add_(0, torch.tensor(places, device=device),
                                               torch.stack(torch._foreach_norm(tensors)).double().square())

    @torch.no_grad()
    def look() -> None:
        called()
        own, gradients = weights(), engine.gradients()
        # Ranks that hold copies all give the gradient; the one that gives the weight counts.
        add("gradient", [(row, piece.tensor) for row in dict(own) for piece in gradients.get(names[row], ())])
        before.extend(tensor.clone() for _, tensor in own)

    engine.before_update = look
    try:
        yield found
    finally:
        engine.before_update = called
    with torch.no_grad():
        after = weights()
        add("weight", after)
        add("update", [(row, old.sub_(now)) for (row, now), old in zip(after, before, strict=True)])
    dist.all_reduce(sums)
    found |= {name: tuple(json_number(float(f"{value:.6g}")) for value in norms)
              for name, norms in zip(names, sums.T.sqrt().tolist(), strict=True)}


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
