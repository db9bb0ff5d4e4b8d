"""Look at the model while it trains: held-out loss, sample texts, norms, what fp8 does; and write the lines of steps.

All of it uses every rank (a sharded model needs all of them in each pass) and draws on no state of training: switching
it on or off changes no weight. A line goes to the log after its step's checkpoint, which holds it as well: looking at
the model may fail (memory, a bad prompt), and must not cost the steps since the last save.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from drover.model.generate import generate
from drover.pipeline.config.batch import BatchPlan
from drover.pipeline.config.phases import PhasePlan
from drover.pipeline.contract.stage_work import Work
from drover.pipeline.data.chosen_documents import ChosenDocuments, choose
from drover.pipeline.data.sampling.batch import Batch
from drover.pipeline.data.shard_table import Opener, ShardTable, open_shards
from drover.pipeline.evaluation.bits_per_byte import HeldoutBatches, HeldoutText, measure
from drover.pipeline.parallel.compiling import compiles, uncompiled
from drover.pipeline.parallel.context_parallel import whole_losses
from drover.pipeline.parallel.grid import Grid
from drover.pipeline.parallel.pipeline_parallel import PipelinedModel
from drover.pipeline.records.checkpoints import TrainingProgress
from drover.pipeline.records.metrics import read_metrics
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


class Monitor(Hook):
    """What one attempt at training shows of its model. Every method is called on all ranks alike."""

    def __init__(self, loop: Loop) -> None:
        self.loop, self.train, self.recorder = loop, loop.config.train, loop.recorder
        self.validation = Validation(loop.work, loop.grid, loop.batches.table, loop.batches.opener)
        self.samples = Samples(loop.work, loop.grid)
        self.fp8 = Fp8Watch(loop.engine, loop.ranks.device) if loop.progress.precision == "fp8" else None
        self._first = True  # no step of this start is done yet
        self._norms: StepNorms | None = None

    def due(self, step: int, every: int | None) -> bool:
        """Whether something done every so many steps is due after step number `step`; always after the last."""
        return every is not None and (step % every == 0 or step == self.train.steps)

    def before_update(self, loop: Loop) -> None:
        """Begin to measure norms, if `train.norms_every` wants it. In the first step of a start too."""
        every = self.train.norms_every
        due = every is not None and (self._first or self.due(loop.progress.step + 1, every))
        self._norms = StepNorms(loop.engine, loop.ranks.exact) if due else None

    def on_step(self, loop: Loop, result: StepResult, record: dict[str, Any]) -> None:
        """Norms by layer as fields of the step's line, and of every parameter in events.jsonl."""
        if self._norms is not None:
            norms, self._norms = self._norms.finish(), None
            self.recorder.event("norms", step=record["step"], parameters=norms)
            record |= layer_norms(norms)

    def after_step(self, loop: Loop) -> None:
        """Look at the model, and write the step's line."""
        step = loop.progress.step
        self.log(loop.progress, self.validate(step) | self.watch_fp8(step))
        self.draw_samples(step)
        self._first = False

    def validate(self, step: int) -> dict[str, Any]:
        """Held-out bits per byte of each source as fields of the step's line, where that is due; NaN is said and left
        out."""
        if not self.due(step, self.train.heldout_every):
            return {}
        with self.recorder.looking():
            found = self.validation.measure(self.loop.engine,
                                            partial(self.loop.watchdog.pulse, first=self.validation.first))
        if missing := [source for source, bits in found.items() if not math.isfinite(bits)]:
            self.loop.say(f"after step {step} the loss on held-out text of {', '.join(missing)} is NaN")
        return {"heldout_bpb": {source: bits for source, bits in found.items() if source not in missing}}

    def watch_fp8(self, step: int) -> dict[str, Any]:
        """What fp8 does to the values of the layers, as curves, where that is due after `step`; layer by layer it goes
        into events.jsonl. In the first step of a start too: what it needs of memory shows at once."""
        if self.fp8 is None or not (self._first or self.due(step, self.train.fp8_watch_every)):
            return {}
        self.loop.watchdog.pulse()
        with self.recorder.looking():
            layers = self.fp8.measure(*self.loop.current)
        self.recorder.event("fp8", step=step, layers=layers)
        return fp8_curves(layers)

    def log(self, progress: TrainingProgress, seen: dict[str, Any]) -> None:
        """The line of the last step, where that is due, with what was seen of the model after it."""
        record = progress.record or {}
        if seen or "weight_norms" in record or self.due(progress.step, self.train.log_every):
            self.recorder.tell("step", record | seen)

    def draw_samples(self, step: int) -> None:
        """Draw texts where that is due after `step`."""
        if not self.due(step, self.train.sample_every):
            return
        try:
            with self.recorder.looking():
                texts = self.samples.draw(self.loop.engine, self.loop.watchdog.pulse)
            for prompt, text in texts:
                self.recorder.tell("sample", step, prompt, text)
        except FloatingPointError as error:  # the guards deal with it: the next loss is NaN too
            self.loop.say(f"no sample texts after step {step}: {error}")

    def catch_up(self, progress: TrainingProgress) -> None:
        """After a kill between a checkpoint and its step's line in the log: look, and write that line, now."""
        def logged() -> bool:
            metrics = read_metrics(self.loop.work.folder / "metrics.jsonl")
            return bool(metrics) and metrics[-1]["step"] >= progress.step
        if progress.record is not None and not self.loop.ranks.by_leader(logged):
            self.log(progress, self.validate(progress.step))
            self.draw_samples(progress.step)


