"""Phases as they are written, and what follows: steps, checks of each, learning rates, and what of them is past."""

import pytest

from drover.pipeline.config.checks import problems, rank_problems
from drover.pipeline.config.loading import dump_config, load_config
from drover.pipeline.config.phases import PhasePlan, only_phases_differ, with_largest
from drover.pipeline.config.training import TrainConfig, read_tokens, tokens_text
from drover.pipeline.contract.run import Run
from drover.pipeline.contract.stages import STAGES
from drover.pipeline.training.checkpoints import plan_changes
from drover.pipeline.training.optimizers import planned_rate
from tests.config.files import refusal
from tests.refusal import table

SOURCES = {"sources": [{"kind": "files", "name": name, "paths": ["x.txt"]} for name in ("web", "code")]}
PHASES = [{"until": "10k", "batch_tokens": 2048}, {"until": "40k", "sequence_length": 128, "batch_tokens": 4096},
          {"until": 65_000, "mixture": {"web": "1B", "code": "3B"}, "lr_end": 0}]

SHORT = {"sequence_length": 64, "warmup_steps": 0}


@pytest.fixture
def load(written):
    """Function: the configuration with these settings of train."""
    return lambda train: load_config(written({"shard": SOURCES, "model": {"context_length": 256}, "train": train}))


def plan(phases, **train):
    return PhasePlan.of(TrainConfig.model_validate(
        {"sequence_length": 64, "batch_tokens": 1024, "phases": phases, **train}))


@pytest.mark.parametrize(("text", "tokens"), table("""
    250M -> 250_000_000
    2.5k -> 2500
    10B -> 10_000_000_000
    15T -> 15_000_000_000_000
    1_000 -> 1000
    7 -> 7
    0.3K -> 300
    4 M -> 4_000_000
    0.1B -> 100_000_000""", str, int))
def test_tokens_as_people_write_them(text, tokens):
    for given in (text, float(tokens)):
        assert read_tokens(given) == tokens and isinstance(read_tokens(given), int)
    assert read_tokens(tokens_text(tokens)) == tokens


