"""The disk of the run folder is full while a job trains: it ends with the reason, and goes on once there is room."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.state import read_state
from tests.slurm.faults import EVERY, Training, pause

SIZE = 64 << 20
LITTLE = 200_000
"""Bytes of the disk, and what is left of them: enough for logs and records, not for a checkpoint."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own; the test is skipped where this user may not mount one."""
    place = tmp_path / "runs"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "drover-test", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small disk cannot be mounted here (it needs root)")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_full_disk_ends_the_job_with_the_reason_until_there_is_room(disk, training):
    run: Training = training(faults=pause(11, 21))
    run.submit()
    run.wait_for_pause(11)
    fill(disk, LITTLE)
    run.wait_until_gone()
    state = run.state
    assert state is not None and state.status == "failed" and "disk or quota is full" in state.reason, run.story()
    assert [(end.status, end.next, end.step) for end in run.ends] == [("failed", "stop", EVERY)]
    assert "disk or quota is full" in run.log()
    run.check_curve()

    make_room(disk)
    run.submit()
    run.wait_for_pause(21)
    fill(disk, 0)  # now not even a record can be written
    run.wait_until_gone()
    state = read_state(run.run / "train")
    assert state is None or state.status != "done"
    make_room(disk)
    run.submit()
    run.finish()


def fill(disk: Path, left: int) -> None:
    """Take all of the disk but `left` bytes."""
    with open(disk / "filler", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(disk).free - left)


def make_room(disk: Path) -> None:
    """Give back what `fill` took."""
    (disk / "filler").unlink()
