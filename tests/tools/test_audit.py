"""The audit proves a disturbed run, and names what is planted in its records."""

from __future__ import annotations

import json
import shutil

import pytest

from pipeline.config.loading import load_config
from pipeline.contract.manifest import Manifest, read_manifest
from pipeline.data.exclusion import Excluded
from pipeline.files import read_lines
from pipeline.records.rollbacks import Rollback, add_rollback, excluded_by, read_rollbacks
from pipeline.training.data.token_check import DAMAGED
from tests.conftest import run_stage, write_config
from tests.stages.training import train_and_kill
from tests.tools.recorded import Recorded
from tools.audit import audit, main


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory, encoded):
    """The folder of a run that was killed twice, over an epoch boundary, and finished on other ranks."""
    folder = tmp_path_factory.mktemp("disturbed")
    sources = [source.model_dump() for source in load_config(encoded).shard.sources]
    config = write_config(folder, encoded.parent, reuse=str(encoded.parent / "runs/mini"), shard={"sources": sources})
    settings = ["train.steps=70", "train.heldout_every=100", "train.sample_every=100", "train.deterministic=true"]
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
    assert found.checkpoints == 2 and found.tolerance > 0 and "computed on other ranks" in found.lines()[1]
    starts = [event for event in read_lines(disturbed / "train/events.jsonl") if event["event"] in ("start", "resume")]
    assert [event["deterministic"] for event in starts] == [True] * 3


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


def test_steps_that_read_a_damaged_shard_had_another_loss_once(disturbed, tmp_path):
    folder = damaged(disturbed, tmp_path,
                     lambda line: {**line, "loss": line["loss"] * (1.01 if line["restart"] else 1)})
    again = audit(folder)
    assert len(again.faults) == again.repeated > 1
    with open(folder / "train/events.jsonl", "a") as events:
        events.write(json.dumps({"event": DAMAGED, "step": 8, "first_step": 9, "set_aside": []}) + "\n")
    found = audit(folder)
    assert found.faults == [] and found.damaged == again.repeated
    assert f"{found.damaged} steps had another loss before a damaged token shard was mended" in found.lines()[0]
    lines = [json.loads(text) for text in (folder / "train/metrics.jsonl").read_text().splitlines()]
    step = next(line["step"] for line in lines if line["restart"])
    once_more = {**[line for line in lines if line["step"] == step][-1], "loss": 9.0}
    with open(folder / "train/metrics.jsonl", "a") as log:
        log.write(json.dumps(once_more) + "\n")
    assert len(audit(folder).faults) == 1, "one damage, one other loss"


def test_nothing_to_audit_is_said(tmp_path, capsys):
    assert main(["--run", str(tmp_path)]) == 2
    assert "nothing to audit" in capsys.readouterr().err


def test_rollbacks_and_skipped_updates_are_left_out_on_purpose(tmp_path, encoded):
    recorded = Recorded(tmp_path / "mini", encoded)
    assert [line["samples"] for line in recorded.lines if line["step"] == 13] == [[192, 208], [192, 224]]
    found = audit(recorded.folder)
    assert found.faults == [] and found.steps == 30 and found.samples == 32 * 16 and found.restarts == 1
    assert found.repeated == 2 + 3 + 2 and found.abandoned == 2  # steps 11 and 12, 16 to 18, 21 and 22 of the second
    assert found.left_out == [
        "samples [192, 208), by the rollback from step 13 to step 10 (a spike)",
        "samples [368, 384), by the rollback from step 23 to step 20 (a spike)",
        "samples [112, 128), whose update was skipped in step 8 (nonfinite: loss nan, gradient norm 1.0)"]
    assert "proven: every other sample was used exactly once" in found.lines()[-1]


def test_a_batch_around_excluded_samples_inside_it_is_followed(tmp_path, encoded):
    """The second spike's batch lies on both sides of the first's samples, as after a change of the batch size."""
    folder = tmp_path / "mini"
    recorded = Recorded(folder, encoded, unsound=(), spikes=(), kills=(), stop_after=0)
    add_rollback(recorded.train, Rollback(2, 0, ((20, 28),), recorded.plan, "old"))
    recorded.spikes, recorded.kills = [16], [7]
    while not recorded.attempt(12):
        pass
    recorded.write()
    assert read_rollbacks(recorded.train)[1].samples == ((16, 20), (28, 40))
    assert Excluded([(16, 40)]) == excluded_by(read_rollbacks(recorded.train), [recorded.plan])
    found = audit(folder)
    assert found.faults == [] and found.samples == 12 * 16 + 24
    assert [entry.split(",")[0] for entry in found.left_out] == ["samples [20", "samples [16"]
    assert "samples [16, 20) and [28, 40), by the rollback from step 2 to step 0" in found.left_out[1]


def test_a_run_that_was_killed_within_a_rollback_counts_only_what_still_holds(tmp_path, encoded):
    """The log ends with steps that the rollback undid; they are not lost samples, and not used ones."""
    found = audit(Recorded(tmp_path / "mini", encoded, kills=(), stop_after=23).folder)
    assert found.faults == [] and found.steps == 23
    cut = Recorded(tmp_path / "cut", encoded, kills=())
    last = next(index for index, line in enumerate(cut.lines) if line["samples"] == [352, 368]) + 1
    cut.lines, cut.checkpoints = cut.lines[:last + 1], {step: at for step, at in cut.checkpoints.items() if step <= 20}
    assert cut.lines[-1]["samples"] == [368, 384]
    for path in (cut.train / "checkpoints").glob("*"):
        shutil.rmtree(path)
    cut.write()
    found = audit(cut.folder)
    assert found.faults == [] and (found.steps, found.samples, found.abandoned) == (22, 368, 2)


