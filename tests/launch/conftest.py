"""Houses for the launcher's tests: a fresh one, and one whose data stages are done."""

import os
import shutil

import pytest

from tests.launch.fake_house import build_house
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
def house(tmp_path):
    """A launcher whose stages are fakes; whatever they leave running is killed at the end."""
    house = build_house(tmp_path)
    yield house
    for name in house.alive():
        os.kill(int((house.pids / name).read_text()), 9)


@pytest.fixture(scope="session")
def data_stages(tmp_path_factory):
    """A run folder in which shard, tokenizer and encode are done."""
    house = build_house(tmp_path_factory.mktemp("data_stages"))
    result = house.submit("--stage", "shard,tokenizer,encode", "--cluster", "local")
    assert result.returncode == 0, result.stderr
    return house.run


@pytest.fixture
def ready(house, data_stages):
    """A house in which only train and what follows is to do."""
    shutil.copytree(data_stages, house.run, symlinks=True)
    return house


@pytest.fixture
def job(tmp_path):
    """A train job of two ranks."""
    return make_job(tmp_path)
