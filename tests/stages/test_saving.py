"""Saving while training goes on: it changes nothing, its failures are heard, and a kill finds a sound checkpoint."""

import itertools
import resource
import shutil
import signal

import pytest

from drover.pipeline.records.checkpoints import read_marker
from tests.cut_off import cut_off_stage
from tests.stages.training import (
    assert_equal_to_the_bit,
    curve,
    events,
    proven,
    rank_process,
    run_train,
    run_with_faults,
    started,
    train_folder,
)
from tests.waiting import HANG_S, wait_for

FULL = 100_000
"""Bytes that a file may have where the process's limit stands in for a full disk: less than a checkpoint's."""


def saved_steps(config, name="mini"):
    return [event["step"] for event in events(config, "checkpoint", name)]


def test_saving_in_the_background_changes_no_bit(fresh):
    """Nor do permanent checkpoints, which stay when the others go, nor saves because time has passed."""
    run_with_faults(fresh, "slow:rank=0,step=5,seconds=1", "train.checkpoint.every_steps=1000",
                    "train.checkpoint.every_minutes=0.01", ranks=2)
    saved = saved_steps(fresh)
    assert {5, 6} & set(saved) and saved[-1] == 12  # 5 where the steps before took so long already
    run_train(fresh, "name=waiting", "train.checkpoint.every_steps=2", "train.checkpoint.permanent_every=6",
              "train.checkpoint.background=false", ranks=2)
    kept = sorted(int(path.name[5:]) for path in (train_folder(fresh, "waiting") / "checkpoints").iterdir())
    assert kept == [6, 10, 12] and saved_steps(fresh, "waiting") == list(range(2, 13, 2))
    assert_equal_to_the_bit(fresh, to="waiting")


@pytest.mark.slow
def test_killed_before_any_change_of_files_that_a_save_makes_training_goes_on(interrupted):
    """The third save, which also removes the first checkpoint."""
    for number in itertools.count(1):
        name = f"k{number}"
        shutil.copytree(train_folder(interrupted), train_folder(interrupted, name))
        status, output = cut_off_stage("train", number, "--config", str(interrupted), f"name={name}",
                                     pattern="step-000000(12|04)")
        checkpoints = train_folder(interrupted, name) / "checkpoints"
        complete = [path.parent.name for path in checkpoints.glob("step-*/COMPLETE.json") if read_marker(path.parent)]
        assert {"step-00000008", "step-00000012"} & set(complete), output
        if status == 0:
            break
        assert status == -signal.SIGKILL, output
        run_train(interrupted, f"name={name}")
        assert curve(interrupted, name) == curve(interrupted, "whole") and proven(interrupted, name)
        assert sorted(path.name for path in checkpoints.iterdir()) == ["step-00000012", "step-00000016"]
    assert number > 8


@pytest.mark.slow
def test_a_save_that_fails_for_a_moment_is_tried_again_and_one_that_keeps_failing_stops_all_ranks(fresh):
    """The disk of rank 1 is full when the first checkpoint is due, and has room again a moment later, or never."""
    settings = ["train.checkpoint.every_steps=8", "train.steps=16"]
    full = {"ranks": 2, "limits": {resource.RLIMIT_FSIZE: FULL}, "limited": [1]}
    run_train(fresh, "name=whole", *settings, ranks=2)
    with started(fresh, *settings, "train.checkpoint.attempts=60", **full) as process:
        wait_for(lambda: events(fresh, "checkpoint_failed"), of=process)
        resource.prlimit(rank_process(process.pid, 1), resource.RLIMIT_FSIZE, resource.getrlimit(resource.RLIMIT_FSIZE))
        output, complaint = process.communicate(HANG_S)
    assert process.returncode == 0, complaint
    assert "saving after step 8 failed (attempt 1 of 60)" in output and "File too large" in output
    assert "step-00000008.tmp" in events(fresh, "checkpoint_failed")[0]["error"]
    assert saved_steps(fresh) == [8, 16] and curve(fresh) == curve(fresh, "whole")

    with started(fresh, "name=failing", settings[0], "train.steps=100000", "train.checkpoint.attempts=2",
                 **full) as process:
        output, complaint = process.communicate(timeout=HANG_S)
    assert process.returncode != 0 and "attempt 2 of 2" in output
    assert complaint.count("stops here") == 1 and "full" in complaint
    assert not list((train_folder(fresh, "failing") / "checkpoints").iterdir())
