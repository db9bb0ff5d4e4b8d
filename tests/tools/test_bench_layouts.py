"""The benchmark of layouts: each can be had on a node of eight, runs from end to end here, and its figures add up."""

import json
from pathlib import Path

import pytest

from pipeline.config.checks import problems, rank_problems
from tests.conftest import run_python
from tools import bench_layouts
from tools.bench_layouts import LAYOUTS, Row, config_of, exposed, main, table, torchrun


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_layout_can_be_had_on_its_nodes(layout):
    for gpus in (8 * layout.nodes, 32):
        config = config_of(layout, gpus)
        assert not problems(config) and not rank_problems(config, gpus)
        assert config.train.batch_tokens <= 64 * 131072


def test_collectives_are_exposed_where_nothing_else_runs():
    kernels = [(0, 10, "gemm"), (8, 14, "ncclDevKernel_AllGather"), (12, 18, "ncclDevKernel_ReduceScatter"),
               (16, 20, "triton_"), (30, 40, "ncclDevKernel_SendRecv"), (32, 33, "copy"), (36, 40, "gemm")]
    assert exposed(kernels) == (16 - 10 + (32 - 30) + (36 - 33)) / 40


def test_a_row_says_what_was_measured_or_why_nothing():
    text = table([Row("8b", "ok", 8, 6000.0, 0.4321, [0.1, 0.3, 0.2], 64.6, 0.05, 1.0, 6667),
                  Row("1b", "failed", note="Error: a | b")])
    assert "| 8b | 8 | 6,000 | 6,667 | 43.2% | 200 (100 - 300) | 64.6 | 5.0% | 100% |" in text
    assert "| 1b | - | - | - | - | failed Error: a / b | - | - | - |" in text


def test_without_gpus_it_says_what_needs_none(capsys, monkeypatch):
    monkeypatch.setattr(bench_layouts, "gpus_here", lambda: 0)
    assert main([]) == 2 and "--rehearse and --self-test need none" in capsys.readouterr().err


def measured(folder):
    return {row["layout"]: row for row in json.loads((Path(folder) / "results.json").read_text())["rows"]}


@pytest.mark.slow
def test_the_self_test_measures_layouts_and_a_failed_one_stops_no_other(tmp_path):
    done = run_python("-m", "tools.bench_layouts", "--self-test", "--out", tmp_path, "--only", "pp 2 x tp 4", "cp 8",
                      "copy on", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = measured(tmp_path)
    lacking = rows.pop("8b, a copy on each node")
    assert (lacking["status"], lacking["note"]) == ("left out", "needs 2 nodes")
    assert list(rows) == ["8b, pp 2 x tp 4", "8b at 131,072 tokens, cp 8", "70b, 16 of 80 layers, pp 2 x tp 4"]
    assert all(row["tokens_per_s"] > 0 and row["gpus"] == 2 and len(row["step_s"]) == 2 for row in rows.values())
    layout = next(layout for layout in LAYOUTS if layout.name == "8b, tp 8")
    row = torchrun(LAYOUTS.index(layout), layout, 3, 1, True, tmp_path)  # four heads over three ranks
    assert row.status == "failed" and "Error: " in row.note and row.tokens_per_s is None, row
