"""Tools that run as jobs of Slurm's."""

import sys

import pytest

from tests.conftest import REPOSITORY


@pytest.mark.slow
def test_the_doctor_asks_slurm_and_writes_a_profile(cluster, tmp_path):
    said = cluster.run(sys.executable, "-m", "drover.launch.doctor", "--write", tmp_path / "mine.yaml", cwd=REPOSITORY)
    assert "partition debug*" in said.stdout and "partition: debug\n" in (tmp_path / "mine.yaml").read_text()
