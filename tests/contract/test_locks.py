"""Locks of stages: who holds one that is about to go is waited for, who works is not."""

import errno
import os
import subprocess
import sys

import pytest

from drover.pipeline.contract import locks
from drover.pipeline.contract.locks import lock
from drover.pipeline.contract.state import StageJob
from drover.pipeline.core.errors import UserError
from tests.conftest import REPOSITORY, environment
from tests.refusal import refused
from tests.stages.training import is_running
from tests.waiting import wait_for

HOLD = """
import os, sys
from pathlib import Path
from drover.pipeline.contract.locks import lock
held = lock(Path(sys.argv[1]), "train")
if os.fork() == 0:  # as a thread of a killed process that has not gone yet
    os.read(0, 1)
    os._exit(0)
print("held", flush=True)
os._exit(0)
"""


def test_a_process_on_its_end_is_waited_for(tmp_path, capsys, monkeypatch):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], cwd=REPOSITORY, env=environment(), text=True,
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout.readline() == "held\n"  # and it is not waited for: a zombie
    wait_for(lambda: not is_running(holder.pid))
    monkeypatch.setattr("drover.pipeline.contract.locks.time.sleep", lambda seconds: holder.stdin.close())
    with lock(tmp_path, "train"):
        assert "train     waits for the end of process" in capsys.readouterr().out
    holder.wait()


def test_in_one_allocation_only_starts_of_one_submission_wait_for_each_other(tmp_path, monkeypatch):
    """A process at work, of another submission or of none, is not waited for."""
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setattr(locks, "this_job", lambda: StageJob("a"))
    held = lock(tmp_path, "train")
    slept = []
    monkeypatch.setattr("drover.pipeline.contract.locks.time.sleep", slept.append)
    monkeypatch.setattr(locks, "this_job", lambda: StageJob("b"))
    refused(UserError, f"in use by process {os.getpid()} on .*, Slurm job 12, chain a, since", lock, tmp_path, "train")
    assert len(slept) == 1
    monkeypatch.setattr("drover.pipeline.contract.locks.time.sleep", lambda seconds: held.close())
    monkeypatch.setattr(locks, "this_job", lambda: StageJob("a"))
    lock(tmp_path, "train").close()


@pytest.mark.parametrize("error", [PermissionError(), OSError(errno.EROFS, "a read-only file system")])
def test_who_may_not_write_there_locks_nothing_for_others_either(tmp_path, monkeypatch, error):
    """A lock on /dev/null would be one for the whole machine."""
    opened = locks._open

    def refuse(folder, name):
        if name == "train":
            raise error
        return opened(folder, name)
    monkeypatch.setattr(locks, "_open", refuse)
    for name in "ab":
        locks.lock(tmp_path / name, "train", shared=True).close()
    with pytest.raises(type(error) if error.errno else UserError):
        locks.lock(tmp_path / "a", "train")
