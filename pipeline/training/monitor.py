"""Hooks that look at the model while it trains: held-out loss, sample texts, norms, what fp8 does.

All of it uses every rank (a sharded model needs all of them in each pass) and draws on no state of training: switching
it on or off changes no weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drover.model.generate import generate
from drover.pipeline.data.chosen_documents import ChosenDocuments, choose
from drover.pipeline.data.sampling.batch import Batch
from drover.pipeline.data.shard_table import open_shards
from drover.pipeline.evaluation.bits_per_byte import HeldoutBatches, HeldoutText, measure
from drover.pipeline.parallel.compiling import compiles, uncompiled
from drover.pipeline.parallel.context_parallel import whole_losses
from drover.pipeline.parallel.grid import own
from drover.pipeline.parallel.pipeline_parallel import PipelinedModel, parameter_names
from drover.pipeline.training.engines.engine import Engine
from drover.pipeline.training.engines.norms import StepNorms, layer_norms
from drover.pipeline.training.guards import json_number
from drover.pipeline.training.hooks import Hook

if TYPE_CHECKING:
    from drover.pipeline.training.engines.engine import StepResult
    from drover.pipeline.training.loop import Loop

Fp8Layers = dict[str, dict[str, tuple[float | str, float]]]
"""By layer and factor: the largest absolute value ("nan" and "inf" as text), and the share that becomes zero."""
FACTORS = ("input", "weight", "gradient")
"""Of a layer's products: what goes in, the weight, and the gradient that comes back."""
NOT_CONVERTED = -1.0
"""No largest absolute value, nor NaN."""


class Norms(Hook):
    """Norms by layer as fields of the step's line, and of every parameter in events.jsonl; in the first step of a start
    too."""

    _norms: StepNorms | None = None

    def before_update(self, loop: Loop) -> None:
        """Begin to measure, if this step is one of those."""
        due = not loop.done or loop.due(loop.config.train.norms_every, loop.progress.step + 1)
        self._norms = StepNorms(loop.engine, loop.ranks.exact) if due else None  # not those of a step that was undone

    def on_step(self, loop: Loop, result: StepResult, record: dict[str, Any]) -> None:
        """See Hook."""
        if self._norms is not None:
            norms, self._norms = self._norms.finish(), None
            loop.recorder.event("norms", step=record["step"], parameters=norms)
            record |= layer_norms(norms)


class Validation(Hook):
    """Bits per byte of a fixed part of each source's held-out documents, measured now and then; the same on every rank
    and for every number of ranks, up to rounding."""

    def __init__(self, loop: Loop) -> None:
        texts = loop.ranks.by_leader(lambda: heldout_texts(loop))
        first = loop.batch_of_phase[0]  # in all phases as in the first, so that the figures make one curve
        self.batches = HeldoutBatches(texts, length=first.sequence_length, batch=first.micro_batch,
                                      rank=loop.grid.data_rank, world=loop.grid.data_ranks)
        self.batches.keep_own()
        self._first = True  # it may have to compile

    def look(self, loop: Loop) -> dict[str, Any]:
        """Held-out bits per byte of each source; NaN is said and left out."""
        if not loop.due(loop.config.train.heldout_every):
            return {}
        model, grid = loop.engine.model, loop.grid

        def forward(tokens: Tensor, labels: Tensor, documents: Tensor, positions: Tensor) -> Tensor:
            loop.watchdog.pulse(first=self._first)
            if grid.context > 1:
                return whole_losses(model, grid.mesh["context"], tokens, labels, documents, positions)
            nats: Tensor = model(tokens, labels, documents=documents, positions=positions, reduction="none")
            return nats
        with loop.recorder.looking():
            model.eval()
            measured = measure(forward, self.batches, loop.ranks.device, copies=grid.sample_ranks)
            loop.engine.free_unsharded()
            model.train()
        self._first = False
        found = {source: result.bits_per_byte for source, result in measured.items()}
        if missing := [source for source, bits in found.items() if not math.isfinite(bits)]:
            loop.say(f"after step {loop.progress.step} the loss on held-out text of {', '.join(missing)} is NaN")
        return {"heldout_bpb": {source: bits for source, bits in found.items() if source not in missing}}


