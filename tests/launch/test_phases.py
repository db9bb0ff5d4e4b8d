"""What the launcher says of phases before anything starts, and what it refuses before a job queues."""

import json
from types import SimpleNamespace

import pytest

from drover.launch.checks import _refuse_plan
from drover.launch.describe import consumption_lines, training_facts
from drover.launch.forecast import shape_of, training_flops
from drover.pipeline.config.loading import load_config
from drover.pipeline.contract.manifest import Manifest
from drover.pipeline.contract.run import Run
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import write_json
from drover.pipeline.records.checkpoints import TrainingProgress
from tests.refusal import refused

PHASES = [{"until": 10_240}, {"until": 30_720, "sequence_length": 128, "batch_tokens": 4096,
                              "mixture": {"web": 1, "code": 1}}]
COUNTS = {"splits": {"train": {"web": {"tokens": 100_001}, "code": {"tokens": 5001}}, "validation": {}}}


def run_of(folder, counts=COUNTS, **train):
    """A run whose encode stage has counted so many tokens."""
    (folder / "c.yaml").write_text("""
name: made
shard: {sources: [{kind: files, name: web, paths: [x.txt]}, {kind: files, name: code, paths: [x.txt]}]}
tokenizer: {vocab_size: 768}
train: {sequence_length: 64, batch_tokens: 1024, warmup_steps: 0, micro_batch: 2}
""")
    run = Run(load_config(folder / "c.yaml", [f"runs_dir={folder}/runs", *(
        f"train.{name}={json.dumps(value)}" for name, value in {"phases": PHASES, **train}.items())]))
    if counts is not None:
        (run.folder / "encode").mkdir(parents=True, exist_ok=True)
        Manifest("encode", {"config": {}, "inputs": {}, "files": {}}, [], counts, "").write(run.folder / "encode")
    return run


def test_the_plan_is_told_by_phase_and_source(tmp_path):
    said = consumption_lines(run_of(tmp_path))
    assert said[0] == "data      phase 1: steps 1 to 10, 10.24k tokens, 16 sequences of 64 a step"
    assert "          phase 2: steps 11 to 15, 20.48k tokens, 32 sequences of 128 a step" in said
    assert any(line.startswith("            code: 10.") and "of 5.001k, 2." in line for line in said), said


def test_before_encode_the_phases_are_told(tmp_path):
    run = run_of(tmp_path, counts=None)
    said = consumption_lines(run)
    assert said[0].startswith("data      phase 1: steps 1 to 10") and "known once encode is done" in said[-1]
    assert consumption_lines(run_of(tmp_path, counts=None, phases=[])) == []
    first, second, length, *_ = training_facts(run.config, SimpleNamespace(ranks=2))
    assert first.endswith("2 ranks x micro-batch 2 x 4 accumulated (phase 1)") and second.endswith("(phase 2)")
    assert length == "length    15 steps = 30,720 tokens"
    shape = shape_of(run.config)
    assert training_flops(run.config) == 10_240 * shape.flops_per_token(64, causal=False) + \
        20_480 * shape.flops_per_token(128, causal=False)


def test_what_a_packing_takes_is_left_to_training_to_tell(tmp_path):
    [said] = consumption_lines(run_of(tmp_path, phases=[], packing="best_fit", steps=10, mixture={"web": 9, "code": 1}))
    assert said == "data      tokens and epochs of each source are known once training has planned the packing"


def test_too_many_epochs_are_refused_before_the_job_queues(tmp_path):
    refused(UserError, r"train\.max_epochs allows 2 of code, and the plan takes 2\.[01]",
            _refuse_plan, run_of(tmp_path, max_epochs=2), forced=False)
    _refuse_plan(run_of(tmp_path, max_epochs=3), forced=False)


def write_checkpoint(run, **progress):
    """The marker of a checkpoint that the run wrote after some steps."""
    write_json(run.folder / f"train/checkpoints/step-{progress['step']:08d}/COMPLETE.json", {
        "format": 2, "progress": vars(TrainingProgress(**progress)), "files": [],
        "config": run.config.model_dump(mode="json")})


def test_another_past_is_refused_before_the_job_queues(tmp_path, capsys):
    write_checkpoint(run_of(tmp_path), step=12, samples=224)
    other = run_of(tmp_path, phases=[{"until": 10_240, "batch_tokens": 2048}, PHASES[1]])
    refused(UserError, r"train\.phases\[0\]\.batch_tokens: 1024 -> 2048", _refuse_plan, other, forced=False)
    _refuse_plan(other, forced=True)
    _refuse_plan(run_of(tmp_path, phases=[*PHASES, {"until": "40k"}]), forced=False)
    assert "plan changed after step 12: train.phases[2] was added (phase 3" in capsys.readouterr().out


@pytest.mark.parametrize(("before", "now", "said"), [
    ([], PHASES, ""),
    ([], [{"until": 10_240, "batch_tokens": 2048}], r"train\.phases\[0\]\.batch_tokens: 1024 -> 2048"),
    ([], [{"until": 20_480, "mixture": {"web": 1, "code": 1}}], r"train\.phases\[0\]\.mixture: None -> \{"),
    ([], [{"until": 20_480, "lr": 0.1}], r"train\.phases\[0\]\.lr: None -> 0\.1"),
    ([], [{"until": 5120}, PHASES[1]], r"phases\[0\]\.until is 5\.12k, after step 5; it was step 40, and step 8 of it"),
    ([], [{"until": 20_480}, PHASES[1]], "cut into chunks of 64 tokens, and would now be cut into chunks of 128"),
    ([{"until": 20_480}], [], ""),
    ([{"until": 20_480, "batch_tokens": 2048}], [], r"train\.batch_tokens: 2048 -> 1024"),
    ([{"until": 20_480, "lr": 0.1}], [], r"train\.lr: 0\.1 -> 0\.003"),
    ([{"until": 4096}, {"until": 20_480}], [], r"train\.phases\[1\] has begun and is gone")])
def test_a_training_without_phases_is_one_phase(tmp_path, before, now, said, capsys):
    def of(phases, grain=None):
        return run_of(tmp_path, phases=phases, grain_tokens=grain, **({} if phases else {"steps": 40}))
    write_checkpoint(of(before), step=8, samples=128)
    if said:
        refused(UserError, said, _refuse_plan, of(now), forced=False)
        return
    _refuse_plan(of(now, 64 if now else None), forced=False)
    assert "plan changed after step 8: train." in capsys.readouterr().out


def test_phases_are_refused_where_their_samples_would_not_follow_those_used(tmp_path):
    write_checkpoint(run_of(tmp_path, phases=[], steps=40), step=8, samples=160)
    refused(UserError, "160 samples were used; with train.phases from the start it would be 128", _refuse_plan,
            run_of(tmp_path, grain_tokens=64), forced=False)
    _refuse_plan(run_of(tmp_path, phases=[], steps=50), forced=False)
