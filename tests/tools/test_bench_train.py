"""The benchmark runs, and its figures follow from its times. How fast it is, no test says."""

import json

import pytest

from tools import bench_train
from tools.bench_candidates import SHAPE


@pytest.mark.slow
def test_the_benchmark_measures_both_and_its_figures_agree(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(bench_train, "SHAPES", bench_train.SHAPES[:1])
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    out = tmp_path / "out.json"
    assert bench_train.main(["--steps", "1", "--rounds", "1", "--threads", "1", "--json", str(out), "--only", "ours",
                             "transformers"]) == 0
    found, said = json.loads(out.read_text()), capfd.readouterr().out
    assert list(found["candidates"]) == ["ours", "transformers"] and found["parameters"] == SHAPE.parameter_count
    for name, row in found["candidates"].items():
        assert name in said and row["tokens_per_s"] == pytest.approx(8 * 256 / row["step_s"]["median"], rel=1e-3)
        flops = row["tokens_per_s"] * SHAPE.flops_per_token(256, causal=False)
        assert row["mfu_full"] == pytest.approx(flops / found["matrix_peak_gflops"] / 1e9, rel=0.02)
        assert row["mfu_causal"] < row["mfu_full"] <= 1


def test_the_peak_is_the_best_of_all_libraries_and_shapes(monkeypatch):
    # By a clock that says how long each product takes: one library is fast at one shape, the other nowhere.
    now, spent = [0.0], [4.0, 0.5, 8.0, 8.0, *[16.0] * 4]

    def multiply(x, weight):
        now[0] += spent.pop(0)

    monkeypatch.setattr(bench_train, "SHAPES", [(2, 3, 4), (4, 3, 4)])
    monkeypatch.setattr(bench_train, "libraries", lambda: {"a": multiply, "b": multiply})
    monkeypatch.setattr(bench_train.time, "perf_counter", lambda: now[0])
    peak = bench_train.MatrixPeak()
    for _ in range(2):  # a slow moment later takes nothing back
        peak.look(rounds=1)
        assert peak.rates == {"a": 2 * 4 * 3 * 4 / 0.5, "b": 2 * 4 * 3 * 4 / 8.0}
    assert bench_train.ceiling(peak.rates.values(), [200.0]) == 200.0 > bench_train.ceiling([80.0], [60.0]) == 80.0
