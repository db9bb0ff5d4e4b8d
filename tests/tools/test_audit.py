"""The audit proves a disturbed run, and names what is planted in its records."""

from __future__ import annotations

import json
import shutil

import pytest

from pipeline.config.loading import load_config
from tests.conftest import run_stage, write_config
from tests.stages.test_train import train_and_kill
from tools.audit import audit, main


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory, encoded):
    """The folder of a run that was killed twice, over an epoch boundary, and finished on other ranks."""
    folder = tmp_path_factory.mktemp("disturbed")
    sources = [source.model_dump() for source in load_config(encoded).shard.sources]
    config = write_config(folder, encoded.parent, reuse=str(encoded.parent / "runs/mini"), shard={"sources": sources})
    settings = ["train.steps=70", "train.heldout_every=100", "train.sample_every=100"]
    train_and_kill(config, *settings, ranks=2, after_step=10)
    train_and_kill(config, *settings, ranks=1, after_step=31)
    run_stage("train", config, *settings, ranks=1)
    return folder / "runs/mini"


def damaged(disturbed, tmp_path, change):
    """A copy of the run whose log `change` has edited, line by line."""
    folder = tmp_path / "mini"
    shutil.copytree(disturbed, folder)
    path = folder / "train/metrics.jsonl"
    lines, last = [], 0
    for text in path.read_text().splitlines():
        line = json.loads(text)
        lines.append(change({**line, "restart": line["step"] <= last}))  # whether the step is done again
        last = max(last, line["step"])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines if line is not None))
    return folder


def test_a_run_with_kills_and_other_ranks_is_proven(disturbed, capsys):
    found = audit(disturbed)
    assert found.faults == [] and found.steps == 70 and found.samples == 70 * 16 and found.restarts == 2
    assert found.checkpoints == 2


@pytest.mark.parametrize("change, expected", [
    (lambda line: None if line["step"] == 7 else line, "step 7 has no line"),
    (lambda line: {**line, "samples": [line["samples"][0] + 3, line["samples"][1]]} if line["step"] == 20 else line,
     "samples [304, 307) were lost before step 20"),
    (lambda line: {**line, "samples": [line["samples"][0] - 5, line["samples"][1]]} if line["step"] == 20 else line,
     "samples [299, 304) were used again in step 20"),
    (lambda line: {**line, "samples": [line["samples"][0], 2000]} if line["step"] == 70 else line,
     "the manifest counts 1120 samples, the log 2000"),
    (lambda line: {**line, "loss": line["loss"] * 1.01} if line["restart"] else line,
     "was done twice with different loss"),
])
def test_planted_faults_are_named(disturbed, tmp_path, change, expected, capsys):
    assert main(["--run", str(damaged(disturbed, tmp_path, change))]) == 1
    assert expected in capsys.readouterr().out


def test_nothing_to_audit_is_said(tmp_path, capsys):
    assert main(["--run", str(tmp_path)]) == 2
    assert "nothing to audit" in capsys.readouterr().err
