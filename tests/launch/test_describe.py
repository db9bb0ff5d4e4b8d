"""What the plan says of phases and the disk before anything starts, and what is refused before a job queues."""

import json
from types import SimpleNamespace

import pytest
import yaml

from drover.launch.checks import _refuse_plan
from drover.launch.describe import consumption_lines, training_facts
from drover.pipeline.config.loading import load_config
from drover.pipeline.contract.manifest import Manifest
from drover.pipeline.contract.run import Run
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import write_json
from drover.pipeline.records.checkpoints import TrainingProgress
from tests.refusal import refused, table

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
        Manifest("encode", {"config": run._settings("encode")}, [], counts, "").write(run.folder / "encode")
    return run


def test_the_plan_shows_phases_and_sources(tmp_path):
    said = consumption_lines(run_of(tmp_path))
    assert said[0] == "data      phase 1: steps 1 to 10, 10.24k tokens, 16 sequences of 64 a step"
    assert "          phase 2: steps 11 to 15, 20.48k tokens, 32 sequences of 128 a step" in said
    assert any(line.startswith("            code: 10.") and "%) from 5.001k, 2." in line for line in said), said


def test_before_encode_the_plan_shows_phases_alone(tmp_path):
    run = run_of(tmp_path, counts=None)
    said = consumption_lines(run)
    assert said[0].startswith("data      phase 1: steps 1 to 10") and "known once encode is done" in said[-1]
    assert consumption_lines(run_of(tmp_path, counts=None, phases=[])) == [
        "data      tokens and epochs of each source are known once encode is done"]
    first, second, length, *_ = training_facts(run.config, SimpleNamespace(ranks=2))
    assert first.endswith("2 ranks x micro-batch 2 x 4 accumulated (phase 1)") and second.endswith("(phase 2)")
    assert length == "length    15 steps = 30,720 tokens"
    assert consumption_lines(run_of(tmp_path, phases=[], steps=300)) == [
        "data      all sources: 307.2k tokens from 105k, 2.93 epochs"]


def test_tokens_of_text_that_has_changed_are_not_shown_as_those_of_the_new(tmp_path):
    run = run_of(tmp_path, phases=[], steps=300, max_epochs=2)
    refused(UserError, "max_epochs", _refuse_plan, run, forced=False)
    changed = Manifest("encode", {"config": {"encode": {"shard_mb": 1}}}, [], COUNTS, "")
    changed.write(run.folder / "encode")
    assert consumption_lines(run) == ["data      tokens and epochs of each source are known once encode is done"]
    _refuse_plan(run, forced=False)


def test_the_plan_leaves_what_a_packing_takes_to_training(tmp_path):
    [said] = consumption_lines(run_of(tmp_path, phases=[], packing="best_fit", steps=10, mixture={"web": 9, "code": 1}))
    assert said == "data      tokens and epochs of each source are known once training has planned the packing"


@pytest.mark.parametrize(("train", "encoded", "source"), table(r"""
    {steps: 24000} -> true -> all sources: 234.
    {steps: 24000, max_epochs: {}} -> true -> all sources: 234.
    {steps: 24000, packing: best_fit} -> true -> all sources: 234.
    {steps: 100, packing: best_fit, mixture: {web: 1, code: 1}} -> true -> code: 10.
    {steps: 1600, mixture: {web: 1, code: 1}} -> true -> code: 164.
    {phases: [{until: 10240}, {until: 51200, mixture: {web: 0, code: 1}}]} -> true -> code: 8.3
    {steps: 24000, max_epochs: {code: 300}, mixture: {web: 1, code: 0}} -> true -> web: 245.8
    {steps: 300} -> true -> null
    {steps: 300} -> false -> null
    {steps: 24000, max_epochs: 300} -> true -> null
    {steps: 24000, max_epochs: {code: 300}} -> true -> null
    {steps: 24000, max_epochs: 300} -> false -> null""", yaml.safe_load, json.loads, str))
def test_the_plan_warns_of_many_epochs_that_no_setting_allows(tmp_path, train, encoded, source):
    lines = consumption_lines(run_of(tmp_path, COUNTS if encoded else None, **{"phases": [], **train}))
    warnings = [line for line in lines if "warning" in line]
    assert [f" warning: {source}" in line and "epochs. Beyond 4 epochs" in line for line in warnings[:1]] == [
        True] * (source != "null"), "the source that repeats most comes first"


