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