def heldout_texts(loop: Loop) -> dict[str, HeldoutText]:
    """What is measured on, by source; for one rank, which tells the others."""
    folder, found = loop.work.input("encode")[0], {}
    for source in loop.config.shard.sources:
        shards = open_shards(folder, loop.batches.table, "heldout", source.name, loop.batches.opener)
        chosen = choose(shards, loop.config.train.heldout_tokens)
        if len(chosen):
            found[source.name] = HeldoutText(list(ChosenDocuments(shards, chosen)), int(chosen.text_bytes.sum()))
    return found


class Samples(Hook):
    """Continuations of the configured prompts, always drawn with the same random numbers."""

    def __init__(self, loop: Loop) -> None:
        self.prompts = loop.ranks.by_leader(lambda: self._prompts(loop))

    def _prompts(self, loop: Loop) -> list[tuple[str, list[int]]]:
        """The prompts and their ids; none where what the vocabulary needs is missing. For one rank, which also puts
        what is drawn into words."""
        train = loop.config.train
        try:
            from drover.pipeline.tokenization.kinds import load_tokenizer
            self.tokenizer = load_tokenizer(loop.work.input("tokenizer")[0])
        except ImportError as error:
            loop.say(f"no sample texts while training: rank 0 lacks {error.name}, which the vocabulary needs")
            return []
        room = loop.config.model.context_length - train.sample_tokens
        return [(text, [self.tokenizer.bos_id, *self.tokenizer.encode(text)][:room]) for text in train.prompts]

    def look(self, loop: Loop) -> dict[str, Any]:
        """Draw. No token ends a text early, so that every rank does as many passes."""
        train, split = loop.config.train, loop.grid.tensor
        if not self.prompts or not loop.due(train.sample_every):
            return {}
        # Under tensor parallelism sequences are split evenly: no single new tokens, hence no cache. Each length would
        # be compiled anew.
        with (loop.recorder.looking(), uncompiled() if compiles(train, loop.ranks.device) else nullcontext()):
            try:
                drawn = generate(loop.engine.model, [ids for _, ids in self.prompts], train.sample_tokens,
                                 temperature=0.8, top_p=0.95, seed=0, stop_ids=(), use_cache=split == 1,
                                 multiple_of=split, pulse=loop.watchdog.pulse)
            except FloatingPointError as error:  # on every rank; the guards deal with it: the next loss is NaN too
                loop.say(f"no sample texts after step {loop.progress.step}: {error}")
                return {}
            finally:
                loop.engine.free_unsharded()
        if loop.ranks.leads:
            for (prompt, _), ids in zip(self.prompts, drawn, strict=True):
                loop.recorder.tell("sample", loop.progress.step, prompt, self.tokenizer.decode(ids))
        return {}