def edit(recorded, step, **changes):
    """Change the last line of a step; None takes a field away."""
    line = [line for line in recorded.lines if line["step"] == step][-1]
    line.update(changes)
    for name in [name for name, value in changes.items() if value is None]:
        del line[name]


@pytest.mark.parametrize("plant, expected", [
    (lambda run: edit(run, 13, left_out=None), "step 13 used samples [192, 208), which a rollback excludes"),
    (lambda run: edit(run, 13, left_out=[[192, 210]]), "step 13 passed over samples [208, 210), which no rollback"),
    (lambda run: edit(run, 5, left_out=[[64, 66]]), "step 5 passed over samples [64, 66), which no rollback"),
    (lambda run: edit(run, 14, samples=[192, 208]), "samples [192, 208) were used again in step 14"),
    (lambda run: edit(run, 12, samples=[160, 176]), "step 12 was done twice with different samples"),
    (lambda run: edit(run, 12, loss=1.0), "step 12 was done twice with different loss"),
    (lambda run: edit(run, 17, left_out=[[260, 261]]), "step 17 was done twice with different left_out"),
    (lambda run: edit(run, 8, skipped=None), "step 8 counts as an update, with loss nan"),
    (lambda run: edit(run, 9, skipped="spike"), "checkpoint step-00000010 counts 1 skipped updates, the log 2"),
    (lambda run: (run.train / "rollbacks.json").unlink(), "was done after 1 rollbacks, rollbacks.json has 0"),
])
def test_planted_faults_around_rollbacks_are_named(tmp_path, encoded, plant, expected, capsys):
    recorded = Recorded(tmp_path / "mini", encoded)
    plant(recorded)
    recorded.write()
    assert main(["--run", str(recorded.folder)]) == 1
    assert expected in capsys.readouterr().out


GPU = {"ranks": 1, "device": "NVIDIA H100 80GB HBM3"}
"""Where the attempts of older runs were; newer ones say also whether they were deterministic."""


@pytest.mark.parametrize("place, factor, allowed", [
    ({"ranks": 1}, 1 + 1e-12, "0"),
    ({"ranks": 1, "device": "cpu"}, 1 + 1e-12, "0"),
    ({"ranks": 1, "device": "cpu", "deterministic": True}, 1 + 1e-12, "0"),
    ({**GPU, "deterministic": True}, 1 + 1e-12, "0"),
    ({**GPU, "deterministic": False}, 1.02, "1e-02"),
    (GPU, 1.02, "1e-02"),
])
def test_a_repeated_step_must_be_as_equal_as_the_device_makes_it(tmp_path, encoded, place, factor, allowed):
    recorded = Recorded(tmp_path / "mini", encoded)
    recorded.place = place
    recorded.write()
    assert audit(recorded.folder).faults == []
    edit(recorded, 12, loss=next(line for line in recorded.lines if line["step"] == 12)["loss"] * factor)
    recorded.write()
    found = audit(recorded.folder)
    assert found.tolerance == float(allowed) and "step 12 was done twice with different loss" in found.faults[0]


@pytest.mark.parametrize("place", [{**GPU, "deterministic": False}, GPU])
def test_repeated_steps_on_a_device_that_is_not_deterministic_are_no_faults(tmp_path, encoded, place):
    recorded = Recorded(tmp_path / "mini", encoded)
    recorded.place = place
    edit(recorded, 12, loss=next(line for line in recorded.lines if line["step"] == 12)["loss"] / 1.004)
    recorded.write()
    found = audit(recorded.folder)
    assert found.faults == [] and found.largest == pytest.approx(0.004)
    assert found.lines()[-2] == ("repeated steps: not deterministic on this device (NVIDIA H100 80GB HBM3; "
                                 "train.deterministic=true makes it so); their losses differ by at most 4.0e-03 of the "
                                 "loss (1e-02 is allowed)")
    assert found.lines()[-1].endswith("repeated steps gave the same loss, within 1e-02")


def test_an_attempt_on_a_cpu_that_says_so_is_as_one_before_that_did_not(tmp_path, encoded):
    recorded = Recorded(tmp_path / "mini", encoded)
    recorded.place = {"ranks": 1, "device": "cpu"}
    recorded.write()
    path = recorded.train / "events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    events[-1]["deterministic"] = True
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    assert audit(recorded.folder).tolerance == 0.0


@pytest.mark.parametrize("name, counted, logged", [("skipped", 3, 1), ("rollbacks", 1, 2), ("samples", 500, 512)])
def test_counts_of_the_manifest_are_compared(tmp_path, encoded, name, counted, logged):
    recorded = Recorded(tmp_path / "mini", encoded)
    counts = {"samples": 512, "skipped": 1, "rollbacks": 2}
    Manifest("train", {}, [], counts, "").write(recorded.train)
    assert audit(recorded.folder).faults == [] and read_manifest(recorded.train) is not None
    Manifest("train", {}, [], {**counts, name: counted}, "").write(recorded.train)
    fault, = audit(recorded.folder).faults
    assert f"counts {counted} " in fault and fault.endswith(f"the log {logged}")
