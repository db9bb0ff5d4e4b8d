"""kill -9 at random points over all passes of the shard stage, with another number of processes each time."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys

import pytest
import yaml

from launch.processes import kill_tree
from pipeline.contract.manifest import read_manifest
from tests.conftest import REPOSITORY, environment, run_stage
from tests.dirty_corpus import every_pass, write_dirty
from tests.waiting import wait_for


def files(run):
    """How many files a run has: it grows from one pass to the next."""
    return sum(len(names) for _, _, names in os.walk(run))


@pytest.fixture
def config(tmp_path):
    """Dirty files in many small units, with every kind of pass."""
    write_dirty(tmp_path, size=2)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({
        "name": "undisturbed", "runs_dir": str(tmp_path / "runs"), "shard": every_pass(tmp_path)}))
    return path


@pytest.mark.parametrize("seed, kills", [pytest.param(0, 8, marks=pytest.mark.slow),
                                         pytest.param(1, 100, marks=pytest.mark.soak)])
def test_killed_at_random_points_it_ends_with_the_same_bytes(config, seed, kills):
    run_stage("shard", config)
    undisturbed, run = config.parent / "runs/undisturbed/shard", config.parent / "runs/killed"
    most, chance, landed = files(undisturbed), random.Random(seed), 0
    command = [sys.executable, "-m", "pipeline.shard", "--config", str(config), "name=killed"]
    for _ in range(kills):
        moment = files(run) + chance.randint(1, most // 2)
        process = subprocess.Popen([*command, f"launch.processes={chance.randint(1, 3)}"], cwd=REPOSITORY,
                                   env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for(lambda moment=moment, process=process: files(run) >= moment or process.poll() is not None)
        kill_tree(process.pid)
        landed += process.wait() < 0
        if (run / "shard/manifest.json").exists():
            shutil.rmtree(run)  # and from the start again
    assert landed >= kills // 2
    run_stage("shard", config, "name=killed")
    one, other = read_manifest(undisturbed), read_manifest(run / "shard")
    assert (one.outputs, one.counts, one.fingerprint) == (other.outputs, other.counts, other.fingerprint)
    assert not (run / "shard/staging").exists() and not list(run.rglob("*.tmp"))
