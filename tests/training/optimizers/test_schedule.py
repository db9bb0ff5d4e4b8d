"""The learning rate: where it starts, peaks and ends, and that it is what a plain reading of the formula gives."""

import math

import pytest

from drover.pipeline.config.phases import PhasePlan
from drover.pipeline.config.training import TrainConfig
from drover.pipeline.training.optimizers.schedule import planned_rate


def rates(**settings):
    plan = PhasePlan.of(TrainConfig(**settings))
    return [planned_rate(step, plan) for step in range(plan.steps)]


def test_warmup_is_linear_and_reaches_the_peak():
    assert rates(steps=100, warmup_steps=4, lr=0.8)[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8])
    assert rates(steps=10, warmup_steps=0, lr=1.0)[0] == 1.0


def test_cosine_ends_at_the_floor_and_is_halfway_in_the_middle():
    found = rates(steps=111, warmup_steps=10, lr=1.0, min_lr_share=0.1)
    assert [found[step] for step in (10, 35, 60, -1)] == pytest.approx(
        [1.0, 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.25)), 0.55, 0.1])
    assert found[9:] == sorted(found[9:], reverse=True)


def test_wsd_stays_then_falls_linearly_to_the_floor():
    found = rates(steps=100, warmup_steps=10, lr=1.0, min_lr_share=0.0, schedule="wsd", decay_steps=20)
    assert found[10:79] == [1.0] * 69
    assert found[-1] == 0.0 and found[-11] == pytest.approx(0.5)


def test_wsd_decays_over_a_fifth_by_default_and_prolonging_keeps_the_plateau():
    short, long = (rates(steps=steps, warmup_steps=5, lr=1.0, schedule="wsd") for steps in (100, 200))
    assert short[:80] == long[:80] and short[-1] == pytest.approx(0.1)
