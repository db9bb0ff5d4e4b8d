"""The disk of the run folder is full while a job trains: it ends with the reason, and goes on once there is room."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.faults import Training

pytestmark = pytest.mark.slow
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
    run: Training = training()
    run.submit()
    step = run.next_wait()
    with open(disk / "filler", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(disk).free - LITTLE)
    run.go_on(to_the_end=True)  # the save fails beside training, which may be a gate further by then
    run.wait_until_gone()
    state = run.state
    assert state is not None and state.status == "failed" and "disk or quota is full" in state.reason, run.story()
    assert [(end.status, end.next, end.step) for end in run.ends] == [("failed", "stop", step - 2)]
    assert "disk or quota is full" in run.log()
    run.check_curve()

    (disk / "filler").unlink()
    run.submit(nodes=1)
    run.finish()
