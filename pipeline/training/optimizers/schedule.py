"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

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
