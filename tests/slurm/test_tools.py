"""Tools that run as jobs of Slurm's."""

import sys

import pytest

from tests.conftest import REPOSITORY


@pytest.mark.slow
def test_the_doctor_asks_slurm_and_writes_a_profile(cluster, tmp_path):
    profile = tmp_path / "mine.yaml"
    answer = cluster.run(sys.executable, "-m", "drover.launch.doctor", "--write", profile, cwd=REPOSITORY)
    assert "partition debug*" in answer.stdout and "partition: debug\n" in profile.read_text()
