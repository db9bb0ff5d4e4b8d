"""The soak: a short one on a real lab, and what decides about it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.files import read_lines
from tests.conftest import REPOSITORY, environment
from tools.chaos_faults import FAULTS, order
from tools.slurm_lab import missing_programs

SEED = 41
"""Begins with a killed rank, a damaged checkpoint and a lost node."""


def test_every_fault_comes_once_before_any_comes_again_and_a_seed_repeats_the_order() -> None:
    found = order(SEED, 2 * len(FAULTS))
    assert sorted(found[:len(FAULTS)]) == sorted(found[len(FAULTS):]) == sorted(FAULTS)
    assert found == order(SEED, 100)[:len(found)]
    assert found != order(SEED + 1, len(found))


def test_a_soak_needs_a_lab_that_is_up(tmp_path: Path) -> None:
    answer = chaos("--lab", str(tmp_path / "nothing"), "--folder", str(tmp_path / "soak"))
    assert answer.returncode == 2 and "tools.slurm_lab up 4" in answer.stderr and "Traceback" not in answer.stderr


@pytest.mark.skipif(bool(missing_programs(accounting=False)), reason="needs a real Slurm on this machine")
def test_training_comes_through_a_minute_and_a_half_of_faults(tmp_path: Path) -> None:
    answer = chaos("--minutes", "1.5", "--seed", str(SEED), "--keep", "--folder", str(tmp_path))
    assert answer.returncode == 0, answer.stdout[-6000:] + answer.stderr[-3000:]
    log = list(read_lines(tmp_path / "chaos.jsonl"))
    faults = [line["kind"] for line in log if line["event"] in ("fault", "missed")]
    assert faults and faults == order(SEED, len(faults))
    assert log[-1]["event"] == "done" and (tmp_path / "runs/soak/report.html").is_file()
    for word in ("proven: every sample was used exactly once", "of the undisturbed ones", "goodput", "all holds"):
        assert word in answer.stdout


def chaos(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the soak's command line to its end."""
    variables = {name: value for name, value in environment().items() if not name.startswith(("SLURM", "SBATCH"))}
    return subprocess.run([sys.executable, "-m", "tools.chaos", *arguments], cwd=REPOSITORY, env=variables, text=True,
                          capture_output=True, stdin=subprocess.DEVNULL, timeout=550, check=False)
