"""Requests to stop: whoever is asked, and however, all ranks save and leave after the same step and say why."""

import os
import signal
import subprocess

import pytest

from pipeline.contract.state import read_state
from tests.conftest import REPOSITORY, environment, run_stage, stage_command
from tests.stages.training import curve, events, kill, lines, rank_process, start, train_folder
from tests.waiting import HANG_S, wait_for

LONG = ["train.steps=100000", "train.checkpoint.every_steps=100000", "train.heldout_every=100000",
        "train.sample_every=100000"]


def stopped(config):
    """The step after which the only start was stopped; its checkpoint is the last thing that happened before."""
    *_, saved, stop = [event for kind in ("checkpoint", "stop") for event in events(config, kind)]
    assert saved["step"] == stop["step"] == lines(config)[-1]["step"]
    assert (train_folder(config) / f"checkpoints/step-{stop['step']:08d}/COMPLETE.json").is_file()
    return stop["step"]


def test_a_signal_to_one_rank_of_three_stops_all_and_going_on_makes_sense(fresh):
    settings = [*LONG, "train.batch_tokens=768"]
    process = start(fresh, *settings, ranks=3)
    try:
        wait_for(lambda: lines(fresh), of=process)
        os.kill(rank_process(process.pid, 2), signal.SIGUSR2)
        process.wait(HANG_S)
    finally:
        kill(process)
    step, state = stopped(fresh), read_state(train_folder(fresh))
    assert (state.status, state.step, state.reason, state.again) == ("preempted", step, "SIGUSR2 on rank 2", True)
    told = [f"train.steps={step + 2}", *settings[1:], "--accept-drift"]
    assert f"continuing after step {step}" in run_stage("train", fresh, *told, ranks=3).stdout
    assert [record["step"] for record in curve(fresh)] == list(range(1, step + 3))


def test_time_that_is_up_stops_and_going_on_makes_sense(fresh):
    said = run_stage("train", fresh, *LONG, "train.stop_after_minutes=0.001", expect=130).stdout
    state = read_state(train_folder(fresh))
    assert stopped(fresh) == 1 and "stopped after step 1 (train.stop_after_minutes=0.001); saved" in said
    assert (state.step, state.again) == (1, True)


def test_a_request_during_the_last_step_changes_nothing(fresh):
    run_stage("train", fresh, "train.steps=1", "train.warmup_steps=0", "train.stop_after_minutes=0.001")
    assert [event["event"] for event in events(fresh, "finish")] == ["finish"]


@pytest.mark.slow
def test_signals_that_came_blocked_wait_until_training_hears_them(fresh):
    """As a launcher starts a rank: what comes while libraries are imported does not kill it, and is not lost."""
    process = subprocess.Popen(
        stage_command("train", fresh, *LONG), cwd=REPOSITORY, env=environment(), stdout=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2]))
    try:
        process.send_signal(signal.SIGUSR2)
        said, _ = process.communicate(timeout=HANG_S)
    finally:
        kill(process)
    assert process.returncode == 130 and "stopped after step 1 (SIGUSR2)" in said
    assert stopped(fresh) == 1 and read_state(train_folder(fresh)).again
