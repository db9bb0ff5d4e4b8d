"""The audit proves a disturbed run, and names what is planted in its records."""

import json
import shutil
from dataclasses import replace

import pytest

from drover.pipeline.contract.manifest import Manifest
from drover.pipeline.contract.run import run_in
from drover.pipeline.core.files import append_line, output_record
from drover.pipeline.records.metrics import Rollback, add_rollback
from drover.pipeline.training.data import DAMAGED
from drover.tools.audit import audit, main
from tests.refusal import printed, table
from tests.tools.recorded import Recorded


@pytest.fixture
def recorded(tmp_path, encoded):
    """A run that left out two batches, skipped an update and was killed once; the test may change its records."""
    return Recorded(tmp_path / "mini", encoded)


def written(recorded, *events):
    """Write the records, and these events after the others."""
    recorded.write()
    for event in events:
        append_line(recorded.train / "events.jsonl", event)
    return recorded.folder


def lines_of(recorded, step):
    return [line for line in recorded.lines if line["step"] == step]


def edit(recorded, step, **changes):
    """Change the last line of a step; None takes a field away."""
    line = lines_of(recorded, step)[-1]
    line.update(changes)
    for name in [name for name, value in changes.items() if value is None]:
        del line[name]


def test_rollbacks_and_skipped_updates_are_left_out_on_purpose(recorded):
    assert [line["samples"] for line in lines_of(recorded, 13)] == [[192, 208], [192, 224]]
    result = audit(recorded.folder)
    assert result.faults == []
    assert (result.steps, result.samples, result.restarts, result.checkpoints) == (30, 512, 1, 6)
    assert result.repeated == 2 + 3 + 2 and result.abandoned == 2  # steps 11 and 12, 16 to 18, 21 and 22 of the second
    assert result.left_out == [
        "samples [192, 208), by the rollback from step 13 to step 10 (a spike)",
        "samples [368, 384), by the rollback from step 23 to step 20 (a spike)",
        "samples [112, 128), whose update was skipped in step 8 (nonfinite: loss nan, gradient norm 1.0)"]
    assert "2 undone by rollbacks" in result.lines()[0]
    assert "proven: every other sample was used exactly once" in result.lines()[-1]


@pytest.mark.parametrize(("step", "changes", "expected"), table("""
    20 -> {"samples": [323, 336]} -> samples [320, 323) were lost before step 20
    20 -> {"samples": [315, 336]} -> samples [315, 320) were used again in step 20
    14 -> {"samples": [192, 208]} -> samples [192, 208) were used again in step 14
    30 -> {"samples": [496, 600]} -> checkpoint step-00000030 counts 512 samples, the log 600
    13 -> {"left_out": null} -> step 13 used samples [192, 208), which a rollback excludes
    13 -> {"left_out": [[192, 210]]} -> step 13 passed over samples [208, 210), which no rollback
    12 -> {"samples": [160, 176]} -> step 12 was done twice with different samples
    12 -> {"loss": "nan"} -> step 12 was done twice with different loss
    12 -> {"skipped": "spike"} -> step 12 was done twice with different skipped
    17 -> {"left_out": [[260, 261]]} -> step 17 was done twice with different left_out
    8 -> {"skipped": null} -> step 8 counts as an update, with loss nan
    9 -> {"grad_norm": "inf"} -> step 9 counts as an update, with loss
    9 -> {"skipped": "spike"} -> checkpoint step-00000010 counts 1 skipped updates, the log 2""", int, json.loads))
def test_planted_faults_are_named(recorded, step, changes, expected, capsys):
    edit(recorded, step, **changes)
    assert main(["--run", str(written(recorded)), "--json"]) == 1
    assert any(expected in fault for fault in json.loads(capsys.readouterr().out)["faults"])


def test_a_lost_line_and_lost_rollbacks_are_named(recorded):
    recorded.lines.remove(lines_of(recorded, 7)[0])
    (recorded.train / "rollbacks.json").unlink()
    faults = "\n".join(audit(written(recorded)).faults)
    assert "no line for the steps 7 to 7 " in faults and "was done after 1 rollbacks, rollbacks.json has 0" in faults