class Validation:
    """A fixed part of each source's held-out documents, measured now and then."""

    def __init__(self, work: Work, grid: Grid, table: ShardTable, opener: Opener | None = None) -> None:
        train, self.grid = work.config.train, grid
        texts = grid.ranks.by_leader(lambda: heldout_texts(work, table, opener))
        # In all phases as in the first, so that the figures make one curve.
        first = BatchPlan.of(PhasePlan.of(train).phases[0].train, work.config.parallel, grid.ranks.world)
        self.batches = HeldoutBatches(texts, length=first.sequence_length, batch=first.micro_batch,
                                      rank=grid.data_rank, world=grid.data_ranks)
        self.batches.keep_own()
        self.first = True

    def measure(self, engine: Engine, pulse: Callable[[], None] = lambda: None) -> dict[str, float]:
        """Bits per byte of each source; the same on every rank and for every number of ranks, up to rounding. The first
        time (`first`), it may have to compile.

        pulse: called before each batch.
        """
        model = engine.model

        def forward(tokens: Tensor, labels: Tensor, documents: Tensor, positions: Tensor) -> Tensor:
            pulse()
            if self.grid.context > 1:
                return whole_losses(model, self.grid.mesh["context"], tokens, labels, documents, positions)
            nats: Tensor = model(tokens, labels, documents=documents, positions=positions, reduction="none")
            return nats
        model.eval()
        found = measure(forward, self.batches, self.grid.ranks.device, copies=self.grid.sample_ranks)
        engine.free_unsharded()
        model.train()
        self.first = False
        return {name: result.bits_per_byte for name, result in found.items()}


def heldout_texts(work: Work, table: ShardTable, opener: Opener | None = None) -> dict[str, HeldoutText]:
    """What is measured on, by source; for one rank, which tells the others."""
    folder, found = work.input("encode")[0], {}
    for source in work.config.shard.sources:
        shards = open_shards(folder, table, "heldout", source.name, opener)
        chosen = choose(shards, work.config.train.heldout_tokens)
        if len(chosen):
            found[source.name] = HeldoutText(list(ChosenDocuments(shards, chosen)), int(chosen.text_bytes.sum()))
    return found


