"""A short soak on a real lab; what decides about it is tested in test_soak_rules.py."""

from __future__ import annotations

import subprocess
import sys
from itertools import islice

import pytest

from drover.pipeline.files import read_lines
from drover.tools.slurm_lab import missing_programs
from tests.conftest import REPOSITORY, environment
from tests.slurm.soak import order

SEED = 41
"""Begins with a killed rank, a damaged checkpoint and a lost node."""


@pytest.mark.soak
@pytest.mark.skipif(bool(missing_programs()), reason="Slurm is not installed")
def test_training_comes_through_five_minutes_of_faults(tmp_path):
    variables = {name: value for name, value in environment().items() if not name.startswith(("SLURM", "SBATCH"))}
    answer = subprocess.run([sys.executable, "-m", "tests.slurm.soak", "--minutes", "5", "--seed", str(SEED),
                             str(tmp_path)], cwd=REPOSITORY, env=variables, text=True, capture_output=True,
                            stdin=subprocess.DEVNULL, check=False)
    assert answer.returncode == 0, answer.stdout[-6000:] + answer.stderr[-3000:]
    log = list(read_lines(tmp_path / "chaos.jsonl"))
    faults = [line["kind"] for line in log if line["event"] in ("fault", "missed")]
    assert faults and faults == list(islice(order(SEED), len(faults)))
    assert log[-1]["event"] == "done" and (tmp_path / "runs/soak/report.html").is_file()
    for word in ("proven: every sample was used exactly once", "of the undisturbed ones", "goodput", "all holds"):
        assert word in answer.stdout
