"""The guards' judgement: what is skipped, what counts as a spike, when training stops; the same after any restart."""

import json
import math
import random

import numpy as np
import pytest
import torch

from drover.pipeline.config.training import GuardConfig
from drover.pipeline.core.errors import UserError
from drover.pipeline.training.guards import UNLIMITED, Guards
from tests.refusal import refused

NAN = math.nan
INF = math.inf
HERE = [(64, 80)]


def outcome(decision):
    return f"{decision.event or 'ok'} {decision.skipped or ''}".strip()


def going_on(config, state, rollbacks=0):
    """Guards of a run that is continued."""
    guards = Guards(config)
    guards.go_on(state, rollbacks)
    return guards


def steady(guards, steps=40, first=1):
    """Judge the steps of a calm run; none may be anything but ok."""
    noise = random.Random(first)
    for step in range(first, first + steps):
        values = 3.2 + noise.uniform(-0.05, 0.05), 0.5 + noise.uniform(-0.05, 0.05)
        assert outcome(guards.judge(step, *values, [(step, step + 1)])) == "ok"
    return guards


def judged(guards, *values):
    """Judge steps by their losses or (loss, norm), and say what came of each."""
    return [outcome(guards.judge(41 + step, *(value if isinstance(value, tuple) else (value, 0.5)), HERE))
            for step, value in enumerate(values)]


@pytest.mark.parametrize("loss, norm, spike", [(NAN, 0.5, "log"), (INF, 0.5, "skip"), (3.2, NAN, "rollback"),
                                               (3.2, INF, "log")])
def test_what_is_not_finite_is_skipped_from_the_first_step_on(loss, norm, spike):
    guards = Guards(GuardConfig(spike=spike))
    decision = guards.judge(1, loss, norm, HERE)
    assert outcome(decision) == "skip nonfinite"
    assert not decision.applied and not guards.limits().allow(loss, norm)


def test_limits_are_the_same_on_a_device_in_every_precision():
    """The largest float64 as the limit would be infinity in float32, and infinity would pass."""
    assert Guards(GuardConfig(spike="log")).limits() == Guards(GuardConfig(spike="skip")).limits()
    limits = steady(Guards(GuardConfig(spike="skip"))).limits()
    for limit in (UNLIMITED, limits.loss, limits.grad_norm):
        assert float(np.float32(limit)) == limit and (limit < 10 or limit > 1e38)
        above = limit * (1 + 2e-7)
        for dtype in (torch.float32, torch.float64):
            values = torch.tensor([limit, above, INF, NAN], dtype=dtype)
            assert (values <= limit).tolist() == [True, False, False, False]


@pytest.mark.parametrize("values, loss, norm", [
    ([(2.0, 1.0)], 2 * (1 + 8 * 0.01), 1 + 8 * 0.05),  # a flat curve does not trip over a wiggle
    ([(2.5, 1.0), (3.5, 3.0)], 3 + 8 * 1.4826 * 0.5, 2 + 8 * 1.4826)])
def test_a_limit_is_so_many_deviations_above_the_median(values, loss, norm):
    guards = Guards(GuardConfig(spike="skip"))
    for step in range(16):
        assert guards.limits().loss == UNLIMITED
        for value in values * (2 // len(values)):
            guards.judge(step, *value, HERE)
    assert (guards.limits().loss, guards.limits().grad_norm) == (pytest.approx(loss), pytest.approx(norm))
    assert judged(guards, (loss + 0.01, 1.0), (0.1, 0.001)) == ["skip spike", "ok"], "only upward"
    guards.forget()
    assert guards.limits().loss == UNLIMITED


@pytest.mark.parametrize(("spike", "expected", "counters"), [
    ("log", "spike", (2, 4, 0)), ("skip", "skip spike", (6, 4, 0)), ("rollback", "rollback", (2, 0, 4))])
def test_a_spike_is_named_with_its_numbers_and_only_under_log_applied(spike, expected, counters):
    """Otherwise it is no part of the history either, as what is not finite never is."""
    guards = steady(Guards(GuardConfig(spike=spike, max_rollbacks=9)))
    limits = guards.limits()
    logs = spike == "log"
    assert limits.allow(3.25, 0.55) and limits.allow(9.1, 0.5) == limits.allow(3.2, 5.0) == logs
    for values in ((3.25, 0.55), (9.1, 0.5), (3.2, 5.0), (NAN, 0.5), (3.2, NAN)):  # as engines do on the device
        assert bool(limits.allow(*torch.tensor(values, dtype=torch.float64))) == limits.allow(*values)
    decision = guards.judge(41, 9.1, 5.0, HERE)
    assert (outcome(decision), decision.applied) == (expected, logs)
    assert "the loss 9.1" in decision.text and " and the gradient norm 5 " in decision.text
    assert "gradient norm" not in guards.judge(42, 9.1, 0.5, HERE).text
    judged(guards, (NAN, 0.5), (3.2, INF), (50.0, 0.5), (3.2, 50.0))
    assert guards.limits() == limits and tuple(guards.counters().values()) == counters


def test_too_many_skips_in_a_row_stop_with_an_explanation_also_over_a_restart():
    config = GuardConfig(max_skipped=2)
    guards = Guards(config)
    judged(guards, NAN, NAN, 3.0, NAN, NAN)
    guards = going_on(config, guards.state())
    guards.describe = lambda ranges: f"code/00ff of {ranges[0][0]}"
    refused(UserError, r"3 updates in a row.*\[64, 80\).*code/00ff of 64", guards.judge, 6, NAN, 1.0, HERE)
    assert guards.skipped_total == 5
    refused(UserError, "1 updates in a row", judged, Guards(GuardConfig(max_skipped=0)), NAN)


def test_rollbacks_are_limited_and_need_a_checkpoint():
    config = GuardConfig(spike="rollback", max_rollbacks=1)
    guards = steady(Guards(config))
    skipped = guards.judge(41, 9.0, 0.5, HERE, can_roll_back=False)
    assert outcome(skipped) == "skip spike" and "no checkpoint yet" in skipped.text
    assert judged(guards, 9.0) == ["rollback"] and guards.counters() == {"skipped": 1, "spikes": 1, "rollbacks": 1}
    refused(UserError, r"max_rollbacks is 1.*loss 9.*\[64, 80\)", judged, steady(going_on(config, {}, 1)), 9.0)


def test_state_goes_through_json_and_every_later_decision_is_the_same():
    noise = random.Random(3)
    config = GuardConfig(spike="skip", spike_deviations=4.0, spike_window=50)
    straight = Guards(config)
    cut = Guards(config)
    outcomes = set()
    for step in range(300):
        pair = noise.gauss(3, 0.1) + 6 * (noise.random() < 0.05), noise.choice([INF, *[0.4, 0.5, 0.6] * 10])
        if step % 7 == 0:
            cut = going_on(config, json.loads(json.dumps(cut.state(), allow_nan=False)))
        one, two = (outcome(guards.judge(step, *pair, HERE)) for guards in (straight, cut))
        assert one == two and cut.limits() == straight.limits() and cut.state() == straight.state()
        outcomes.add(one)
    assert outcomes == {"ok", "skip nonfinite", "skip spike"} and straight.skipped_total > straight.spikes_total > 0
    narrower = going_on(GuardConfig(spike_window=40), straight.state())
    assert narrower.state()["losses"] == straight.state()["losses"][-40:]
