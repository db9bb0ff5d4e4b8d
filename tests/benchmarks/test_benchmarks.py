"""Each benchmark runs from end to end at a small size."""

import json
import re
from functools import partial

import pytest

from benchmarks import data, gpu, sizes, train
from benchmarks.measuring import in_processes
from drover.pipeline.config.checks import problems, rank_problems
from tests.refusal import printed


@pytest.mark.slow
def test_ranks_are_measured_together():
    [case] = [case for case in train.CASES if case.name == "tensor parallel 2"]
    row = in_processes("benchmarks.train", case, [])
    assert row["tokens/s"] > 0 and row["MFU"] is None
    assert in_processes("benchmarks.train", case, [], 0.1) == {"failure": "it took longer than 0 s"}


@pytest.mark.slow
def test_gpu_cases_are_measured_and_one_that_fails_stops_no_other(capsys, tmp_path):
    """flex has no backward pass on a CPU. Each row is in the file at once."""
    assert gpu.main(["--tiny", "--only", "8b, documents, flex", "8b, eager", "transformers",
                     "--minutes", "60", "--to", str(tmp_path / "rows")]) == 1
    lines = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    written = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert sorted(row["case"] for row in written) == ["8b, documents, flex", "8b, eager", "transformers"]
    rows = {name: figures for name, *figures in lines}
    assert "error: " in rows["8b, documents, flex"][-1] and rows["8b, documents, flex"][0] == "-"
    assert all(float(rows[name][0].replace(",", "")) > 0 for name in ("8b, eager", "transformers"))
    assert rows["transformers"][1] == "1.00"


@pytest.mark.soak
def test_the_same_ids_as_datatrove(capsys):
    pytest.importorskip("datatrove")
    assert data.main(["--files", "a*.py", "--vocab", "1024"]) == 0
    ours, theirs = re.findall(r"([\d,]{6,}) \|$", capsys.readouterr().out, re.MULTILINE)
    assert ours == theirs


@pytest.mark.slow
def test_duplicates_that_are_made_are_found(capsys, monkeypatch):
    monkeypatch.setattr(sizes, "DOCUMENTS", 1000)
    assert sizes.main(["--files", "2"]) == 0
    found = re.search(r"'duplicate': (\d+), 'near_duplicate': (\d+)", capsys.readouterr().out)
    assert found is not None and found[1] == "100" and 98 <= int(found[2]) <= 100


OPTIONS = gpu.main.parser().parse_args([])


@pytest.mark.parametrize(("config_of", "case"), [*((partial(gpu.config_of, OPTIONS), case) for case in gpu.CASES),
                                                 *((train.config_of, case) for case in train.CASES)])
def test_a_case_is_a_valid_configuration(config_of, case):
    config = config_of(case)
    assert not problems(config) and not rank_problems(config, case.ranks)


def test_no_gpu_is_said(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "--tiny needs none" in printed(capsys, gpu.main, expect=2)
