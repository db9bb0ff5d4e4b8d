"""Tools that run as jobs of Slurm's."""

import json
import sys

import pytest

from tests.conftest import REPOSITORY


@pytest.mark.slow
def test_nodes_of_slurm_measure_together(cluster, tmp_path):
    tool = (sys.executable, "-m", "benchmarks", "layouts", "--self-test", "--gpus", "1", "--out", str(tmp_path))
    done = cluster.run("srun", "-N", "2", "--ntasks-per-node", "1", *tool, "--only", "8b, eager", "copy on",
                       cwd=REPOSITORY)
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [(row["name"], row["status"], row["gpus"]) for row in rows] == [
        ("8b, eager", "ok", 2), ("8b, a copy on each node", "ok", 2)], done


@pytest.mark.slow
def test_the_doctor_asks_slurm_and_writes_a_profile(cluster, tmp_path):
    said = cluster.run(sys.executable, "-m", "drover.launch.doctor", "--write", tmp_path / "mine.yaml", cwd=REPOSITORY)
    assert "partition debug*" in said.stdout and "partition: debug\n" in (tmp_path / "mine.yaml").read_text()
