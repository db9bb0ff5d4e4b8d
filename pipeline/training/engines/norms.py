"""Norms of each parameter's gradient, weight and update: to find what becomes unstable, and what does not learn."""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor

from drover.pipeline.parallel.pipeline_parallel import parameter_names
from drover.pipeline.training.engines.engine import Engine
from drover.pipeline.training.guards import json_number

KINDS = ("gradient", "weight", "update")
Norms = dict[str, tuple[float | str, ...]]
"""By parameter or layer, a value for each of KINDS; NaN and infinities as text."""


class StepNorms:
    """The norms of every parameter of the whole model in one step: of the gradient before clipping, and of the weight
    and its update after the step, in the precision of the master weights. Make it between the step's last backward pass
    and its update, on every rank alike. Until `finish`, this rank's part of the weights is in memory twice."""

    @torch.no_grad()
    def __init__(self, engine: Engine, device: torch.device) -> None:
        self.engine = engine
        self.device = device
        self.names = parameter_names(engine.model)
        self._rows = {name: row for row, name in enumerate(self.names)}
        self._sums = torch.zeros(len(KINDS), len(self.names), dtype=torch.float64, device=device)
        own = self._weights()
        gradients = engine.gradients()
        # All replicas return the gradient; only that of the rank that returns the weight counts.
        self._add("gradient", [(row, piece.tensor) for row in dict(own)
                               for piece in gradients.get(self.names[row], ())])
        self._before = [tensor.clone() for _, tensor in own]

    @torch.no_grad()
    def finish(self) -> Norms:
        """The norms, on all ranks. Call it after the update. It all-reduces three numbers per parameter."""
        after = self._weights()
        self._add("weight", after)
        self._add("update", [(row, old.sub_(now)) for (row, now), old in zip(after, self._before, strict=True)])
        dist.all_reduce(self._sums)
        return {name: tuple(json_number(float(f"{value:.6g}")) for value in norms)
                for name, norms in zip(self.names, self._sums.T.sqrt().tolist(), strict=True)}

    def _weights(self) -> list[tuple[int, Tensor]]:
        """This rank's part, with the row of each piece; each element of the whole is on one rank."""
        return [(self._rows[key.removeprefix("model.")], piece.tensor)
                for key, pieces in self.engine.state_shards().items() if key.startswith("model.")
                for piece in pieces if piece.tensor.numel()]

    def _add(self, kind: str, pieces: list[tuple[int, Tensor]]) -> None:
        if pieces:
            places, tensors = zip(*pieces, strict=True)
            self._sums[KINDS.index(kind)].index_add_(0, torch.tensor(places, device=self.device),
                                                     torch.stack(torch._foreach_norm(tensors)).to(self.device).double().square())


def layer_norms(norms: Norms) -> dict[str, dict[str, float | str]]:
    """The norms by layer for each of KINDS. A layer is a block (`layers.3`) or a module outside of them
    (`tok_embeddings`)."""
    squares = defaultdict[str, list[float]](lambda: [0.0] * len(KINDS))
    for name, values in norms.items():
        parts = name.split(".")
        row = squares[".".join(parts[:2]) if parts[0] == "layers" else parts[0]]
        for index, value in enumerate(values):
            row[index] += float(value) ** 2
    return {f"{kind}_norms": {layer: json_number(float(f"{row[index] ** 0.5:.6g}")) for layer, row in squares.items()}
            for index, kind in enumerate(KINDS)}