def test_steps_that_read_a_damaged_shard_had_another_loss_once(recorded):
    seen = {}
    for line in recorded.lines:
        if seen.setdefault(line["step"], line)["samples"] == line["samples"] and line is not seen[line["step"]]:
            line["loss"] *= 1.01
        seen[line["step"]] = line
    again = audit(written(recorded))
    assert len(again.faults) == again.repeated == 7
    damaged = {"event": DAMAGED, "step": 15}
    result = audit(written(recorded, damaged))
    assert result.damaged == 5 and ["step 11 " in fault or "step 12 " in fault for fault in result.faults] == [True] * 2
    assert "5 with another loss before a damaged token shard was repaired" in result.lines()[0]
    recorded.lines.append({**lines_of(recorded, 16)[-1], "loss": 9.0})
    result = audit(written(recorded, damaged))
    assert any("step 16 was done twice with different loss" in fault for fault in result.faults), "one damage, one loss"


@pytest.mark.parametrize("file", ["metrics.jsonl", "events.jsonl"])
def test_a_log_that_is_not_what_was_committed_is_named(recorded, file):
    """Consistent in itself, so that only records of others show it; also where the stage's own record fits to it."""
    folder, run = written(recorded), run_in(recorded.folder)
    inputs = {stage: run.finished(stage).digest for stage in ("encode", "tokenizer")}
    train = Manifest("train", {"inputs": inputs}, [output_record(recorded.train, recorded.train / file)], {}, "")
    train.write(recorded.train)
    Manifest("convert", {"inputs": {"train": train.digest}}, [], {}, "").write(folder / "convert")
    assert not audit(folder).faults
    with open(recorded.train / file, "ab") as log:
        log.write(b'{"torn')
    assert f"{file} has " in audit(folder).faults[0]
    replace(train, outputs=[output_record(recorded.train, recorded.train / file)]).write(recorded.train)
    assert audit(folder).faults == ["the stage train: its outputs are not those that convert was made from"]


def test_a_run_without_steps_is_refused(tmp_path, capsys):
    (tmp_path / "config.yaml").touch()
    assert "nothing to audit" in printed(capsys, main, "--run", tmp_path, expect=2)


def test_a_batch_around_excluded_samples_inside_it_is_followed(tmp_path, encoded):
    """The second spike's batch lies on both sides of the first's samples, as after a change of the batch size."""
    recorded = Recorded(tmp_path / "mini", encoded, unsound=(), spikes=(), kills=(), stop_after=0)
    add_rollback(recorded.train, Rollback(2, 0, ((20, 28),), recorded.plan, "old"))
    recorded.spikes, recorded.kills = [16], [7]
    while not recorded.attempt(12):
        pass
    result = audit(written(recorded))
    assert result.faults == [] and result.samples == 12 * 16 + 24
    assert result.left_out == [f"samples {samples}, by the rollback from step 2 to step 0 ({why})" for samples, why in (
        ("[20, 28)", "old"), ("[16, 20) and [28, 40)", "a spike"))]


def test_a_run_that_was_killed_within_a_rollback_counts_only_what_still_holds(recorded):
    """The log ends with steps that the rollback undid; they are not lost samples, and not used ones."""
    last = next(index for index, line in enumerate(recorded.lines) if line["samples"] == [368, 384])
    recorded.lines = recorded.lines[:last + 1]
    recorded.checkpoints = {step: at for step, at in recorded.checkpoints.items() if step <= 20}
    shutil.rmtree(recorded.train / "checkpoints")
    result = audit(written(recorded))
    assert result.faults == [] and (result.steps, result.samples, result.abandoned) == (22, 368, 2)


GPU = {"ranks": 1, "device": "NVIDIA H100 80GB HBM3", "deterministic": False}
"""Where attempts were."""


def test_losses_of_repeated_steps_may_differ_by_what_is_allowed(recorded):
    loss = lines_of(recorded, 12)[0]["loss"]
    edit(recorded, 12, loss=loss * (1 + 1e-12))
    assert "step 12 was done twice with different loss" in audit(written(recorded)).faults[0]
    recorded.place = GPU
    edit(recorded, 12, loss=loss / 1.004)
    result = audit(written(recorded))
    assert result.faults == [] and result.largest == pytest.approx(0.004)
    assert result.lines()[-2] == ("repeated steps: not deterministic on this device (NVIDIA H100 80GB HBM3; "
                                 "train.deterministic=true makes it so); their losses differ by at most 4.0e-03 of the "
                                 "loss (1e-02 is allowed)")


@pytest.mark.parametrize("name, counted, logged", [("skipped", 3, 1), ("rollbacks", 1, 2), ("samples", 500, 512)])
def test_counts_of_the_manifest_are_compared(recorded, name, counted, logged):
    Manifest("train", {}, [], {"samples": 512, "skipped": 1, "rollbacks": 2, name: counted}, "").write(recorded.train)
    fault, = audit(recorded.folder).faults
    assert f"counts {counted} " in fault and fault.endswith(f"the log {logged}")
