"""A warm process is to the tests what a cold one would be: its words, its status, its end by signals, its ranks."""

import os
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import run_python, stage_command, start_stage
from tests.stages.training import curve, descendants, lines, proven, rank_process, run_train, started
from tests.waiting import wait_for


@pytest.mark.parametrize("overrides", [["--help"], ["train.lr=x", "train.warmup=3"], ["--colour"]])
def test_words_and_status_are_those_of_a_cold_process(place, overrides):
    cold = run_python(*stage_command("train", place / "c.yaml", *overrides)[1:], check=False)
    warm = start_stage("train", place / "c.yaml", *overrides)
    said, complaint = warm.communicate()
    assert (said, complaint, warm.returncode) == (cold.stdout, cold.stderr, cold.returncode)


@pytest.mark.slow
def test_ranks_train_as_under_torchs_own_agent(fresh):
    """To the last bit, though there each has a hash seed of its own."""
    run_python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
               *stage_command("train", fresh, "name=cold")[1:])
    run_train(fresh, ranks=2)
    assert curve(fresh) == curve(fresh, "cold") and proven(fresh, "cold")


@contextmanager
def two_ranks(config):
    """Training without end that has done a step."""
    before = len(lines(config))
    with started(config, "train.steps=100000", "train.checkpoint.every_steps=100000", ranks=2) as process:
        wait_for(lambda: len(lines(config)) > before, of=process)
        yield process


def test_ranks_end_with_the_first_that_fails_and_with_their_agent(fresh):
    with two_ranks(fresh) as process:
        os.kill(rank_process(process.pid, 1), signal.SIGKILL)
        assert process.wait() == 1
    with two_ranks(fresh) as process:
        ranks = descendants(process.pid)
        assert len(ranks) == 2
        process.kill()
        assert process.wait() == -signal.SIGKILL
        wait_for(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks))
