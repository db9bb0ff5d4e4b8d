"""Resuming from a checkpoint: whether it is allowed, in which precision, what is loaded, and how the plan may change:
phases that have started must stay, later ones may change."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from drover.pipeline.config.phases import Phase, PhasePlan, tokens_text
from drover.pipeline.config.training import TrainConfig
from drover.pipeline.core.console import first
from drover.pipeline.core.errors import UserError, listed
from drover.pipeline.formats.sharded_tensors import CheckpointReader, read_index
from drover.pipeline.parallel.ranks import Ranks
from drover.pipeline.records.checkpoints import TrainingProgress, read_marker
from drover.pipeline.training.engines.engine import Engine
from drover.pipeline.training.optimizers.schedule import planned_rate
from drover.pipeline.training.precision import choose_precision

FIXED = ("sequence_length", "batch_tokens", "mixture")
CURVE = ("lr", "lr_end", "schedule", "warmup_steps")
OWN_CURVE = ("lr", "min_lr_share", "warmup_steps", "schedule", "decay_steps")
OF_A_PLAN = ("steps", "packing", "phases", "grain_tokens", *FIXED, *OWN_CURVE)
"""The settings of train that make the plan."""


def continued(path: Path, progress: TrainingProgress, plan: str, accepted: bool) -> TrainingProgress:
    """The progress of training that continues from the checkpoint at `path` with `progress`.

    Args:
        plan: SHA-256 of the configured order of samples.
        accepted: whether it may differ from the checkpoint's.

    Raises:
        UserError: it differs and must not.
    """
    if progress.plan_sha256 != plan and not accepted:
        raise UserError(f"{path} was trained on other token shards, sequence length, mixture or seed than are "
                        f"configured now (plan {progress.plan_sha256[:12]} -> {plan[:12]}). Use --accept-changes to "
                        f"continue with the new order, or --force to start again.")
    return dataclasses.replace(progress, restarts=progress.restarts + 1, plan_sha256=plan)


def changed_code(path: Path, code: dict[str, str]) -> str:
    """A warning if the checkpoint at `path` was made by other code than `code`, hashes by file; "" if it was not."""
    before = read_marker(path).code
    changed = sorted(name for name in before.keys() | code.keys() if before.get(name) != code.get(name))
    return f"warning: trained so far by other code than is here now ({first(changed)})" if before and changed else ""


def changed_future(path: Path, progress: TrainingProgress, plan: PhasePlan) -> list[str]:
    """The changes in later phases since the checkpoint at `path` was written, a sentence each. A training without
    phases is one phase; while it has none, any change needs --accept-changes, and none is named here.

    Raises:
        UserError: a phase that has started has changed; names it, and both values.
    """
    written = read_marker(path).config.get("train", {})
    before = PhasePlan.of(TrainConfig.model_validate({key: written[key] for key in OF_A_PLAN if key in written}))
    if not (before.declared or plan.declared):
        return []
    changes = list(plan_changes(before, plan, progress.step))
    past = [text for started, text in changes if started]
    # The phases after the first begin at sample numbers that follow from the plan alone.
    if not (past or before.declared) and (used := plan.sequences_between(0, progress.step)) != progress.samples:
        past.append(f"{progress.samples:,} samples were used; with train.phases from the start it would be {used:,}. "
                    f"So samples were left out, or train.batch_tokens has changed: leave train.phases out")
    if past:
        raise UserError(
            f"{path.name} was trained with another plan, and the plan of finished steps cannot change:\n{listed(past)}"
            f"\nRestore these. You may still change phases that have not started, the end of the current phase (after "
            f"step {progress.step}), and add phases. To start from scratch, use --force or name=<another>.")
    result = [text for _, text in changes]
    if result and progress.step < min(before.steps, plan.steps):
        was, rate = planned_rate(progress.step, before), planned_rate(progress.step, plan)
        if was != rate:
            result.append(f"the learning rate of step {progress.step + 1} changes from {was:.3g} to {rate:.3g}, since "
                         f"the length of its schedule has changed")
    return result


def plan_changes(before: PhasePlan, now: PhasePlan, step: int) -> Iterator[tuple[bool, str]]:
    """The differences between two plans: whether the phase had started by step `step`, and a sentence with both
    values."""
    if now.phases[0].train.packing == "concatenate" and before.grain != now.grain:
        yield True, (f"sources were cut into chunks of {before.grain:,} tokens, and would now be cut into chunks of "
                     f"{now.grain:,}: set train.grain_tokens to {before.grain}; a phase of longer sequences then reads "
                     f"its sources from the start again")
    for old, new in zip_longest(before.phases, now.phases):
        if old is None:
            yield False, f"train.phases[{new.number}] was added ({new})"
            continue
        started = old.first_step < step
        if new is None:
            yield started, f"train.phases[{old.number}] {'has begun and is gone' if started else f'is gone ({old})'}"
            continue
        was, after = _settings(old, new.name), _settings(new, new.name)
        for key in was | after:
            if was.get(key) != after.get(key):
                yield started, f"{key}: {was.get(key)} -> {after.get(key)}"
        reached = min(step, old.end_step)
        end = "train.steps" if new.own is None else f"{new.name}.until"
        if started and reached > new.end_step:
            yield True, (f"{end} is {_until(new)}, after step {new.end_step}; it was {_until(old)}, and step {reached} "
                         f"of it is done")
        elif new.end_step != old.end_step:
            yield old.end_step < step, f"{end}: {_until(old)} -> {_until(new)}"


def _settings(phase: Phase, name: str) -> dict[str, Any]:
    """The settings that a phase of this name must keep once it has started, by key."""
    result = {f"{name}.{key}": getattr(phase.train, key) for key in FIXED}
    if phase.number == 0:
        result |= {f"train.{key}": getattr(phase.train, key) for key in OWN_CURVE}
    return result | {f"{name}.{key}": value for key in CURVE if (value := getattr(phase.own, key, None)) is not None}


def _until(phase: Phase) -> str:
    return tokens_text(phase.own.until) if phase.own is not None else f"step {phase.end_step}"


def load(path: Path, engine: Engine, ranks: Ranks, updates: int) -> None:
    """Load weights, optimizer state and random generators from a checkpoint, written by any engine on any number of
    ranks."""
    with CheckpointReader(path, index=ranks.by_leader(lambda: read_index(path))) as reader:
        engine.load(reader, updates)
        for device, restore in (("cpu", torch.set_rng_state), ("cuda", torch.cuda.set_rng_state)):
            table = f"random.{device}"
            rank = ranks.rank
            # After a change of ranks or devices the checkpoint may have no state for this rank.
            if device in ("cpu", ranks.device.type) and table in reader.names() and rank < reader.shape(table)[0]:
                restore(reader.read(table, (rank, 0), (1, reader.shape(table)[1]))[0])


def agreed_precision(wanted: str, started: str, ranks: Ranks) -> tuple[str, str]:
    """The precision of all ranks, and the reason. started: the checkpoint's, if there is one: `auto` must not change
    with the machine."""
    if wanted == "auto" and started:
        return started, f"{started}, as the run started"
    result = ranks.gather(choose_precision(wanted, ranks.device))
    chosen, why = result[0]
    if len({name for name, _ in result}) > 1:
        chosen, why = "fp32", "fp32: not every rank has fast bf16"
    return chosen, f"{why}, {started} before" if started not in ("", chosen) else why
