"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from drover.pipeline.config.phases import PhasePlan


def planned_rate(step: int, plan: PhasePlan) -> float:
    """Learning rate of optimizer step `step`, counted from 0, over the phases of a plan.

    Phases that say something of their learning rate begin a curve, which lasts until the next that does; without one it
    is train's own. Linear warmup reaches the rate at the last warmup step. Cosine and linear then fall to the curve's
    end at its last step; wsd stays, and falls linearly to it over the last `decay_steps` (Hu et al. 2024).
    """
    begins = [phase for phase in plan.phases
              if phase.number == 0 or (phase.own is not None and phase.own.begins_curve)]
    now = plan.phase_of(step + 1).number
    phase = [phase for phase in begins if phase.number <= now][-1]
    end_step = min([plan.steps, *(later.first_step for later in begins if later.number > phase.number)])
    at = step - phase.first_step
    steps = max(1, end_step - phase.first_step)
    train = phase.train
    settings = phase.own
    rate, warmup, form = train.lr, train.warmup_steps, str(train.schedule)
    if settings is not None and settings.begins_curve:
        if phase.number > 0:
            rate, warmup = planned_rate(phase.first_step - 1, plan) if settings.lr is None else 0.0, 0
        rate = rate if settings.lr is None else settings.lr
        warmup = warmup if settings.warmup_steps is None else settings.warmup_steps
        form = settings.schedule or ("constant" if settings.lr_end is None else "linear")
    end = rate * train.min_lr_share if settings is None or settings.lr_end is None else settings.lr_end
    if at < warmup:
        return rate * (at + 1) / warmup
    if form == "constant":
        return rate
    done = min(1.0, (at - warmup) / max(1, steps - 1 - warmup))
    left = {"linear": 1.0 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done)),
            "wsd": min(1.0, max(0.0, (steps - 1 - at) / (train.decay_steps or max(1, steps // 5))))}[form]
    return end + (rate - end) * left
