"""The GPU benchmark's self-test runs every kind of case through the code that a GPU will meet; its figures add up."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.conftest import REPOSITORY, environment
from tools.bench_gpu import CASES
from tools.gpu_kernels import head_losses
from tools.gpu_tables import derived, write_tables

SHORT = ("peaks", "attention 8b", "head", "profile", "checkpoint", "decode", "causal, compiled", "eager")
"""Parts of names that cover every kind of case; what is compiled takes longest, and of that there is one."""


@pytest.mark.slow
def test_the_self_test_measures_every_kind_of_case_and_its_figures_add_up(tmp_path):
    done = subprocess.run(["sh", "tools/bench_gpu.sh", "--self-test", "--only", *SHORT], cwd=REPOSITORY, text=True,
                          env={**environment(), "PYTHON": sys.executable, "OUT": str(tmp_path)}, capture_output=True,
                          check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results, text = ((tmp_path / f"results.{suffix}").read_text() for suffix in ("json", "md"))
    rows = json.loads(results)["rows"]
    assert {row["kind"] for row in rows if row["status"] == "ok"} == {case.kind for case in CASES}
    assert "NaN" not in results and "Infinity" not in results and all(row["case"] in done.stdout for row in rows)
    parts = {(row["case"], row["part"]): row for row in rows}
    assert parts["attention 8b, causal", "causal, cudnn"]["status"] == "not here"  # and stops nothing
    found = [row["difference"] for row in rows if row["kind"] in ("attention", "head") and "difference" in row]
    assert len(found) > 8 and max(found) < 0.02, "other ways of computing the same agree"
    steps = [row for row in rows if "step_s" in row]
    assert len(steps) >= 5 and {row[name] for row in steps for name in ("mfu_full", "mfu_causal")} == {None}
    assert all(row["flops_causal"] < row["flops_full"] for row in steps)
    compiled = parts["train 8b, causal, compiled", ""]
    assert [compiled[name] for name in ("graphs", "breaks", "recompilations")] == [3, 0, 0], "the loss has two"
    assert (text.count("## "), sum(line.startswith("| ") for line in text.splitlines())) == (8, len(rows) + 8)
    assert "kernel" in (tmp_path / "profile.txt").read_text()


def test_losses_that_cases_name_are_there():
    named = [case.options["loss"] for case in CASES if "loss" in case.options]
    assert len(named) > 2 and set(named) <= head_losses(SimpleNamespace(tiny=False)).keys()


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
