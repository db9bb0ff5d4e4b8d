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

from tests.conftest import run_stage
from tests.slurm.clusters import Cluster, FakeCluster, RealCluster
from tests.slurm.faults import Training, clear, write_settings
from tests.stages.training import curve
from tools.slurm_lab import missing_programs

NODES = 4


def kinds() -> list[str]:
    """The kinds of cluster that this machine can have."""
    real = not missing_programs() and not os.environ.get("DROVER_FAKE_SLURM")
    return ["slurm", "fake"] if real else ["fake"]


def _cluster(kind: str) -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # short: Slurm's sockets live inside
    cluster: Cluster = RealCluster(folder / "lab") if kind == "slurm" else FakeCluster(folder / "lab")
    try:
        cluster.up(NODES)
        yield cluster
    finally:
        cluster.down()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def real_cluster() -> Iterator[Cluster]:
    """A lab of four nodes with accounting; the test is skipped where Slurm is not installed."""
    if "slurm" not in kinds():
        missing = ", ".join(missing_programs())
        pytest.skip(f"Slurm is not installed here: no {missing}" if missing else "DROVER_FAKE_SLURM is set")
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


@pytest.fixture
def training_elsewhere(cluster: Cluster, tmp_path: Path, encoded: Path,
                       undisturbed: dict[int, dict[str, Any]]) -> Iterator[Callable[..., Training]]:
    """Makes the training of a test on two nodes of their own, by a cluster with the settings that are given."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    other = type(cluster)(folder / "lab")

    def make(settings: dict[str, bool], **changes: Any) -> Training:
        other.up(2, **settings)
        return Training(other, tmp_path, encoded, undisturbed, **changes)

    try:
        yield make
    finally:
        other.down()
        shutil.rmtree(folder, ignore_errors=True)
