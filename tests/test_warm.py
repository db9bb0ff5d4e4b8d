"""A warm process is to the tests what a cold one would be: its words and its status."""

import pytest

from tests.conftest import run_python, stage_command, start_stage


@pytest.mark.parametrize("overrides", [["--help"], ["train.lr=x", "train.warmup=3"], ["--colour"]])
def test_words_and_status_are_those_of_a_cold_process(place, overrides):
    cold = run_python(*stage_command("train", place / "c.yaml", *overrides)[1:], check=False)
    warm = start_stage("train", place / "c.yaml", *overrides)
    said, complaint = warm.communicate()
    assert (said, complaint, warm.returncode) == (cold.stdout, cold.stderr, cold.returncode)
