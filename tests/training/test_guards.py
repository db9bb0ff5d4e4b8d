"""The guards' judgement: what is skipped, what counts as a spike, when training stops; the same after any restart."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest
import torch

from pipeline.config.guarding import GuardConfig
from pipeline.config.section import identity
from pipeline.data.exclusion import Excluded, sample_numbers
from pipeline.errors import UserError
from pipeline.records.rollbacks import Rollback, add_rollback, excluded_by, is_abandoned, read_rollbacks
from pipeline.training.guards import UNLIMITED, Guards, json_number

NAN, INF = math.nan, math.inf
HERE = [(64, 80)]


def steady(guards, steps=40, first=1, loss=3.2, norm=0.5):
    """Steps of a calm run; none may be anything but ok."""
    noise = random.Random(first)
    for step in range(first, first + steps):
        values = loss + noise.uniform(-0.05, 0.05), norm + noise.uniform(-0.05, 0.05)
        assert guards.judge(step, *values, [(step, step + 1)]).outcome == "ok"
    return guards


def test_no_setting_makes_a_finished_run_stale():
    assert identity(GuardConfig()) == {} == identity(GuardConfig(spike="skip", max_skipped=0))


@pytest.mark.parametrize("loss, norm", [(NAN, 0.5), (INF, 0.5), (3.2, NAN), (3.2, INF), (NAN, NAN)])
@pytest.mark.parametrize("spike", ["log", "skip", "rollback"])
def test_what_is_not_finite_is_skipped_from_the_first_step_on(spike, loss, norm):
    guards = Guards(GuardConfig(spike=spike))
    verdict = guards.judge(1, loss, norm, HERE)
    assert (verdict.outcome, verdict.skipped, verdict.event) == ("nonfinite", "nonfinite", "skip")
    assert not verdict.applied and not guards.limits().allow(loss, norm)
    assert "step 1" in verdict.text and str(verdict.loss) in verdict.text
    assert json.loads(json.dumps(verdict.details(), allow_nan=False))["samples"] == [[64, 80]]
    assert guards.counters() == {"skipped": 1, "spikes": 0, "rollbacks": 0}


def test_the_largest_limit_stops_infinity_on_the_device_in_every_precision():
    """With the largest float64 as the limit this fails in float32, where that is infinity."""
    limits = Guards(GuardConfig(spike="log")).limits()
    assert limits.loss == limits.grad_norm == UNLIMITED
    for dtype in (torch.float32, torch.float64):
        values = torch.tensor([INF, NAN, 1e30, 3.0], dtype=dtype)
        assert (values <= limits.loss).tolist() == [False, False, True, True]


def test_limits_are_the_same_in_float32_and_float64():
    limits = steady(Guards(GuardConfig(spike="skip"))).limits()
    for limit in (limits.loss, limits.grad_norm):
        assert float(np.float32(limit)) == limit < 10
        above = float(np.nextafter(np.float32(limit), np.float32(INF)))
        for dtype in (torch.float32, torch.float64):
            assert (torch.tensor([limit, above], dtype=dtype) <= limit).tolist() == [True, False]


def test_a_spike_is_named_with_its_numbers_and_only_logged():
    guards = steady(Guards(GuardConfig()))
    verdict = guards.judge(41, 9.1, 0.5, HERE)
    assert (verdict.outcome, verdict.applied, verdict.skipped, verdict.event) == ("spike_logged", True, None, "spike")
    for part in ("step 41", "the loss 9.1", "median of 3.2", "over the last 40 updates", "deviation 0.0", "limit 3."):
        assert part in verdict.text
    assert "gradient norm" not in verdict.text
    both = guards.judge(42, 9.1, 50.0, HERE)
    assert "the loss 9.1" in both.text and "the gradient norm 50" in both.text
    assert guards.counters() == {"skipped": 0, "spikes": 2, "rollbacks": 0}


@pytest.mark.parametrize("spike, outcome", [("skip", "spike_skipped"), ("rollback", "rollback")])
def test_a_spike_is_kept_from_the_weights(spike, outcome):
    guards = steady(Guards(GuardConfig(spike=spike)))
    limits = guards.limits()
    assert not limits.allow(9.1, 0.5) and not limits.allow(3.2, 5.0) and limits.allow(3.25, 0.55)
    verdict = guards.judge(41, 3.2, 5.0, HERE)
    assert (verdict.outcome, verdict.applied) == (outcome, False)
    assert "the gradient norm 5 " in verdict.text


def test_only_upward_and_only_with_enough_history():
    guards = steady(Guards(GuardConfig(spike="skip", spike_min_history=32)), steps=31)
    assert guards.limits().loss == UNLIMITED
    steady(guards, steps=1, first=32)
    assert guards.limits().loss < 4
    assert guards.judge(33, 0.1, 0.001, HERE).outcome == "ok"


def test_a_flat_curve_does_not_trip_over_a_wiggle():
    guards = Guards(GuardConfig(spike="skip"))
    for step in range(40):
        guards.judge(step, 2.0, 1.0, HERE)
    assert guards.judge(40, 2.1, 1.3, HERE).outcome == "ok"
    assert guards.judge(41, 2.2, 1.0, HERE).outcome == "spike_skipped"


def test_history_takes_nothing_that_was_not_applied():
    guards = steady(Guards(GuardConfig(spike="skip")))
    before = guards.limits()
    for values in ((NAN, 0.5), (3.2, INF), (50.0, 0.5), (3.2, 50.0)):
        guards.judge(41, *values, HERE)
    assert guards.limits() == before


def test_a_lasting_higher_level_becomes_normal_under_log():
    guards = steady(Guards(GuardConfig(spike_window=64, spike_min_history=32)), steps=64)
    outcomes = [guards.judge(65 + step, 4.4 + 0.01 * (step % 3), 0.5, HERE).outcome for step in range(64)]
    assert outcomes[0] == "spike_logged" and outcomes[-1] == "ok"
    assert 20 < outcomes.count("spike_logged") <= 34


def test_a_lasting_higher_level_under_skip_stops_instead_of_skipping_for_ever():
    guards = steady(Guards(GuardConfig(spike="skip", max_skipped=4)))
    for step in range(41, 45):
        assert not guards.judge(step, 4.4, 0.5, HERE).applied
    with pytest.raises(UserError, match="spike=log"):
        guards.judge(45, 4.4, 0.5, HERE)


def test_too_many_skips_in_a_row_stop_with_an_explanation():
    guards = Guards(GuardConfig(max_skipped=2), describe=lambda ranges: f"code/00ff of {ranges[0][0]}")
    for step in (1, 2):
        guards.judge(step, NAN, 1.0, HERE)
    steady(guards, steps=1, first=3)  # one good step, and the count begins again
    for step in (4, 5):
        guards.judge(step, NAN, 1.0, HERE)
    with pytest.raises(UserError) as caught:
        guards.judge(6, NAN, 1.0, HERE)
    for part in ("step 6", "3 updates in a row", "max_skipped is 2", "loss nan", "[64, 80)", "code/00ff of 64",
                 "train.lr", "checkpoints are sound"):
        assert part in str(caught.value)
    assert guards.skipped_total == 5 and "\n" not in str(caught.value)


def test_skips_in_a_row_are_counted_over_a_restart():
    config = GuardConfig(max_skipped=2)
    guards = Guards(config)
    for step in (1, 2):
        guards.judge(step, NAN, 1.0, HERE)
    with pytest.raises(UserError, match="3 updates in a row"):
        Guards(config, guards.state()).judge(3, NAN, 1.0, HERE)


def test_the_first_bad_step_can_be_made_to_stop():
    with pytest.raises(UserError, match="1 updates in a row"):
        Guards(GuardConfig(max_skipped=0)).judge(1, NAN, 1.0, HERE)


def test_rollbacks_are_limited_and_need_a_checkpoint():
    config = GuardConfig(spike="rollback", max_rollbacks=1)
    guards = steady(Guards(config))
    assert guards.judge(41, 9.0, 0.5, HERE, can_roll_back=False).outcome == "spike_skipped"
    assert guards.judge(42, 9.0, 0.5, HERE).outcome == "rollback"
    after = steady(Guards(config, rollbacks=1))
    with pytest.raises(UserError, match=r"max_rollbacks is 1.*loss 9.*\[64, 80\)"):
        after.judge(42, 9.0, 0.5, HERE)


def test_state_goes_through_json_and_every_later_decision_is_the_same():
    noise = random.Random(3)
    values = [(3 + noise.gauss(0, 0.1) + 6 * (noise.random() < 0.05), abs(0.5 + noise.gauss(0, 0.1)) if
               noise.random() > 0.03 else INF) for _ in range(300)]
    config = GuardConfig(spike="skip", spike_deviations=4.0, spike_window=50)
    whole, cut = Guards(config), Guards(config)
    outcomes = set()
    for step, pair in enumerate(values):
        if step % 7 == 0:
            cut = Guards(config, json.loads(json.dumps(cut.state(), allow_nan=False)))
        assert cut.limits() == whole.limits() and cut.state() == whole.state()
        one, two = whole.judge(step, *pair, HERE), cut.judge(step, *pair, HERE)
        assert (one.outcome, one.text) == (two.outcome, two.text)
        outcomes.add(one.outcome)
    assert outcomes == {"ok", "nonfinite", "spike_skipped"} and whole.skipped_total > whole.spikes_total > 0


def test_a_shorter_window_takes_the_newest_of_a_longer_ones_state():
    long = steady(Guards(GuardConfig()), steps=100)
    short = Guards(GuardConfig(spike_window=40), long.state())
    assert short.state()["losses"] == long.state()["losses"][-40:]


def test_numbers_that_json_cannot_hold_are_written_as_text():
    assert [json_number(value) for value in (1.5, NAN, INF, -INF)] == [1.5, "nan", "inf", "-inf"]
    assert math.isnan(float(json_number(NAN)))


# A pretend run: real guards, exclusions and rollbacks around a loss that is a pure function of samples and weights.

BATCH, STEPS, EVERY = 8, 90, 10
BAD = {317: 40.0, 402: NAN, 410: 60.0, 530: 25.0}


def train(folder, kills):
    """What a session does, in small. Killed before the steps in `kills` (each once); the log and the last state."""
    config, log, kills = GuardConfig(spike="rollback", spike_min_history=16), [], list(kills)
    checkpoints = {0: {"samples": 0, "guards": None, "weight": 0.0}}
    while True:
        step = max(checkpoints)
        progress, rollbacks = dict(checkpoints[step]), read_rollbacks(folder)
        excluded = excluded_by(rollbacks, ["plan"])
        guards = Guards(config, json.loads(json.dumps(progress["guards"])), len(rollbacks))
        while step < STEPS:
            if kills and step == kills[0]:
                kills.pop(0)
                break
            taken = excluded.take(progress["samples"], BATCH)
            numbers = sample_numbers(taken.ranges)
            assert np.array_equal(numbers, excluded.numbers(progress["samples"], 0, BATCH))
            loss = 3 + 0.01 * math.sin(step + progress["weight"]) + sum(BAD.get(int(n), 0.0) for n in numbers)
            span = [progress["samples"], taken.end]
            verdict = guards.judge(step + 1, loss, 1.0, taken.ranges)
            if verdict.outcome == "rollback":
                add_rollback(folder, Rollback(step + 1, max(checkpoints), verdict.samples, "plan", verdict.text))
                break
            weight = progress["weight"] + (float(numbers.sum()) * 1e-3 if verdict.applied else 0.0)
            step, progress = step + 1, {"samples": taken.end, "guards": guards.state(), "weight": weight}
            log.append({"step": step, "samples": span, "numbers": numbers.tolist(), "applied": verdict.applied,
                        "loss": loss, "rollbacks": len(rollbacks)})
            if step % EVERY == 0:
                checkpoints[step] = progress
        else:
            return log, progress, rollbacks


@pytest.mark.parametrize("seed", range(4))
def test_a_run_with_rollbacks_uses_each_other_sample_once_and_kills_change_nothing(tmp_path, seed):
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    whole, progress, rollbacks = train(tmp_path / "whole", [])
    assert [rollback.samples for rollback in rollbacks] == [((312, 320),), ((408, 416),), ((528, 536),)]
    assert [rollback.back_to for rollback in rollbacks] == [30, 50, 60]
    final = {line["step"]: line for line in whole if not is_abandoned(line, rollbacks, ["plan"])}
    used = [number for step in sorted(final) for number in final[step]["numbers"]]
    out = sample_numbers([part for rollback in rollbacks for part in rollback.samples])
    assert used == [number for number in range(progress["samples"]) if number not in set(out)]
    assert [step for step, line in final.items() if not line["applied"]] == [50]  # the NaN, in one step, for good
    kills = sorted(random.Random(seed).sample(range(1, STEPS), 6))
    killed, again, _ = train(tmp_path / "killed", kills)
    assert again == progress and len(killed) > len(final)
    assert read_rollbacks(tmp_path / "killed") == rollbacks


def test_lines_that_a_rollback_undid_are_told_from_those_that_still_hold():
    rollbacks = [Rollback(5, 2, ((32, 40),), "plan", ""), Rollback(9, 6, ((64, 72),), "plan", "")]
    assert not is_abandoned({"samples": [24, 32]}, rollbacks, ["plan"])
    assert is_abandoned({"samples": [32, 40]}, rollbacks, ["plan"])
    assert not is_abandoned({"samples": [32, 48], "rollbacks": 1}, rollbacks, ["plan"])
    assert is_abandoned({"samples": [64, 72], "rollbacks": 1}, rollbacks, ["plan"])
    assert not is_abandoned({"samples": [64, 80], "rollbacks": 2}, rollbacks, ["plan"])
    assert not is_abandoned({"samples": [32, 40]}, rollbacks, ["another plan"])
    assert excluded_by(rollbacks, ["plan"]) == Excluded([(32, 40), (64, 72)])
    assert excluded_by(rollbacks, ["another plan"]) == Excluded()
