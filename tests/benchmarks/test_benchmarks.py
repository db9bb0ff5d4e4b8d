"""Each benchmark runs from end to end at a small size, and its figures follow from its times."""

import json
import statistics

import pytest

from benchmarks.__main__ import main
from benchmarks.cases import exposed
from benchmarks.suite import cases_of, config_of, derived
from drover.pipeline.config.checks import problems, rank_problems
from tests.conftest import run_python


def measured(folder, *arguments):
    """The rows of a benchmark."""
    assert main([*arguments, "--out", str(folder)]) == 0
    return json.loads((folder / "results.json").read_text())


@pytest.mark.slow
def test_training_steps_are_measured_beside_transformers(tmp_path):
    rows = measured(tmp_path, "train", "--steps", "1", "--rounds", "2", "--threads", "1", "--only", "ours",
                    "transformers", "ours, pipeline 2")["rows"]
    steps, beside = ([row for row in rows if row["section"] == section] for section in ("Training steps",
                                                                                        "Side by side"))
    names = ["ours", "ours, pipeline 2", "transformers"]
    assert [row["name"] for row in steps] == [*names, *names[::-1]] and [row["name"] for row in beside] == names
    assert all(row["rate"] * row["gpus"] * row["median_ms"] == pytest.approx(8 * 256 * 1e3) for row in steps)
    assert all(row["rate"] == pytest.approx(2048 / statistics.median(row["seconds"])) for row in beside)


@pytest.mark.slow
def test_data_stages_are_measured(tmp_path):
    found = measured(tmp_path, "data", "--mb", "1.5", "--rounds", "1", "--only", "shard")
    names = [row["name"] for row in found["rows"] if row["rate"] > 0]
    assert names == ["1 process", "2 processes"] and found["text_mb"] >= 1.5


@pytest.mark.soak
def test_the_same_ids_as_datatrove(tmp_path):
    pytest.importorskip("datatrove")
    *ours, theirs = measured(tmp_path, "data", "--mb", "1.5", "--vocab", "1024", "--rounds", "1", "--only",
                             "encode")["rows"]
    assert theirs["tokens"] == theirs["our_tokens"] > 100_000 and all(row["wall_ratio"] > 0 for row in ours)


@pytest.mark.slow
def test_the_gpu_self_test_measures_every_kind_of_case(tmp_path):
    found = measured(tmp_path, "gpu", "--self-test", "--only", "peaks", "causal, compiled", "cudnn", "eager")
    rows, text = found["rows"], (tmp_path / "results.md").read_text()
    assert {row["kind"] for row in rows if row["status"] == "ok"} == {"matrix", "step"}
    assert "NaN" not in json.dumps(found) and all(row["name"] in text for row in rows)
    by_name = {row["name"]: row for row in rows}
    assert by_name["train 8b, causal, cudnn, compiled"]["status"] == "not here"  # and stops nothing
    steps = [row for row in rows if "step_s" in row]
    assert len(steps) >= 5 and {row[name] for row in steps for name in ("mfu_full", "mfu_causal")} == {None}


def test_mfu_is_taken_of_both_counts_and_both_peaks():
    row = derived({"status": "ok", "gpus": 1, "tokens": 8192, "step_s": [0.2, 0.16384, 0.1], "first_step_s": 30.0,
                       "flops_causal": 8e9, "flops_full": 1e10}, datasheet=989.5, measured=700.0)
    assert row["rate"] == pytest.approx(50_000) and row["compile_s"] == pytest.approx(30 - 0.16384)
    assert (row["mfu_full"], row["mfu_causal"]) == pytest.approx((500 / 989.5, 400 / 989.5))
    assert (row["of_peak_full"], row["of_peak_causal"]) == pytest.approx((5 / 7, 4 / 7))


@pytest.mark.parametrize(("case", "ranks"), [
    *((layout, ranks) for layout in cases_of("layouts") for ranks in (8 * layout.get("nodes", 1), 32)),
    *((case, case.get("ranks", 1)) for kind in ("gpu", "train") for case in cases_of(kind) if "recipe" in case)],
    ids=lambda value: value["name"] if isinstance(value, dict) else str(value))
def test_a_case_can_be_had_on_its_ranks(case, ranks):
    config = config_of(case, ranks)
    assert not problems(config) and not rank_problems(config, ranks)
    assert config.train.batch_tokens <= 64 * 131072
    assert case["recipe"] != "benchmarks/cpu" or config.train.batch_tokens == 8 * 256


def test_collectives_are_exposed_where_nothing_else_runs():
    kernels = [(0, 10, "gemm"), (8, 14, "ncclDevKernel_AllGather"), (12, 18, "ncclDevKernel_ReduceScatter"),
               (16, 20, "triton_"), (30, 40, "ncclDevKernel_SendRecv"), (32, 33, "copy"), (36, 40, "gemm")]
    assert exposed(kernels) == (16 - 10 + (32 - 30) + (36 - 33)) / 40


@pytest.mark.slow
def test_layouts_are_measured_and_one_that_fails_stops_no_other(tmp_path):
    command = ("-m", "benchmarks", "layouts", "--self-test", "--out", tmp_path, "--only")
    done = run_python(*command, "pp 2 x tp 4", "cp 8", "copy on", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["name"]: row for row in json.loads((tmp_path / "results.json").read_text())["rows"]}
    assert rows.pop("8b, a copy on each node")["note"] == "needs 2 nodes"
    assert list(rows) == ["8b, pp 2 x tp 4", "8b at 131,072 tokens, cp 8", "70b, 16 of 80 layers, pp 2 x tp 4"]
    assert all(row["rate"] > 0 and row["gpus"] == 2 and len(row["step_s"]) == 2 for row in rows.values())
    done = run_python(*command, "8b, eager", "8b, tp 8", "--gpus", "3", check=False)  # four heads over three ranks
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert done.returncode == 1 and [row["status"] for row in rows] == ["ok", "failed"]
    assert "Error: " in rows[1]["note"] and "rate" not in rows[1]
