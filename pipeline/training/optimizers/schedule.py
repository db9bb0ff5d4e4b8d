"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from drover.pipeline.config.phases import Phase, PhasePlan
from drover.pipeline.config.training import TrainConfig


def planned_rate(step: int, plan: PhasePlan) -> float:
    """Learning rate of optimizer step `step`, counted from 0, over the phases of a plan.

    Phases that say something of their learning rate begin a curve, which lasts until the next that does.
    """
    first = max(phase.number for phase in plan.phases[:plan.phase_of(step + 1).number + 1] if _begins(phase))
    later = [phase.first_step for phase in plan.phases[first + 1:] if _begins(phase)]
    phase, train, said = plan.phases[first], plan.phases[first].train, plan.phases[first].said
    at, steps = step - phase.first_step, max(1, min([plan.steps, *later]) - phase.first_step)
    if said is None or not said.begins_curve:
        return learning_rate(at, train, steps)
    rate = said.lr
    if rate is None:
        rate = train.lr if first == 0 else planned_rate(phase.first_step - 1, plan)
    warmup = said.warmup_steps if said.warmup_steps is not None else train.warmup_steps if first == 0 else 0
    end = rate * train.min_lr_share if said.lr_end is None else said.lr_end
    return _curve(at, steps, rate, end, warmup, said.schedule or ("linear" if said.lr_end is not None else "constant"))


def learning_rate(step: int, train: TrainConfig, steps: int | None = None) -> float:
    """Learning rate of optimizer step `step`, counted from 0, by train's own settings, of so many steps.

    Linear warmup reaches `lr` at the last warmup step. Cosine then falls to `lr * min_lr_share` at the run's last
    step; wsd stays at `lr` and falls linearly to it over the last `decay_steps` (Hu et al. 2024).
    """
    return _curve(step, steps or train.steps, train.lr, train.lr * train.min_lr_share, train.warmup_steps,
                  train.schedule, train.decay_steps)


def _begins(phase: Phase) -> bool:
    return phase.number == 0 or (phase.said is not None and phase.said.begins_curve)


def _curve(step: int, steps: int, rate: float, end: float, warmup: int, form: str, decay: int | None = None) -> float:
    """From 0 over `rate` to `end` in so many steps; form: constant, linear, cosine or wsd."""
    if step < warmup:
        return rate * (step + 1) / warmup
    if form == "constant":
        return rate
    share = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
    left = 1.0 - share
    if form == "cosine":
        left = 0.5 * (1 + math.cos(math.pi * share))
    elif form == "wsd":
        left = min(1.0, max(0.0, (steps - 1 - step) / (decay or max(1, steps // 5))))
    return end + (rate - end) * left
