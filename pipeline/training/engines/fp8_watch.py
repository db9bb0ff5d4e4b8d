"""What fp8 does to the values of each layer: their largest, and the share that it turns to zero.

fp8 (e4m3) reaches down to about a 230,000th of the largest value that shares a scale; half of that becomes zero. Only
gradients under `tensorwise` (e5m2) have more range, and fewer bits. Where a large value shares a scale with many small
ones, the small ones and what they would have taught are lost, which the loss shows much later.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeline.data.sampling.batch import Batch
from pipeline.parallel.compiling import uncompiled
from pipeline.parallel.pipeline_parallel import PipelinedModel
from pipeline.training.engines.engine import Engine
from pipeline.training.guards import json_number

Layers = dict[str, dict[str, tuple[float | str, float]]]
"""By layer and factor: the largest absolute value ("nan" and "inf" as text), and the share that becomes zero."""

FACTORS = ("input", "weight", "gradient")
"""Of a layer's products: what goes in, the weight, and the gradient that comes back."""


class Fp8Watch:
    """Looks at the converted layers of an engine's model.

    Attributes:
        names: of the layers that are looked at, those of other ranks of a pipeline too.
        layers: this rank's, by name.
    """

    def __init__(self, engine: Engine, device: torch.device) -> None:
        self.engine, self.device = engine, device
        parts = engine.model.stages if isinstance(engine.model, PipelinedModel) else [engine.model]
        held = [dict(converted_layers(part)) for part in parts]
        self.layers = {name: layer for part in held for name, layer in part.items()}
        self.names = list(self.layers)
        if isinstance(engine.model, PipelinedModel):
            self.names = engine.model.of_all([*part] for part in held)

    def measure(self, batch: Batch, targets: int) -> Layers:
        """By layer and factor, over the ranks: the largest absolute value, and of the values that are not zero, the
        share that fp8 makes zero in that product of the recipe's where it is largest.

        batch: this rank's of a step, of which the first sequence is looked at, in a pipeline the last micro-
        batch. targets: by which the loss is divided, as in a step. A forward and a backward pass, not compiled;
        its gradients are thrown away and training goes on as if it had not been. Every rank calls it alike,
        between two steps.
        """
        # Rows: layer x factor. Columns: largest value; values other than 0; those that become 0 in either product.
        found = torch.zeros(len(self.names) * len(FACTORS), 4, dtype=torch.float64, device=self.device)
        with self._hooked(found), uncompiled():
            self.engine.trial(batch, targets)
        self.engine.model.zero_grad(set_to_none=True)
        largest, counts = found[:, 0].contiguous(), found[:, 1:].contiguous()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        dist.all_reduce(counts)
        shares = (counts[:, 1:].amax(1) / counts[:, 0].clamp(min=1)).tolist()
        figures = ((json_number(_short(value)), _short(share))
                   for value, share in zip(largest.tolist(), shares, strict=True))
        return {name: {factor: next(figures) for factor in FACTORS} for name in self.names}

    @contextmanager
    def _hooked(self, found: Tensor) -> Iterator[None]:
        rows = dict(zip(self.names, found.split(len(FACTORS)), strict=True))
        handles = [layer.register_forward_hook(partial(self._note, rows[name])) for name, layer in self.layers.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @staticmethod
    def _note(rows: Tensor, layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Fill a layer's rows; again, with the same, where its forward pass is computed again."""
        config = layer.config
        with torch.no_grad():
            _fill(rows[0], inputs[0], layer, (config.cast_config_input, -1),
                  (config.cast_config_input_for_grad_weight, 0))
            _fill(rows[1], layer.weight.t(), layer, (config.cast_config_weight, 0),
                  (config.cast_config_weight_for_grad_input, -1))
        if output.requires_grad:
            output.register_hook(lambda gradient: _fill(
                rows[2], gradient, layer, (config.cast_config_grad_output, -1),
                (config.cast_config_grad_output_for_grad_weight, 0)))


def converted_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers that multiply in fp8, by name."""
    from torchao.float8.float8_linear import Float8Linear
    yield from ((name, module) for name, module in model.named_modules() if isinstance(module, Float8Linear))


@torch.no_grad()
def _fill(row: Tensor, values: Tensor, layer: Any, *casts: tuple[Any, int]) -> None:
    """One row of `Fp8Watch.measure`. casts: the recipe's (how, along which dimension a scale is shared)."""
    from torchao.float8.config import ScalingType
    from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim, hp_tensor_to_float8_dynamic

    local = values.to_local() if isinstance(values, DTensor) else values
    local = local.detach().reshape(-1, local.shape[-1])
    nonzero = local != 0
    row[0], row[1] = local.abs().amax(), nonzero.sum()
    for column, (cast, dim) in enumerate(casts, start=2):
        if cast.scaling_type is ScalingType.DISABLED:
            continue
        cast_values: Any = hp_tensor_to_float8_dynamic(
            local, cast.target_dtype, layer.linear_mm_config, scaling_granularity=cast.scaling_granularity,
            axiswise_dim=get_maybe_axiswise_dim(dim, cast.scaling_granularity),
            round_scales_to_power_of_2=layer.config.round_scales_to_power_of_2)
        row[column] = (nonzero & (cast_values._data.float() == 0)).sum()


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def summary(layers: Layers) -> dict[str, float | str]:
    """The extremes over layers, as curves: of each factor the largest and the smallest amax, and the largest share of
    zeros."""
    found: dict[str, float | str] = {}
    for factor in FACTORS:
        largest, zeros = zip(*(figures[factor] for figures in layers.values()), strict=True)
        values = [float(value) for value in largest]
        found |= {f"fp8_{factor}_amax": json_number(max(values)),
                  f"fp8_{factor}_amax_smallest": json_number(min(values)), f"fp8_{factor}_zeros": max(zeros)}
    return found
