"""The benchmark runs, and its figures follow from its times. How fast it is, no test says."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY, environment
from tools import bench_train
from tools.bench_candidates import SHAPE
from tools.bench_train import libraries


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
        assert row["mfu_causal"] < row["mfu_full"] <= 1
    assert found["matrix_peak_gflops"] >= max(found["by_library_gflops"].values())
    assert set(found["by_library_gflops"]) == set(libraries())


def test_the_peak_is_the_best_of_all_libraries_and_shapes(monkeypatch):
    # By a clock that says how long each product takes: one library is fast at one shape, the other nowhere.
    spent = iter([[4.0, 0.5][index % 2] if library == "a" else 8.0 for library in "ab" for index in range(2)])
    now = [0.0]

    def multiply(x, weight):
        now[0] += next(spent)

    monkeypatch.setattr(bench_train, "SHAPES", [(2, 3, 4), (4, 3, 4)])
    monkeypatch.setattr(bench_train, "libraries", lambda: {"a": multiply, "b": multiply})
    monkeypatch.setattr(bench_train.time, "perf_counter", lambda: now[0])
    peak = bench_train.MatrixPeak()
    peak.look(rounds=1)
    assert peak.rates == {"a": 2 * 4 * 3 * 4 / 0.5, "b": 2 * 4 * 3 * 4 / 8.0}
    spent = iter([16.0] * 4)
    peak.look(rounds=1)
    assert peak.rates["a"] == 192.0, "a slow moment later takes nothing back"


@pytest.mark.parametrize(("products", "reached"), [([80e9], [97e9, 60e9]), ([80e9, 150e9], [97e9]), ([1.0], [])])
def test_nothing_is_used_by_more_than_all_of_it(products, reached):
    most = bench_train.ceiling(products, reached)
    assert most in [*products, *reached] and all(rate / most <= 1 for rate in [*products, *reached])
