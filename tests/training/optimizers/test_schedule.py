"""The learning rate: where it starts, peaks and ends, and that it is what a plain reading of the formula gives."""

import math

import pytest

from drover.pipeline.config.phases import PhasePlan
from drover.pipeline.config.training import TrainConfig
from drover.pipeline.training.optimizers import planned_rate

COSINE = {"steps": 111, "warmup_steps": 10, "lr": 1.0, "min_lr_share": 0.1}
WSD = {"steps": 100, "lr": 1.0, "schedule": "wsd"}


def rates(**settings):
    plan = PhasePlan.of(TrainConfig(**settings))
    return [planned_rate(step, plan) for step in range(plan.steps)]


@pytest.mark.parametrize(("settings", "expected"), [
    ({"steps": 100, "warmup_steps": 4, "lr": 0.8}, {0: 0.2, 1: 0.4, 2: 0.6, 3: 0.8, 4: 0.8}),
    ({"steps": 10, "warmup_steps": 0, "lr": 1.0}, {0: 1.0}),
    (COSINE, {10: 1.0, 35: 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.25)), 60: 0.55, -1: 0.1}),
    (WSD | {"warmup_steps": 10, "min_lr_share": 0.0, "decay_steps": 20}, {10: 1.0, 78: 1.0, -11: 0.5, -1: 0.0})])
def test_rates_are_those_of_the_formula(settings, expected):
    result = rates(**settings)
    assert {step: result[step] for step in expected} == pytest.approx(expected)


def test_wsd_decays_over_a_fifth_by_default_and_prolonging_keeps_the_plateau():
    short = rates(**WSD, warmup_steps=5)
    long = rates(**WSD | {"steps": 200}, warmup_steps=5)
    assert short[:80] == long[:80] and short[-1] == pytest.approx(0.1)
