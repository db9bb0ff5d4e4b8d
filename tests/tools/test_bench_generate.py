"""The benchmark of generation runs, both write the same, and its figures follow from its times. How fast, no test
says."""

import json
import statistics

import pytest

from model.presets import preset
from tools import bench_generate
from tools.bench_generate import main

SMALL = ["--preset", "ladder_1m", "--vocabulary", "256", "--prompt", "5", "--new", "7"]
PARAMETERS = preset("ladder_1m").model_copy(update={"vocab_size": 256}).parameter_count


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The figures, and how many threads torch has after it."""
    import torch
    before, file = torch.get_num_threads(), tmp_path_factory.mktemp("bench") / "out.json"
    assert main([*SMALL, "--rounds", "3", "--threads", "2", "1", "--json", str(file)]) == 0
    assert torch.get_num_threads() == before
    return json.loads(file.read_text())


def test_both_write_the_same_and_the_figures_agree(measured):
    assert [run["threads"] for run in measured["runs"]] == [2, 1]
    assert measured["parameters"] == PARAMETERS and (measured["prompt"], measured["new"]) == (5, 7)
    for run in measured["runs"]:
        assert run["same_tokens"]
        for times, ratio in (("seconds", "ratio"), ("processor_seconds", "processor_ratio")):
            assert set(run[times]) == {"ours", "transformers"}
            ratios = [theirs / ours for ours, theirs in zip(*(run[times][name] for name in ("ours", "transformers")),
                                                            strict=True)]
            assert len(ratios) == 3
            assert run[ratio] == {"min": min(ratios), "median": statistics.median(ratios), "max": max(ratios)}
        for name, found in run["ms_per_token"].items():
            assert found == pytest.approx(statistics.median(run["seconds"][name]) / 7 * 1e3)


def test_the_table_says_it(measured):
    text = bench_generate.table(measured)
    assert f"ladder_1m, {PARAMETERS:,} parameters, float32 on cpu, batch 1, 5 tokens of prompt, 7 new ones" in text
    run = measured["runs"][1]
    assert f"| 1 | {run['ms_per_token']['ours']:.2f} | {run['ms_per_token']['transformers']:.2f} | " in text


def test_rounds_pair_the_times_and_turn_the_order_round(monkeypatch):
    now, order = [0.0], []

    def writer(name, spent):
        times = iter(spent)

        def write():
            order.append(name)
            now[0] += next(times)
            return [1, 2]
        return write

    monkeypatch.setattr(bench_generate.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    found = bench_generate.measure({"ours": writer("ours", [9, 1, 2, 4]), "transformers": writer(
        "transformers", [9, 3, 4, 4])}, threads=1, rounds=3)
    assert found["ratio"] == {"min": 1.0, "median": 2.0, "max": 3.0}
    assert found["ms_per_token"] == {"ours": 1000.0, "transformers": 2000.0}
    assert order[2:] == ["ours", "transformers", "transformers", "ours", "ours", "transformers"]


@pytest.mark.parametrize(("arguments", "said"), [
    (["--new", "0", "--threads", "0"], "--new must be above 0, not 0; --threads must be above 0, not 0."),
    (["--new", "2000"], "exceed the context of ladder_1m, 1024")])
def test_what_cannot_be_measured_is_said(arguments, said, capsys):
    assert main([*SMALL, *arguments]) == 2
    assert said in capsys.readouterr().err