class Fp8Watch(Hook):
    """What fp8 does to the values of each layer: their largest, and the share that it turns to zero.

    fp8 (e4m3) reaches down to about a 230,000th of the largest value that shares a scale; half of that becomes zero.
    Only gradients under `tensorwise` (e5m2) have more range, and fewer bits. Where a large value shares a scale with
    many small ones, the small ones and what they would have taught are lost, which the loss shows much later.

    Attributes:
        layers: this rank's, by name.
    """

    def __init__(self, engine: Engine, device: torch.device) -> None:
        self.engine, self.device = engine, device
        self._names = [name.removesuffix(".weight") for name in parameter_names(engine.model)]
        stages = engine.model.stages if isinstance(engine.model, PipelinedModel) else [engine.model]
        self.layers = {name: layer for stage in stages for name, layer in converted_layers(stage)}

    def look(self, loop: Loop) -> dict[str, Any]:
        """What fp8 does, as curves; layer by layer it goes into events.jsonl. After the first step of a start too: what
        it needs of memory shows at once."""
        if not loop.done or not (loop.done == 1 or loop.due(loop.config.train.fp8_watch_every)):
            return {}
        loop.watchdog.pulse()
        with loop.recorder.looking():
            layers = self.measure(*loop.current)
        loop.recorder.event("fp8", step=loop.progress.step, layers=layers)
        return fp8_curves(layers)

    def measure(self, batch: Batch, targets: int) -> Fp8Layers:
        """By layer and factor, over the ranks: the largest absolute value, and of the values that are not zero, the
        share that fp8 makes zero in that product of the recipe's where it is largest.

        batch: this rank's of a step, of which the first sequence is looked at, in a pipeline the last micro-
        batch. targets: by which the loss is divided, as in a step. A forward and a backward pass, not compiled;
        its gradients are thrown away and training goes on as if it had not been. Every rank calls it alike,
        between two steps.
        """
        names, shape = self._names, (len(self._names), len(FACTORS))
        largest = torch.full(shape, NOT_CONVERTED, dtype=torch.float64, device=self.device)
        # Of each: values other than 0, and those that become 0 in either product.
        counts = torch.zeros(*shape, 3, dtype=torch.float64, device=self.device)
        with ExitStack() as hooked, uncompiled():
            for name, layer in self.layers.items():
                at = names.index(name)
                hooked.callback(layer.register_forward_hook(partial(self._note, largest[at], counts[at])).remove)
            self.engine.trial(batch, targets)
        self.engine.model.zero_grad(set_to_none=True)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        dist.all_reduce(counts)
        shares = (counts[..., 1:].amax(-1) / counts[..., 0].clamp(min=1)).tolist()
        return {name: {factor: (json_number(_short(value)), _short(share))
                       for factor, value, share in zip(FACTORS, values, shares_here, strict=True)}
                for name, values, shares_here in zip(names, largest.tolist(), shares, strict=True)
                if values[0] != NOT_CONVERTED}

    @staticmethod
    def _note(largest: Tensor, counts: Tensor, layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Fill a layer's rows; again, with the same, where its forward pass is computed again."""
        config = layer.config

        def fill(factor: int, values: Tensor, *casts: tuple[Any, int]) -> None:
            largest[factor], counts[factor] = _figures(values, layer, casts)
        with torch.no_grad():
            fill(0, inputs[0], (config.cast_config_input, -1), (config.cast_config_input_for_grad_weight, 0))
            fill(1, layer.weight.t(), (config.cast_config_weight, 0), (config.cast_config_weight_for_grad_input, -1))
        if output.requires_grad:
            output.register_hook(lambda gradient: fill(
                2, gradient, (config.cast_config_grad_output, -1), (config.cast_config_grad_output_for_grad_weight, 0)))


def converted_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers that multiply in fp8, by name."""
    from torchao.float8.float8_linear import Float8Linear
    yield from ((name, module) for name, module in model.named_modules() if isinstance(module, Float8Linear))


@torch.no_grad()
def _figures(values: Tensor, layer: Any, casts: Sequence[tuple[Any, int]]) -> tuple[Tensor, Tensor]:
    """What `Fp8Watch.measure` keeps of a factor. casts: the recipe's (how, along which dimension a scale is shared)."""
    from torchao.float8.config import ScalingType
    from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim, hp_tensor_to_float8_dynamic

    local = own(values).detach().flatten(0, -2)
    nonzero = local != 0
    counts = [nonzero.sum()]
    for cast, dim in casts:
        lost = torch.zeros_like(nonzero)
        if cast.scaling_type is not ScalingType.DISABLED:
            cast_values: Any = hp_tensor_to_float8_dynamic(
                local, cast.target_dtype, layer.linear_mm_config, scaling_granularity=cast.scaling_granularity,
                axiswise_dim=get_maybe_axiswise_dim(dim, cast.scaling_granularity),
                round_scales_to_power_of_2=layer.config.round_scales_to_power_of_2)
            lost = nonzero & (cast_values._data.float() == 0)
        counts.append(lost.sum())
    return local.abs().amax(), torch.stack(counts)


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def fp8_curves(layers: Fp8Layers) -> dict[str, float | str]:
    """The extremes over layers, as curves: of each factor the largest and the smallest amax, and the largest share of
    zeros."""
    found: dict[str, float | str] = {}
    for factor in FACTORS:
        figures = [layer[factor] for layer in layers.values()]
        largest = [float(value) for value, _ in figures]
        found |= {f"fp8_{factor}_amax": json_number(max(largest)),
                  f"fp8_{factor}_amax_smallest": json_number(min(largest)),
                  f"fp8_{factor}_zeros": max(share for _, share in figures)}
    return found
