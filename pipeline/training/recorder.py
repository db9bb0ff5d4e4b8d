"""The records of one start of training: a summary, a line for each step, events, and goodput."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from drover.model.config import ModelConfig
from drover.model.linear import product_library
from drover.pipeline.config.phases import PhasePlan
from drover.pipeline.config.tree import Config
from drover.pipeline.contract.stage_work import Work
from drover.pipeline.contract.state import Progress, ProgressRecord
from drover.pipeline.core.console import LiveLine, counted, duration
from drover.pipeline.data.sampling.consumption import planned_by
from drover.pipeline.data.sampling.loader import TrainingData
from drover.pipeline.parallel.blocks import compiled_share
from drover.pipeline.parallel.grid import Grid
from drover.pipeline.parallel.ranks import Ranks
from drover.pipeline.records.checkpoints import TrainingProgress
from drover.pipeline.records.goodput import first_start
from drover.pipeline.records.metrics import PLAN_CHANGED, RunFacts, TrainingRecords
from drover.pipeline.training.data import StepBatches
from drover.pipeline.training.device import allocator_facts, compiled_graphs, memory_mb, peak_flops
from drover.pipeline.training.engine import Engine, StepResult
from drover.pipeline.training.guards import json_number
from drover.pipeline.training.sinks import TrainingLog, open_log

LEGEND = ("each line: loss, nats per token, falls as the model learns; ETA, time left; tok/s, tokens per second; "
          "grad, norm of the gradient; lr, learning rate")
"""Explains the lines of steps, before the first."""


def summary_lines(config: Config, model: ModelConfig, batches: StepBatches, precision: str) -> list[str]:
    """The model, its layout, and the batch. precision: the chosen one, and why."""
    plan = batches.plan
    return [f"{model.parameter_count:,} parameters; {precision}; "
            f"{counted(torch.get_num_threads(), 'thread')} a rank; {_layout(config, batches.grid)}",
            f"{'first ' if plan.declared else ''}batch {batches.of_phase[0]}; {plan.steps:,} steps = {plan.tokens:,} "
            f"tokens",
            *map(str, batches.data.packings)]


def packing_facts(data: TrainingData) -> dict[str, object]:
    """Facts about the packing of documents and the planned tokens of phases; {} if documents are concatenated."""
    if not data.packings:
        return {}
    result = planned_by(data.order)
    return {"packing": {"kind": "best_fit", **data.packing_facts()},
            "planned": {"plan_sha256": data.order.links[-1], "tokens": result.phases, "padding": result.padding}}


def kernel_lines(config: Config, engine: Engine, device: torch.device, dtype: torch.dtype) -> list[str]:
    """The attention kernels and, if there is a choice (float32 on CPUs), matrix products'; and why not faster ones."""
    attention = engine.attention
    result = [f"attention {attention.backend.name}{f', flash kernels {engine.flash}' * (device.type == 'cuda')}"]
    if device.type == "cpu" and dtype == torch.float32 and not config.train.compile:
        result.append(f"float32 products {product_library()}")
    fallback = attention.fallback and (not config.train.across_documents or config.parallel.cp > 1)
    return ["; ".join(result), *([attention.fallback] if fallback else [])]


def _layout(config: Config, grid: Grid) -> str:
    """The parallel layout in a few words."""
    parallel = config.parallel
    if parallel.engine == "deepspeed":
        offload = f", {parallel.offload} in host memory" if parallel.offload != "none" else ""
        return f"DeepSpeed ZeRO {parallel.zero_stage}{offload}"
    splits = {"tensor": grid.tensor, "context": grid.context, "pipeline": grid.pipeline}
    named = "".join(f", {name} parallel {ranks}" for name, ranks in splits.items() if ranks > 1 or name == "tensor")
    stages = f" ({parallel.pp_schedule}, {parallel.stages} stages)" if grid.pipeline > 1 else ""
    return f"FSDP2 {grid.replicate} x {grid.shard}{named}{stages}"


