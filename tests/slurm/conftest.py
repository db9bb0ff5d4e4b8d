"""A Slurm cluster for tests: the real lab where Slurm's packages are, the fake elsewhere or where one asks for it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import UserError
from tests.conftest import run_stage
from tests.slurm.clusters import Cluster, FakeCluster, RealCluster, kinds
from tests.slurm.faults import Training, clear, write_settings
from tests.stages.training import curve
from tools.slurm_lab import missing_programs

NODES = 4
FAILED: list[str] = []
"""The first test that needed the lab, if that did not come up."""


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A lab that did not come up is told once, with its logs; the other tests that need it are left out."""
    asked = getattr(item, "callspec", None)
    names = [*getattr(item, "fixturenames", ()), *(asked.params.values() if asked else ())]
    if FAILED and ("real_cluster" in names or ("cluster" in names and "slurm" in kinds())):
        pytest.skip(f"the Slurm lab did not come up: see {FAILED[0]}")


def _cluster(kind: str) -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # short: Slurm's sockets live inside
    cluster: Cluster = RealCluster(folder / "lab") if kind == "slurm" else FakeCluster(folder / "lab")
    why = ""
    try:
        cluster.up(NODES)
        yield cluster
    except UserError as error:
        FAILED.append(os.environ.get("PYTEST_CURRENT_TEST", "an earlier test").rpartition(" (")[0])
        why = str(error)
    finally:
        cluster.down()
        shutil.rmtree(folder, ignore_errors=True)
    if why:
        pytest.fail(why, pytrace=False)


@pytest.fixture(scope="session")
def real_cluster() -> Iterator[Cluster]:
    """A lab of four nodes with accounting; the test is skipped where Slurm is not installed."""
    if "slurm" not in kinds():
        pytest.skip("Slurm is not installed" if missing_programs() else "DROVER_FAKE_SLURM is set")
    yield from _cluster("slurm")


@pytest.fixture(scope="session")
def fake_cluster() -> Iterator[Cluster]:
    """A fake cluster of four nodes."""
    yield from _cluster("fake")


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Cluster:
    """Four nodes of four CPUs, real where possible. The tests of a worker share it and leave it as they found it."""
    return request.getfixturevalue("real_cluster" if "slurm" in kinds() else "fake_cluster")


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, encoded: Path) -> dict[int, dict[str, Any]]:
    """The curve of the training that the fault tests disturb, by step, as one process on this box gives it."""
    config = write_settings(tmp_path_factory.mktemp("undisturbed"), encoded)
    run_stage("train", config)
    return {record["step"]: record for record in curve(config)}


@pytest.fixture
def training(cluster: Cluster, tmp_path: Path, encoded: Path,
             undisturbed: dict[int, dict[str, Any]]) -> Iterator[Callable[..., Training]]:
    """Makes the training of a test, ready to be submitted. What a failed test leaves behind is removed."""
    yield partial(Training, cluster, tmp_path, encoded, undisturbed)
    clear(cluster)


@pytest.fixture(scope="module")
def shared_run(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, encoded: Path,
               undisturbed: dict[int, dict[str, Any]]) -> Iterator[Training]:
    """A training that the tests of a file disturb one after another (`faults.in_order`)."""
    yield Training(cluster, tmp_path_factory.mktemp("run"), encoded, undisturbed)
    clear(cluster)
