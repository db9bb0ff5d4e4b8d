"""The benchmark of generation runs, both write the same, and its figures follow from its times. How fast, no test
says."""

import json

import pytest

from model.presets import preset
from tests.refusal import printed
from tools import bench_generate
from tools.bench_generate import main

SMALL = ["--preset", "ladder_1m", "--vocabulary", "256", "--prompt", "5", "--new", "7"]
PARAMETERS = preset("ladder_1m").model_copy(update={"vocab_size": 256}).parameter_count


@pytest.mark.slow
def test_both_write_the_same_and_the_figures_are_told(tmp_path, capsys):
    assert main([*SMALL, "--rounds", "1", "--threads", "1", "--json", str(tmp_path / "out.json")]) == 0
    [run], text = json.loads((tmp_path / "out.json").read_text())["runs"], capsys.readouterr().out
    assert run["same_tokens"] and f"| 1 | {run['ms_per_token']['ours']:.2f} | " in text
    assert f"ladder_1m, {PARAMETERS:,} parameters, float32 on cpu, batch 1, 5 tokens of prompt, 7 new ones" in text


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
    monkeypatch.setattr(bench_generate.time, "process_time", lambda: 2 * now[0])
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    found = bench_generate.measure({"ours": writer("ours", [9, 1, 2, 4]), "transformers": writer(
        "transformers", [9, 3, 4, 4])}, threads=1, rounds=3)
    assert found["ratio"] == {"min": 1.0, "median": 2.0, "max": 3.0} == found["processor_ratio"]
    assert found["processor_seconds"]["ours"] == [2, 4, 8] and found["same_tokens"]
    assert found["ms_per_token"] == {"ours": 1000.0, "transformers": 2000.0}
    assert order[2:] == ["ours", "transformers", "transformers", "ours", "ours", "transformers"]


@pytest.mark.parametrize(("arguments", "said"), [
    (["--new", "0", "--threads", "0"], "--new must be above 0, not 0; --threads must be above 0, not 0."),
    (["--new", "2000"], "exceed the context of ladder_1m, 1024")])
def test_what_cannot_be_measured_is_said(arguments, said, capsys):
    assert said in printed(capsys, main, *SMALL, *arguments, expect=2)
