"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from pipeline.config.phases import Phase, PhasePlan
from pipeline.config.training import TrainConfig


def learning_rate(step: int, train: TrainConfig) -> float:
    """Learning rate of optimizer step `step`, counted from 0.

    Linear warmup reaches `lr` at the last warmup step. Cosine then falls to `lr * min_lr_share` at the run's last
    step; wsd stays at `lr` and falls linearly to it over the last `decay_steps` (Hu et al. 2024).
    """
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    floor = train.lr * train.min_lr_share
    if train.schedule == "cosine":
        length = max(1, train.steps - 1 - train.warmup_steps)
        share = min(1.0, (step - train.warmup_steps) / length)
        return floor + (train.lr - floor) * 0.5 * (1 + math.cos(math.pi * share))
    decay = train.decay_steps or max(1, train.steps // 5)
    remaining = train.steps - 1 - step
    return floor + (train.lr - floor) * min(1.0, max(0.0, remaining / decay))


def planned_rate(step: int, plan: PhasePlan) -> float:
    """Learning rate of optimizer step `step`, counted from 0, over the phases of a plan.

    Phases that say something of their learning rate begin a curve, which lasts until the next that does.
    """
    first = max(phase.number for phase in plan.phases[:plan.phase_of(step + 1).number + 1] if _begins(phase))
    later = [phase.first_step for phase in plan.phases[first + 1:] if _begins(phase)]
    begin, end = plan.phases[first].first_step, min([plan.steps, *later])
    return _along(step - begin, max(1, end - begin), plan.phases[first], plan)


def _begins(phase: Phase) -> bool:
    return phase.number == 0 or (phase.said is not None and phase.said.begins_curve)


def _along(step: int, steps: int, phase: Phase, plan: PhasePlan) -> float:
    """Learning rate of step `step`, from 0, of the `steps` of the curve that a phase begins."""
    said, train = phase.said, phase.train
    if said is None or not said.begins_curve:
        return learning_rate(step, train.model_copy(update={"steps": steps}))
    default = train.lr if phase.number == 0 else planned_rate(phase.first_step - 1, plan)
    begin = default if said.lr is None else said.lr
    warmup = said.warmup_steps if said.warmup_steps is not None else train.warmup_steps if phase.number == 0 else 0
    if step < warmup:
        return begin * (step + 1) / warmup
    form = said.schedule or ("linear" if said.lr_end is not None else "constant")
    if form == "constant":
        return begin
    end = begin * train.min_lr_share if said.lr_end is None else said.lr_end
    share = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
    return begin + (end - begin) * (share if form == "linear" else 0.5 * (1 - math.cos(math.pi * share)))