class Samples:
    """Continuations of the configured prompts, always drawn with the same random numbers."""

    def __init__(self, work: Work, grid: Grid) -> None:
        self.train, self.split, self.leads = work.config.train, grid.tensor, grid.ranks.leads
        self.compiled = compiles(self.train, grid.ranks.device)
        self.prompts = grid.ranks.by_leader(lambda: self._prompts(work))

    def _prompts(self, work: Work) -> list[tuple[str, list[int]]]:
        """The prompts and their ids; none where what the vocabulary needs is missing. For one rank, which also puts
        what is drawn into words."""
        try:
            from drover.pipeline.tokenization.kinds import load_tokenizer
            self.tokenizer = load_tokenizer(work.input("tokenizer")[0])
        except ImportError as error:
            work.say(f"no sample texts while training: rank 0 lacks {error.name}, which the vocabulary needs")
            return []
        room = work.config.model.context_length - self.train.sample_tokens
        return [(text, [self.tokenizer.bos_id, *self.tokenizer.encode(text)][:room]) for text in self.train.prompts]

    def draw(self, engine: Engine, pulse: Callable[[], None] = lambda: None) -> list[tuple[str, str]]:
        """(prompt, continuation) pairs, on rank 0. No token ends a text early, so that every rank does as many passes.

        pulse: called before each token.

        Raises FloatingPointError, on every rank, where the model's scores are NaN.
        """
        if not self.prompts:
            return []
        # Under tensor parallelism sequences are split evenly: no single new tokens, hence no cache.
        try:
            with uncompiled() if self.compiled else nullcontext():  # each length would be compiled anew
                drawn = generate(engine.model, [ids for _, ids in self.prompts], self.train.sample_tokens,
                                 temperature=0.8, top_p=0.95, seed=0, stop_ids=(), use_cache=self.split == 1,
                                 multiple_of=self.split, pulse=pulse)
        finally:
            engine.free_unsharded()
        return [(text, self.tokenizer.decode(ids)) for (text, _), ids in zip(self.prompts, drawn, strict=True)] \
            if self.leads else []


class Fp8Watch:
    """What fp8 does to the values of each layer: their largest, and the share that it turns to zero.

    fp8 (e4m3) reaches down to about a 230,000th of the largest value that shares a scale; half of that becomes zero.
    Only gradients under `tensorwise` (e5m2) have more range, and fewer bits. Where a large value shares a scale with
    many small ones, the small ones and what they would have taught are lost, which the loss shows much later.

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

    def measure(self, batch: Batch, targets: int) -> Fp8Layers:
        """By layer and factor, over the ranks: the largest absolute value, and of the values that are not zero, the
        share that fp8 makes zero in that product of the recipe's where it is largest.

        batch: this rank's of a step, of which the first sequence is looked at, in a pipeline the last micro-
        batch. targets: by which the loss is divided, as in a step. A forward and a backward pass, not compiled;
        its gradients are thrown away and training goes on as if it had not been. Every rank calls it alike,
        between two steps.
        """
        # Rows: layer x factor. Columns: largest value; values other than 0; those that become 0 in either product.
        found = torch.zeros(len(self.names) * len(FACTORS), 4, dtype=torch.float64, device=self.device)
        rows = dict(zip(self.names, found.split(len(FACTORS)), strict=True))
        with ExitStack() as hooked, uncompiled():
            for name, layer in self.layers.items():
                hooked.callback(layer.register_forward_hook(partial(self._note, rows[name])).remove)
            self.engine.trial(batch, targets)
        self.engine.model.zero_grad(set_to_none=True)
        largest, counts = found[:, 0].contiguous(), found[:, 1:].contiguous()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        dist.all_reduce(counts)
        shares = (counts[:, 1:].amax(1) / counts[:, 0].clamp(min=1)).tolist()
        figures = ((json_number(_short(value)), _short(share))
                   for value, share in zip(largest.tolist(), shares, strict=True))
        return {name: {factor: next(figures) for factor in FACTORS} for name in self.names}

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


def fp8_curves(layers: Fp8Layers) -> dict[str, float | str]:
    """The extremes over layers, as curves: of each factor the largest and the smallest amax, and the largest share of
    zeros."""
    found: dict[str, float | str] = {}
    for factor in FACTORS:
        largest, zeros = zip(*(figures[factor] for figures in layers.values()), strict=True)
        values = [float(value) for value in largest]
        found |= {f"fp8_{factor}_amax": json_number(max(values)),
                  f"fp8_{factor}_amax_smallest": json_number(min(values)), f"fp8_{factor}_zeros": max(zeros)}
    return found
