"""Where Slurm is not installed, what needs it is left out and says so."""

from __future__ import annotations

from tests.slurm import conftest

pytest_plugins = "pytester"


def test_without_slurm_what_needs_it_says_so(pytester, monkeypatch):
    monkeypatch.setattr(conftest, "missing_programs", lambda: ["slurmctld"])
    pytester.makepyfile(test_it="from tests.slurm.conftest import cluster\n\n\ndef test_first(cluster): pass\n")
    found = pytester.runpytest_inprocess("-rs", "-p", "no:cacheprovider")
    found.assert_outcomes(skipped=1)
    assert "Slurm is not installed" in found.stdout.str()
