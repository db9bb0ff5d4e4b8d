"""The launcher, Slurm's programs, and a job, for the launcher's tests."""

import pytest

from tests.launch.fake_job import make_job
from tests.launch.launcher import Launcher
from tests.launch.recorded_slurm import Programs


@pytest.fixture
def launcher(tmp_path, monkeypatch):
    """The launcher in this process, on a machine without Slurm."""
    return Launcher(tmp_path, monkeypatch)


@pytest.fixture
def slurm(launcher, monkeypatch):
    """The same where there is Slurm."""
    return launcher.with_slurm(monkeypatch)


@pytest.fixture
def programs(tmp_path):
    """Stand-in programs, which say and do what a test wants."""
    return Programs(tmp_path / "bin")


@pytest.fixture
def job(tmp_path):
    """A train job of two ranks."""
    return make_job(tmp_path)
