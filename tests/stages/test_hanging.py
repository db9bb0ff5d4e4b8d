"""A rank that hangs: all write where they are and end, and the late one is named."""

import os
import subprocess
import time

import pytest

from pipeline.records.hangs import HUNG_STATUS, hang_folder, judge_hang, read_hang
from tests.conftest import REPOSITORY, environment, run_stage, stage_command
from tests.stages.training import curve, train_folder
from tests.waiting import HANG_S

SETTINGS = ["train.batch_tokens=768"]


def patience(config, *settings, ranks, least_s):
    """The setting of a limit that no healthy step reaches here: twice what a whole run of a few steps takes."""
    began = time.monotonic()
    run_stage("train", config, "name=pace", *settings, "train.steps=4", ranks=ranks)
    return f"train.guards.hang_minutes={max(least_s, 2 * (time.monotonic() - began)) / 60}"


@pytest.mark.slow
def test_of_three_ranks_the_one_that_hangs_is_named_and_the_same_command_goes_on(fresh):
    """Under the agent of the launcher, whose exit status is a rank's own."""
    settings = [*SETTINGS, patience(fresh, *SETTINGS, ranks=3, least_s=6)]
    command = stage_command("train", fresh, *settings, ranks=3)
    command[2:3] = ["launch.agent", str(fresh.parent / "agent.log")]
    ended = subprocess.run(command, cwd=REPOSITORY, env={**environment(), "DROVER_FAULTS": "hang:rank=1,step=6"},
                           check=False, capture_output=True, text=True, timeout=HANG_S)
    assert ended.returncode == HUNG_STATUS, ended.stderr
    assert "train hangs on rank 1" in ended.stderr and "after step 5" in ended.stderr
    folder = hang_folder(train_folder(fresh), "local.0.0")
    records = read_hang(folder)
    assert [(record.step, bool(record.waits)) for record in records] == [(5, True), (5, False), (5, True)]
    assert all(record.silent_s > 6 for record in records) and "fault_injection" in (folder / "rank1.stacks").read_text()
    assert all(b"all_reduce" in (folder / f"rank{rank}.flight.json").read_bytes() for rank in range(3))
    found = judge_hang(folder, 3)
    assert found.late == ((1, os.uname().nodename),)
    assert "before_step > hang (pipeline/training/fault_injection.py)" in found.text and "ranks 0, 2" in found.text
    run_stage("train", fresh, *settings, ranks=3)
    assert [record["step"] for record in curve(fresh)] == list(range(1, 13))


def test_looking_and_saving_for_longer_than_the_limit_is_no_hang(fresh):
    """A step that is slow, but not by so much, is none either."""
    run_stage("train", fresh, patience(fresh, ranks=1, least_s=3), "train.checkpoint.background=false",
              DROVER_FAULTS="slow:rank=0,step=9,seconds=2")
    assert not (train_folder(fresh) / "hangs").exists()
