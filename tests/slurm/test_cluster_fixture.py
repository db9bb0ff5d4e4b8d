"""What the tests do where the lab does not come up, or is not to be had."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm import conftest
from tools import slurm_lab
from tools.slurm_lab import ACCOUNTING_PROGRAMS, PROGRAMS

pytest_plugins = "pytester"
TESTS = """
from tests.slurm.conftest import cluster, fake_cluster, real_cluster

def test_first(cluster): pass
def test_second(cluster): pass
def test_on_the_fake(fake_cluster): assert fake_cluster.kind == "fake"
def test_on_both(real_cluster, fake_cluster): pass
"""


@pytest.fixture
def session(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A session of its own for the tests above, with the fixtures of this folder."""
    pytester.makeconftest("from tests.slurm.conftest import pytest_runtest_setup")
    pytester.makepyfile(test_it=TESTS)
    monkeypatch.setattr(conftest, "FAILED", [])
    monkeypatch.delenv("DROVER_FAKE_SLURM", raising=False)
    return pytester


def test_a_lab_that_does_not_come_up_fails_once_with_its_logs(
        session: pytest.Pytester, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in PROGRAMS + ACCOUNTING_PROGRAMS:
        (programs / name).write_text(f"#!/bin/sh\necho the words of {name}\nexit 1\n")
        (programs / name).chmod(0o755)
    monkeypatch.setattr(slurm_lab, "_which", lambda program: str(programs / program))
    found = session.runpytest_inprocess("-rs", "-p", "no:cacheprovider")
    found.assert_outcomes(passed=1, skipped=2, errors=1)
    said = found.stdout.str()
    assert said.count("the words of munged") == 1 and "waited for munged: munged died" in said
    assert "the Slurm lab did not come up: see test_it.py::test_first" in said


@pytest.mark.parametrize("reason", ["Slurm is not installed", "DROVER_FAKE_SLURM is set"])
def test_without_slurm_the_fake_takes_its_place_and_what_needs_slurm_says_so(
        session: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    if "DROVER" in reason:
        monkeypatch.setattr(slurm_lab, "_which", lambda program: "/bin/true")
        monkeypatch.setenv("DROVER_FAKE_SLURM", "1")
    else:
        monkeypatch.setattr(slurm_lab, "_which", lambda program: None if program == "slurmctld" else "/bin/true")
    found = session.runpytest_inprocess("-rs", "-p", "no:cacheprovider")
    found.assert_outcomes(passed=3, skipped=1)
    assert f"SKIPPED [1] {reason}" in found.stdout.str() or f": {reason}" in found.stdout.str()
