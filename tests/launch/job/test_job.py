"""The process that a job's script starts: the runner's exit status is its own, and a killed runner is started again."""

import signal
import subprocess
import sys

import pytest

from drover.launch.job import __main__ as job_process
from drover.launch.slurm.scheduler import Scheduler
from drover.pipeline.contract.state import read_attempts
from tests.launch.fake_job import make_job

NAMES = {"SLURM_JOB_ID": "24", "SLURM_ARRAY_JOB_ID": "20", "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": "1"}


@pytest.fixture
def ended(tmp_path, monkeypatch):
    """Function: run the process where the runner runs this program instead; its status, and what was queued again."""
    def end(program, **changes):
        spec = make_job(tmp_path, **changes).spec
        path = tmp_path / "spec.json"
        spec.save(path)
        queued = []
        monkeypatch.setattr(Scheduler, "requeue", lambda _, id, patience_s: queued.append(id))
        monkeypatch.setattr(Scheduler, "hostnames", lambda _, text: ["n1"])
        run = subprocess.run
        monkeypatch.setattr(subprocess, "run", lambda command: run([sys.executable, "-c", program, *command]))
        for name, value in NAMES.items():
            monkeypatch.setenv(name, value)
        before = {number: signal.getsignal(number) for number in (2, 15, signal.SIGUSR1, signal.SIGUSR2)}
        try:
            return job_process.main([str(path)]), queued, read_attempts(tmp_path / "runs" / "trial")
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return end


def test_a_killed_runner_is_recorded_and_its_element_alone_queued_again(ended):
    status, queued, [event] = ended("import os; os.kill(os.getpid(), 9)")
    assert (status, queued) == (137, ["20_3"])
    assert [event[name] for name in ("event", "job", "restart", "stage")] == ["killed", "20_3", 1, "train"]


@pytest.mark.parametrize(("program", "expected", "changes"), [
    ("raise SystemExit(3)", 3, {}), ("", 0, {}),
    ("import os; os.kill(os.getpid(), 15)", 143, {}),
    ("import os; os.kill(os.getpid(), 9)", 137, {"requeue": False}),
    # Cancelled: Slurm asks all processes to end, and kills those that remain.
    ("import os; os.kill(os.getppid(), 15); os.kill(os.getpid(), 9)", 137, {})])
def test_other_ends_queue_nothing(ended, program, expected, changes):
    assert ended(program, **changes) == (expected, [], [])
