"""The Slurm lab of these tests, which are left out where Slurm is not installed."""

import shutil
import tempfile
from functools import partial
from pathlib import Path

import pytest

from drover.pipeline.core.errors import UserError
from tests.slurm.faults import Cluster, Training, clear, guard, undisturbed_curve
from tests.slurm_lab import missing_programs

NODES = 5
"""One more than a job of these tests asks for: it goes on without one that it lost."""


@pytest.fixture(scope="session")
def cluster():
    """Five nodes with accounting. The tests of a worker share it and leave it as they found it."""
    if missing_programs():
        pytest.skip("Slurm is not installed: `python -m tests.slurm_lab install` installs it, as root")
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # short: Slurm's sockets live inside
    cluster, watch = Cluster(folder / "lab"), guard(folder / "lab")
    try:
        cluster.up(NODES)
        yield cluster
    except UserError as error:
        pytest.fail(str(error), pytrace=False)
    finally:
        cluster.down()
        watch.kill()
        watch.wait()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory, encoded):
    """The curve of the training that the fault tests disturb, by step, as one process on this box gives it."""
    return undisturbed_curve(tmp_path_factory.mktemp("undisturbed"), encoded)


@pytest.fixture
def training(cluster, tmp_path, encoded, undisturbed):
    """Makes the training of a test, ready to be submitted. What a failed test leaves behind is removed."""
    yield partial(Training, cluster, tmp_path, encoded, undisturbed)
    clear(cluster)


@pytest.fixture(scope="module")
def shared_run(cluster, tmp_path_factory, encoded, undisturbed):
    """A training that the tests of a file disturb one after another (`faults.in_order`)."""
    yield Training(cluster, tmp_path_factory.mktemp("run"), encoded, undisturbed)
    clear(cluster)
