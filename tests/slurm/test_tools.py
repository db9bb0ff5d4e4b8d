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
    command = (sys.executable, "-m", "drover.launch.doctor", "--runs-dir", str(tmp_path / "runs"))
    asked = cluster.run(*command, "--json", "--write", str(tmp_path / "mine.yaml"), cwd=REPOSITORY)
    found = {finding["what"].strip(): finding for finding in json.loads(asked.stdout)["findings"]}
    assert {"Slurm", "partition debug*", "job in debug", "clocks", "shared folder", "locks between nodes",
            "network"} <= found.keys()
    assert all(finding["state"] != "problem" for finding in found.values()), found
    assert not (tmp_path / "runs").exists(), "nothing stays"
    planned = cluster.run(sys.executable, "-m", "drover", "plan", "--stage", "shard", "--cluster",
                          str(tmp_path / "mine.yaml"), "--config", "configs/demo.yaml", f"runs_dir={tmp_path}/runs",
                          cwd=REPOSITORY)
    assert "--partition=debug" in planned.stdout
    missing = cluster.run(*command, "--partition", "nope", "--no-jobs", "--json", cwd=REPOSITORY, check=False)
    assert missing.returncode == 0  # nothing is tried
    refused = cluster.run(*command, "--partition", "nope", cwd=REPOSITORY, check=False)
    assert refused.returncode == 1 and "there is no such partition" in refused.stdout
