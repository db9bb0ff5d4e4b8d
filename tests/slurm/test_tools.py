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
def test_the_doctor_tries_nodes_and_writes_a_profile_that_works(cluster, tmp_path):
    """Two nodes report on their Python, lock each other out, and meet; the job's folder is gone afterwards."""
    asked = cluster.run(sys.executable, "-m", "drover.launch.doctor", "--runs-dir", tmp_path / "runs", "--json",
                        "--write", tmp_path / "mine.yaml", cwd=REPOSITORY, check=False)
    found = {finding["what"].strip(): finding for finding in json.loads(asked.stdout)["findings"]}
    assert {"Slurm", "partition debug*", "job in debug", "clocks", "shared folder", "locks between nodes",
            "network"} <= found.keys()
    # How far apart clocks seem on a busy machine says nothing of the doctor.
    assert {what for what, finding in found.items() if finding["state"] == "problem"} <= {"clocks"}, found
    assert "partition: debug\n" in (tmp_path / "mine.yaml").read_text()
    assert not (tmp_path / "runs").exists(), "nothing stays"