def test_a_source_shorter_than_a_sequence_is_refused_before_the_job_queues_unless_it_is_packed(tmp_path):
    tiny = {"splits": {"train": {"web": {"tokens": 40}, "code": {"tokens": 20}}, "validation": {}}}
    refused(UserError, r"so few training tokens do not fill one of 64 .* lower train.sequence_length",
            _refuse_plan, run_of(tmp_path, tiny, phases=[], steps=2), forced=False)
    packed = run_of(tmp_path, tiny, phases=[], steps=2, packing="best_fit")
    _refuse_plan(packed, forced=False)
    assert "packing" in consumption_lines(packed)[0]


def test_too_many_epochs_are_refused_before_the_job_queues(tmp_path):
    refused(UserError, r"train\.max_epochs allows 2 of code, and the plan takes 2\.[01]",
            _refuse_plan, run_of(tmp_path, max_epochs=2), forced=False)
    _refuse_plan(run_of(tmp_path, max_epochs=3), forced=False)


@pytest.mark.parametrize("before, now, grain, samples, accepted, said", table(r"""
    [{until: 5120}, {until: 20480}] -> [{until: 5120}, {until: 40k}] -> null -> 128 -> true -> train.phases[1].until
    [{until: 10240}] -> [{until: 10240, batch_tokens: 2048}] -> null -> 128 -> false -> phases\[0\].batch_tokens: 1024
    [] -> [{until: 10240}, {until: 40960}] -> 64 -> 128 -> true -> train.phases[1] was added (phase 2
    [] -> [{until: 10240, batch_tokens: 2048}] -> 64 -> 128 -> false -> train.phases\[0\].batch_tokens: 1024 .. 2048
    [] -> [{until: 20480, mixture: {web: 1, code: 1}}] -> 64 -> 128 -> false -> phases\[0\].mixture: None .. {
    [] -> [{until: 20480, lr: 0.1}] -> 64 -> 128 -> false -> train.phases\[0\].lr: None .. 0.1
    [] -> [{until: 5120}] -> 64 -> 128 -> false -> until: step 40 .. 5.12k
    [] -> [{until: 20480, sequence_length: 128}] -> null -> 128 -> false -> of 64 tokens, and would now .* chunks of 128
    [] -> [{until: 40960}] -> 64 -> 160 -> false -> 160 samples were used; with train.phases from the start .* be 128
    [{until: 20480}] -> [] -> null -> 128 -> true -> train.steps
    [{until: 20480, batch_tokens: 2048}] -> [] -> null -> 128 -> false -> train.batch_tokens: 2048 .. 1024
    [{until: 20480, lr: 0.1}] -> [] -> null -> 128 -> false -> train.lr: 0.1 .. 0.003
    [{until: 4096}, {until: 20480}] -> [] -> null -> 128 -> false -> train.phases\[1\] is gone""",
    *[yaml.safe_load] * 5))
def test_another_past_is_refused_before_the_job_queues(tmp_path, before, now, grain, samples, accepted, said, capsys):
    """A training without phases is one phase."""
    def of(phases, grain=None):
        return run_of(tmp_path, phases=phases, grain_tokens=grain, **({} if phases else {"steps": 40}))

    past = of(before)
    write_json(past.folder / "train/checkpoints/step-00000008/COMPLETE.json", {
        "format": 2, "progress": vars(TrainingProgress(step=8, samples=samples)), "files": [],
        "config": past.config.model_dump(mode="json")})
    if not accepted:
        refused(UserError, said, _refuse_plan, of(now, grain), forced=False)
    _refuse_plan(of(now, grain), forced=not accepted)
    assert not accepted or f"plan changed after step 8: {said}" in capsys.readouterr().out


def test_an_end_before_the_newest_checkpoint_is_refused_before_the_job_queues(tmp_path):
    shorter = run_of(tmp_path, phases=[], steps=6)
    write_json(shorter.folder / "train/checkpoints/step-00000008/COMPLETE.json", {
        "format": 2, "progress": vars(TrainingProgress(step=8)), "files": []})
    refused(UserError, "This run is at step 8 already, beyond train.steps 6", _refuse_plan, shorter, forced=False)
    _refuse_plan(shorter, forced=True)
