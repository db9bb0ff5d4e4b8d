"""The batch that is shown is the one that is planned, for every way to spread it over ranks. That its samples are
trained on once, tests/stages/test_elastic.py shows."""


import pytest
import yaml

from drover.model.config import ModelConfig
from drover.pipeline.config.checks import rank_problems
from drover.pipeline.config.loading import load_config
from drover.pipeline.config.phases import BatchPlan, in_phases
from drover.pipeline.config.training import ParallelConfig, TrainConfig
from drover.pipeline.config.tree import Config
from tests.conftest import REPOSITORY
from tests.refusal import table

MODEL = ModelConfig(dim=64, layers=2, heads=8, kv_heads=8, vocab_size=512, context_length=64)
LENGTH, SEQUENCES = 32, 48


@pytest.mark.parametrize(("parallel", "ranks", "at_most", "sequences", "expected"), table("""
    {} -> 1 -> 5 -> 48 -> 4
    {} -> 1 -> 100 -> 7 -> 7
    {} -> 1 -> 5 -> 7 -> 1
    {} -> 4 -> 100 -> 30 -> 0
    {dp_replicate: 2} -> 4 -> 5 -> 48 -> 4
    {tp: 2} -> 4 -> 16 -> 48 -> 12
    {cp: 2, tp: 2} -> 8 -> 16 -> 30 -> 15
    {pp: 2} -> 4 -> 100 -> 48 -> 12
    {pp: 3, cp: 2} -> 6 -> 100 -> 7 -> 1
    {pp: 2, tp: 2} -> 24 -> 100 -> 6 -> 0
    {pp: 2, pp_schedule: interleaved} -> 2 -> 100 -> 30 -> 15
    {pp: 4, pp_schedule: interleaved} -> 4 -> 100 -> 48 -> 12
    {pp: 4, pp_schedule: interleaved} -> 4 -> 100 -> 30 -> 0""", yaml.safe_load, *[int] * 4), ids=str)
def test_the_largest_micro_batch_that_fits_is_taken(parallel, ranks, at_most, sequences, expected):
    """It divides a rank's sequences, and leaves a pipeline its micro-batches. 0: there is none."""
    settings = Config(model=MODEL, parallel=ParallelConfig(**parallel), train=TrainConfig(
        sequence_length=LENGTH, micro_batch=at_most, batch_tokens=LENGTH * sequences))
    assert bool(rank_problems(settings, ranks)) == (not expected)
    if expected:
        plan = BatchPlan.of(settings.train, settings.parallel, ranks)
        assert plan.micro_batch == expected
        assert plan.data_ranks * plan.micro_batch * plan.accumulation == sequences


RECIPES = table("""
    demo -> 2
    phases_demo -> 2
    shakespeare_char -> 1
    shakespeare_char_gpu -> 1
    tinystories -> 8
    llama_110m -> 1
    llama_110m -> 8
    llama_350m -> 1
    llama_350m -> 8
    llama3.2_1b -> 8
    llama3_8b -> 8
    llama3_8b_128k -> 8
    llama3_70b -> 1024
    llama3_405b -> 16384
    llama3_405b train.sequence_length=131072 model.context_length=131072 parallel.cp=16 -> 16384""", str.split, int)


@pytest.mark.parametrize(("given", "ranks"), RECIPES)
def test_every_shipped_recipe_is_possible_and_takes_the_micro_batch_that_it_names(given, ranks):
    settings = load_config(REPOSITORY / f"configs/{given[0]}.yaml", given[1:])
    for _, within in in_phases(settings):
        assert BatchPlan.of(within.train, within.parallel, ranks).micro_batch == within.train.micro_batch
    assert rank_problems(settings, ranks) == []
    assert {path.stem for path in (REPOSITORY / "configs").glob("*.yaml")} == {name for (name, *_), _ in RECIPES}


@pytest.mark.parametrize(("name", "billions"), [("llama_110m", 2.2), ("llama_350m", 7.0)])
def test_small_recipes_train_on_the_tokens_that_their_comment_names(name, billions):
    settings = load_config(REPOSITORY / f"configs/{name}.yaml")
    tokens, shape = settings.train.steps * settings.train.batch_tokens, settings.model.with_vocabulary(32000)
    assert round(tokens / 1e9, 1) == billions and round(tokens / shape.parameter_count) == 20
    hours = tokens * shape.flops_per_token(settings.train.sequence_length, causal=True) / (0.43 * 989e12) / 3600
    assert round(hours) == {"llama_110m": 1, "llama_350m": 10}[name]
