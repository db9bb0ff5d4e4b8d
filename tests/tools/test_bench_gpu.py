"""The GPU benchmark's self-test runs every kind of case through the code that a GPU will meet; its figures add up."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from tests.conftest import REPOSITORY, environment
from tests.waiting import HANG_S
from tools.bench_gpu import CASES, Case, Suite
from tools.gpu_tables import derived, write_tables


def run(folder, *arguments):
    return subprocess.run(["sh", "tools/bench_gpu.sh", *arguments], cwd=REPOSITORY, text=True, capture_output=True,
                          env={**environment(), "PYTHON": sys.executable, "OUT": str(folder)}, timeout=HANG_S,
                          check=False)


@pytest.fixture(scope="module")
def tested(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    done = run(folder, "--self-test")
    log = folder / "worker.log"
    assert done.returncode == 0, done.stdout + done.stderr + (log.read_text()[-4000:] if log.exists() else "")
    return folder, json.loads((folder / "results.json").read_text()), done.stdout


def numbers(value):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for part in value for number in numbers(part)]
    return [value] if isinstance(value, float) else []


def test_every_kind_of_case_is_measured_and_every_figure_is_a_number(tested):
    _, result, printed = tested
    measured = {row["kind"] for row in result["rows"] if row["status"] == "ok"}
    assert measured == {case.kind for case in CASES}
    assert all(math.isfinite(number) for row in result["rows"] for number in numbers(row))
    assert all(row["case"] in printed for row in result["rows"])
    assert {case.name for case in CASES if case.quick and case.kind != "profile"} <= {
        row["case"] for row in result["rows"]}


def test_what_is_not_here_says_so_and_stops_nothing(tested):
    _, result, _ = tested
    rows = {row["part"]: row for row in result["rows"] if row["kind"] == "attention"}
    assert rows["causal, cudnn"]["status"] == "not here" and "backend" in rows["causal, cudnn"]["note"]
    assert rows["documents, flex"]["status"] == "ok"
    assert {row["status"] for row in result["rows"]} <= {"ok", "not here", "missing"}


def test_other_ways_of_computing_the_same_agree(tested):
    _, result, _ = tested
    found = [row for row in result["rows"] if row["kind"] in ("attention", "head") and "difference" in row]
    assert len(found) > 8 and all(row["difference"] < 0.02 for row in found)


def test_rates_follow_from_the_times_and_an_unknown_peak_gives_no_mfu(tested):
    _, result, _ = tested
    steps = [row for row in result["rows"] if "step_s" in row]
    assert len(steps) > 10
    for row in steps:
        assert row["tokens_per_s"] == pytest.approx(row["tokens"] / statistics.median(row["step_s"]))
        assert row["tflops_full"] == pytest.approx(row["tokens_per_s"] * row["flops_full"] / 1e12)
        assert row["flops_causal"] < row["flops_full"] and row["of_matrix_peak_causal"] < row["of_matrix_peak_full"]
        assert row["mfu_full"] is None and row["mfu_causal"] is None
    compiled = next(row for row in steps if row["case"] == "train 8b, causal, compiled")
    assert compiled["graphs"] == 1 and compiled["breaks"] == 0 and compiled["recompilations"] == 0
    assert next(row for row in steps if row["case"] == "train 8b, causal, eager")["graphs"] == 0


def test_the_tables_hold_every_row(tested):
    folder, result, _ = tested
    text = (folder / "results.md").read_text()
    for title in ("Peaks", "Training steps", "One layer's attention", "Head and loss alone", "Checkpoint", "Decoding",
                  "Where the time goes", "Not measured"):
        assert f"## {title}" in text
    assert sum(line.startswith("| ") for line in text.splitlines()) == len(result["rows"]) + 8
    assert "kernel" in (folder / "profile.txt").read_text()


def test_mfu_is_taken_of_both_counts_and_both_peaks(tmp_path):
    result = {"machine": {"card": "NVIDIA H100", "datasheet_tflops": 989.5}, "date": "today", "rows": [
        {"kind": "matrix", "status": "ok", "case": "peaks", "part": "x", "tflops": 700.0, "precision": "bf16"}]}
    row = derived({"kind": "train", "case": "train 8b, causal, compiled", "part": "", "status": "ok", "layers": 4,
                   "tokens": 8192, "step_s": [0.2, 0.16384, 0.1], "first_step_s": 30.0, "memory_gb": 50.0,
                   "precision": "bf16", "flops_causal": 8e9, "flops_full": 1e10, "graphs": 1}, result)
    assert row["tokens_per_s"] == pytest.approx(50_000) and row["compile_s"] == pytest.approx(30 - 0.16384)
    assert row["mfu_full"] == pytest.approx(500 / 989.5) and row["mfu_causal"] == pytest.approx(400 / 989.5)
    assert row["of_matrix_peak_full"] == pytest.approx(5 / 7)
    write_tables(tmp_path / "results.md", {**result, "rows": [*result["rows"], row]})
    assert "| 50,000 | 500.0 | 50.5% | 40.4% | 71.4% / 57.1% |" in (tmp_path / "results.md").read_text()


def test_a_case_that_fails_dies_or_hangs_is_a_row_and_the_next_one_runs(tmp_path, monkeypatch):
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "")
    suite, good = Suite(tmp_path, 60, True, None), Case("good", "matrix", 1)
    suite.ready_worker()

    def kill_the_worker():
        suite.worker.process.kill()
        suite.worker.process.join()

    def use_up_the_time():
        suite.ready_worker()
        suite.until = time.monotonic() + 0.01
    for case, before in [(Case("bad", "train", 1, {"shape_name": "8b", "backend": "no such"}), int), (good, int),
                         (replace(good, name="dead"), kill_the_worker), (replace(good, name="alive"), int),
                         (Case("slow", "decode", 1, {"shape_name": "8b"}), use_up_the_time)]:
        before()
        suite.measure(case)
    suite.run([])
    status = {row["case"]: row["status"] for row in suite.result["rows"]}
    assert status == {"bad": "failed", "good": "ok", "dead": "failed", "alive": "ok", "slow": "timeout"}
    assert json.loads((tmp_path / "results.json").read_text())["rows"] == suite.result["rows"]


def test_cases_for_which_no_time_is_left_are_named(tmp_path):
    suite = Suite(tmp_path, 0.01, True, None)
    suite.run(CASES[:3])
    assert [row["status"] for row in suite.result["rows"]] == ["skipped"] * 3
    assert "skipped" in (tmp_path / "results.md").read_text()


def test_without_a_gpu_it_says_what_to_do(tmp_path):
    done = subprocess.run([sys.executable, "-m", "tools.bench_gpu", "--only", "peaks", "--out", str(tmp_path)],
                          cwd=REPOSITORY, text=True, capture_output=True, check=False,
                          env={**environment(), "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 1 and "--self-test" in done.stderr and "Traceback" not in done.stderr