class Recorder:
    """The records of one start. Every rank has a recorder; only rank 0's writes, once it is open.

    Attributes:
        flops_per_token: of a training step; depends on the sequence length.
        log: the files and loggers; None on other ranks, before `open`, and after `close`.
        look_s: seconds of validation and sampling so far.
    """

    def __init__(self, work: Work, ranks: Ranks, plan: PhasePlan) -> None:
        self.work = work
        self.ranks = ranks
        self.plan = plan
        self.log: TrainingLog | None = None
        self._events = deque[tuple[str, dict[str, object]]]()
        self._line = LiveLine("train")
        self._progress = ProgressRecord(work.folder)
        self._newest: Progress | None = None
        self._trained = self.flops_per_token = self.look_s = 0.0

    def open(self, progress: TrainingProgress, peaks_known: bool) -> None:
        """Write from now on.

        peaks_known: whether the peak FLOP/s of this arithmetic are known, so that MFU can be computed.
        """
        peak = peak_flops(self.ranks.device)
        self._peak = None if peak is None or not peaks_known else peak * self.ranks.world
        self._started_at = progress.step
        self._began = time.perf_counter()
        self._first_start = time.time()
        self._plan_changes = 0
        if self.ranks.is_rank_zero:
            self.log = open_log(self.work, progress.step)
            self._plan_changes = TrainingRecords(self.work.folder).plan_changes

    def begin(self, progress: TrainingProgress, **details: Any) -> None:
        """Record that startup is over; the first step comes next."""
        self.event("resume" if progress.step else "start", step=progress.step, ranks=self.ranks.world,
                   startup_s=round(time.monotonic() - self.work.began, 3), train_s=train_s(progress), **details)
        self.flush()
        if self.ranks.is_rank_zero:
            self.work.say(LEGEND)
            self._first_start = first_start(RunFacts(self.work.run.folder)) or self._first_start
        self._began = time.perf_counter()
        self.look_s = 0.0

    def step(self, before: TrainingProgress, after: TrainingProgress, result: StepResult, step_s: float,
             waited_s: float, rate: float) -> dict[str, object]:
        """The line of a step for metrics.jsonl. Also shows progress on a terminal.

        Args:
            step_s, waited_s: seconds of the step, and its part spent waiting for data.
            rate: learning rate.
        """
        tokens_per_s = round((after.tokens - before.tokens) / step_s, 1)
        now = time.time()
        self._trained = round(train_s(before) + step_s, 5)
        loss: Any = json_number(result.loss)
        goodput = self._goodput(now)
        mfu = None if self._peak is None else round(tokens_per_s * self.flops_per_token / self._peak, 4)
        record: dict[str, object] = {
            "step": after.step, "loss": loss, "lr": rate, "grad_norm": json_number(result.grad_norm),
            "samples": [before.samples, after.samples], "tokens": after.tokens,
            "targets": after.targets - before.targets, "tokens_per_s": tokens_per_s, "step_s": round(step_s, 5),
            "data_wait_s": round(waited_s, 5), "memory_mb": round(memory_mb(self.ranks.device), 1),
            **allocator_facts(self.ranks.device), "mfu": mfu, "time": round(now, 3), "train_s": self._trained,
            "goodput": goodput}
        seldom = {"plan_changes": self._plan_changes, "look_s": round(self.look_s, 3),
                  "compiled_graphs": compiled_graphs()}
        record |= {name: value for name, value in seldom.items() if value}
        if (share := compiled_share()) is not None:
            record["compiled_share"] = round(share, 4)
        if self.ranks.is_rank_zero:
            now_at = self.plan.tokens_at(after.step)
            done = max(1, now_at - self.plan.tokens_at(self._started_at))
            left_s = (time.perf_counter() - self._began) / done * (self.plan.tokens - now_at)
            self._newest = Progress(after.step, self.plan.steps, "steps", left_s=left_s, loss=loss,
                                    tokens_per_s=tokens_per_s, goodput=goodput, restarts=after.restarts)
            self._progress.note(self._newest)
            time_left = "" if after.step == self.plan.steps else f"  ETA {duration(max(0.0, left_s))}"
            share_of_peak = f"  mfu {mfu:.1%}" if mfu else ""
            self._show(after.step, f"loss {result.loss:.4f}{time_left}  tok/s {tokens_per_s:,.0f}  "
                                   f"grad {result.grad_norm:.2f}  lr {rate:.2e}{share_of_peak}")
        return record

    def _show(self, step: int, figures: str) -> None:
        """Show a step: live on a terminal, a line now and then elsewhere. The first and the last are always shown."""
        self._line.present = step / self.plan.steps, f"step {step}/{self.plan.steps}  {figures}"
        if step < self.plan.steps:
            self._line.show()
        else:
            self._line.close()
            self.work.say(self._line.present[1])

    def _goodput(self, now: float) -> float:
        """The share of the time since the first start that went into productive steps."""
        return round(min(1.0, self._trained / max(self._trained, now - self._first_start)), 4)

    def write(self, method: str, *arguments: Any) -> None:
        """Write to the log, on rank 0. See `TrainingLog.tell`."""
        if self.log is not None:
            self.log.write(method, *arguments)

    def event(self, event: str, **details: Any) -> None:
        """Record an event. Any thread may call this; the next `flush` writes it."""
        self._events.append((event, details))

    def flush(self) -> None:
        """Write the events."""
        while self._events:
            self.write("event", *self._events.popleft())

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Count the time within as validation and sampling."""
        began = time.perf_counter()
        yield
        self.look_s += time.perf_counter() - began

    def plan_changed(self, step: int, changes: list[str]) -> None:
        """Record that training follows another plan from step `step` on."""
        self._plan_changes += 1
        self.event(PLAN_CHANGED, step=step, number=self._plan_changes, changes=changes)

    def close(self) -> None:
        """Make everything durable and stop recording. The final goodput includes the time after the last step, such as
        its checkpoint, as the report's does."""
        self._line.close()
        self.flush()
        if self._newest is not None:
            self._progress.note(replace(self._newest, goodput=self._goodput(time.time())))
        self._progress.flush()
        if self.log is not None:
            self.log.close()
        self.log = None


def train_s(progress: TrainingProgress) -> float:
    """Seconds of the productive steps up to `progress`, without those that a rollback undid."""
    return float((progress.record or {}).get("train_s", 0.0))