def test_steps_follow_from_phases_and_a_loaded_configuration_loads_back(load, tmp_path):
    config = load({**SHORT, "phases": PHASES})
    first, second, third = PhasePlan.of(config.train).phases
    assert (first.steps, first.tokens) == (5, 10_240), "rounded up to whole steps"
    assert (second.first_step, second.first_token, second.steps) == (5, 10_240, 8)
    assert third.train.batch_tokens == 16384 and third.steps == 2 and config.train.steps == 15
    assert PhasePlan.of(config.train).sequences_between(3, 14) == 10 * 32 + 256
    assert third.train.mixture == {"web": 1e9, "code": 3e9} and third.train.phases == []
    (tmp_path / "again.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "again.yaml") == config
    assert load_config("a.yaml", ["train.batch_tokens=4096"], base=config).train.steps == 19, "as if read from the file"
    assert load({"steps": None, **SHORT, "phases": PHASES}) == config
    assert str(first) == "phase 1: steps 1 to 5, 10.24k tokens, 32 sequences of 64 a step"


def test_all_problems_of_all_phases_come_at_once(written):
    message = refusal(written("""
shard:
  sources: [{kind: files, name: web, paths: [x.txt]}, {kind: files, name: code, paths: [x.txt]}]
  filters: [{kind: c4, sources: [web]}, {kind: repetition, sources: [books]}]
model: {context_length: 256}
parallel: {tp: 64}
train:
  sequence_length: 64
  warmup_steps: 0
  batch_tokens: 1024
  packing: best_fit
  grain_tokens: 512
  max_epochs: {wob: 1, web: 2}
  phases:
    - {until: 10k, mixture: {web: 0, code: 0}}
    - {until: 9k, sequence_length: 512, batch_tokens: 1000}
    - {until: 90k, sequence_length: 96, batch_tokens: 960, mixture: {web: 1, books: 2}, schedule: constant, lr_end: 0}
    - {until: 100k, warmup_steps: 500, mixture: {web: 1, code: 1e-7}}
"""))
    for expected in """
train.grain_tokens is for train.phases with train.packing 'concatenate'
train.phases[0]: train.mixture needs shares with a sum above 0
train.phases[1].until 9k is not after 10.24k
train.phases[1]: train.sequence_length 512 is longer than model.context_length 256
train.phases[1]: train.batch_tokens 1000 is not a multiple of train.sequence_length 512
train.phases[2]: train.sequence_length 96 is not divisible by parallel.tp 64
train.phases[2]: train.mixture names books, but the sources are web, code
train.phases[2]: train.mixture lacks code of the sources
train.phases[2] has an lr_end, but its schedule is constant
train.phases[3].warmup_steps 500 is more than its 9 steps
train.phases[3]: train.mixture gives the source code 1e-07
train.max_epochs names wob
shard.filters: the filter repetition names books, but the sources are web, code""".splitlines():
        assert expected in message, message
    assert message.count("model.heads") == 1, "what phases share is said once"


def test_ranks_are_checked_against_every_phase(load):
    config = load({**SHORT, "batch_tokens": 1024, "micro_batch": 2, "phases": [
        {"until": "10k"}, {"until": "20k", "sequence_length": 256, "batch_tokens": 1536}]})
    assert rank_problems(config, 1) == [] and not problems(config)
    assert with_largest(config, 1).train.sequence_length == 256, "with the most tokens at once"
    [message] = rank_problems(config, 4)
    assert message.startswith("train.phases[1]: the global batch of 6 sequences") and "not divisible by 4" in message
    zero = config.model_copy(update={"parallel": config.parallel.model_copy(update={"engine": "deepspeed"})})
    [message] = rank_problems(zero, 1)
    assert "the same number of micro-batches in every step, and in train.phases they are 8, 3" in message


def test_a_phase_that_speaks_of_its_rate_begins_a_curve():
    phases = plan([{"until": 10_240}, {"until": 20_480}, {"until": 30_720, "lr_end": 0},
                   {"until": 40_960, "lr": 0.002, "warmup_steps": 4}, {"until": 51_200, "schedule": "cosine"}],
                  lr=0.01, warmup_steps=2, min_lr_share=0.5)
    rates = [planned_rate(step, phases) for step in range(phases.steps)]
    own = TrainConfig(steps=20, lr=0.01, warmup_steps=2, min_lr_share=0.5)
    assert rates[:20] == [planned_rate(step, PhasePlan.of(own)) for step in range(20)] and rates[19] == 0.005
    assert rates[20] == 0.005 and rates[29] == 0 and rates[24] == pytest.approx(0.005 * 5 / 9)
    assert rates[30:34] == [0.0005, 0.001, 0.0015, 0.002] and set(rates[34:40]) == {0.002}
    assert rates[40] == 0.002 and rates[49] == pytest.approx(0.001) and rates[40:] == sorted(rates[40:], reverse=True)


def test_phases_that_are_gone_and_other_chunks_are_changes_to_the_past():
    two = [{"until": 10_240, "mixture": {"web": 1}}, {"until": 20_480}]
    longer = [*two, {"until": 90_000, "sequence_length": 256}]

    def changes(phases, **train):
        return [text for has_started, text in plan_changes(plan(two), plan(phases, **train), 15) if has_started]
    assert changes(two[:1])[0].startswith("train.phases[1] is gone (phase 2")
    assert "set train.grain_tokens to 64" in changes(longer)[0] and changes(longer, grain_tokens=64) == []


def test_other_phases_alone_need_no_force(load):
    def train_of(phases, encoded="a", **more):
        config = Run(load({**SHORT, "phases": phases, **more}))._settings("train")
        return {"config": config, "inputs": {"encode": encoded}}
    old, shorter = train_of(PHASES), train_of(PHASES[:2])
    assert only_phases_differ(old, shorter) and STAGES["train"].may_renew(old, shorter)
    for other in (train_of(PHASES, lr=0.1), train_of(PHASES[:2], "b"), train_of([])):
        assert not only_phases_differ(old, other)
