"""The benchmark runs, and its figures follow from its times. How fast it is, no test says."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY, environment
from tools.bench_candidates import SHAPE


def test_the_benchmark_measures_both_and_its_figures_agree(tmp_path):
    command = [sys.executable, "-m", "tools.bench_train", "--steps", "1", "--rounds", "1", "--only", "ours",
               "transformers", "--json", str(tmp_path / "out.json")]
    result = subprocess.run(command, cwd=REPOSITORY, env=environment(2), capture_output=True, text=True, check=True)
    found = json.loads((tmp_path / "out.json").read_text())
    assert set(found["candidates"]) == {"ours", "transformers"} and found["parameters"] == SHAPE.parameter_count
    for name, row in found["candidates"].items():
        assert name in result.stdout
        assert row["tokens_per_s"] == pytest.approx(8 * 256 / row["step_s"]["median"], rel=1e-3)
        flops = row["tokens_per_s"] * SHAPE.flops_per_token(256, causal=False)
        assert row["mfu_full"] == pytest.approx(flops / found["matrix_peak_gflops"] / 1e9, rel=0.02)
        assert row["mfu_causal"] < row["mfu_full"]
