"""What cannot be spread is refused with the numbers, before anything starts."""


import pytest

from drover.model.attention import BACKENDS
from drover.model.config import ModelConfig
from drover.pipeline.config.checks import problems, rank_problems
from drover.pipeline.config.data import TokenizerConfig
from drover.pipeline.config.evaluation import ConvertConfig
from drover.pipeline.config.parallel import ParallelConfig
from drover.pipeline.config.training import TrainConfig
from drover.pipeline.config.tree import Config

MODEL = ModelConfig(dim=64, layers=4, heads=4, kv_heads=2, context_length=256)


def config(train=None, model=MODEL, tokenizer=None, **parallel):
    return Config(model=model, train=TrainConfig(**train or {}), parallel=ParallelConfig(**parallel),
                  tokenizer=TokenizerConfig(kind="byte", **tokenizer or {}))


EIGHT = {"micro_batch": 8, "sequence_length": 256, "batch_tokens": 256 * 8}
"""Eight sequences a step, all at once."""
ZBV = {"pp": 2, "pp_schedule": "zbv", "reshard": "never", "train": {"compile": False}}


@pytest.mark.parametrize(("settings", "words"), [
    ({"tp": 4}, "model.kv_heads 2 is not divisible by parallel.tp 4"),
    ({"tp": 2, "model": MODEL.model_copy(update={"vocab_size": 513})}, "model or tokenizer, 513, is"),
    ({"tp": 2, "model": MODEL.model_copy(update={"context_length": 257})}, "model.context_length 257 is not"),
    ({"tp": 2, "train": {"sequence_length": 127, "batch_tokens": 127 * 8}}, "train.sequence_length 127 is not"),
    ({"dp_shard": 0}, "parallel.dp_shard 0; give"), ({"dp_replicate": 0}, "parallel.dp_replicate 0; give"),
    ({"dp_replicate": -1}, "parallel.dp_replicate and parallel.dp_shard are both -1"),
    ({"offload": "optimizer"}, "parallel.offload 'optimizer' is for parallel.engine 'deepspeed'"),
    ({"engine": "deepspeed", "tp": 2}, "spreads one copy over all ranks"),
    ({"engine": "deepspeed", "offload": "params"}, "needs stage 3, not parallel.zero_stage 2"),
    ({"engine": "deepspeed", "reshard": "never"}, "parallel.reshard 'never' is for parallel.engine 'fsdp2'"),
    ({"engine": "deepspeed", "reduce": "last"}, "parallel.reduce 'last' is for parallel.engine 'fsdp2'"),
    ({"engine": "deepspeed", "train": {"precision": "fp64"}}, "'fp64' needs parallel.engine 'fsdp2'"),
    ({"engine": "deepspeed", "train": {"precision": "fp8"}}, "'fp8' needs parallel.engine 'fsdp2'"),
    ({"train": {"precision": "fp8", "sequence_length": 200, "batch_tokens": 200 * 8}}, "200 is not a multiple of 16"),
    ({"engine": "deepspeed", "zero_stage": 3, "train": {"compile": True}}, "train.compile true does not work"),
    ({"engine": "deepspeed", "pp": 2}, "parallel.pp 2 is for parallel.engine 'fsdp2', not 'deepspeed'"),
    ({"engine": "deepspeed", "cp": 2}, "parallel.cp 2 is for parallel.engine 'fsdp2', not 'deepspeed'"),
    ({"cp": 3}, "is not divisible by 3 (parallel.cp 3 x parallel.tp 1)"),
    ({"pp": 5}, "5 pipeline stages (parallel.pp 5, parallel.pp_schedule '1f1b') are more than model.layers 4"),
    ({"pp": 2, "pp_schedule": "interleaved", "pp_stages": 3}, "6 pipeline stages"),
    ({**ZBV, "model": MODEL.model_copy(update={"tied_embeddings": True})}, "does not take model.tied_embeddings"),
    ({**ZBV, "train": {"compile": None}}, "which torch cannot do with compiled blocks"),
    ({**ZBV, "reshard": "always"}, "'zbv' needs parallel.reshard never"),
    ({**ZBV, "train": {"compile": False, "activation_checkpointing": "selective"}}, "selective checkpointing kept"),
    ({"async_tp": True}, "parallel.async_tp true has nothing to cut where parallel.tp is 1"),
    ({"async_tp": True, "tp": 2, "train": {"compile": False}}, "done by the compiler, but train.compile false"),
    ({"timeout_minutes": 30}, "parallel.timeout_minutes 30.0 is not longer than 3 x train.guards.hang_minutes 10.0"),
    ({"cp": 2, "train": {"precision": "fp8", "sequence_length": 176, "batch_tokens": 176 * 8}},
     "176 is not a multiple of 16 x parallel.cp 2, which train.precision 'fp8'"),
    ({"train": {"recomputed_blocks": 5}}, "train.recomputed_blocks 5 is more than model.layers 4"),
    ({"train": {"activation_checkpointing": "selective", "kept_activations": []}}, "train.kept_activations is empty"),
    ({"train": {"attention": "flash"}}, "train.attention 'flash' is not known; there are auto, sdpa, by_document"),
])
def test_impossible_combinations_are_said_with_their_numbers(settings, words):
    assert any(words in problem for problem in problems(config(**settings))), problems(config(**settings))


@pytest.mark.parametrize("settings", [
    *({"train": {"attention": name}} for name in ("auto", *BACKENDS, "my_package.my_module:MyBackend")),
    {"async_tp": True, "tp": 2}, {"timeout_minutes": 1, "train": {"guards": {"hang_minutes": None}}},
    {"tp": 2, "model": MODEL.model_copy(update={"vocab_size": 514})}])
def test_what_can_be_spread_is_accepted(settings):
    assert problems(config(**settings)) == []


@pytest.mark.parametrize(("settings", "ranks", "words"), [
    ({"dp_replicate": -1, "dp_shard": 4, "tp": 2}, 12, "12 ranks are not divisible by 8 (parallel: dp_shard 4 x tp 2, "
                                                       "dp_replicate -1 for the rest)"),
    ({"tp": 2}, 3, "3 ranks are not divisible by 2 (parallel: dp_replicate 1 x tp 2, dp_shard -1 for the rest)"),
    ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, 4, "dp_replicate 2 x dp_shard 2 x tp 2 is 8, but there are 4 ranks"),
    ({"train": EIGHT}, 3, "8 sequences"),
    ({"pp": 2, "cp": 2}, 6, "6 ranks are not divisible by 4 (parallel: pp 2 x dp_replicate 1 x cp 2 x tp 1, dp_shard"),
    ({"pp": 2, "train": EIGHT}, 16, "at least parallel.pp (2) micro-batches in a step; each of 8 data-parallel groups "
                                    "has 1 of 8 sequences (train.batch_tokens 2048"),
    ({"pp": 2, "pp_schedule": "interleaved", "train": {
        "sequence_length": 256, "batch_tokens": 256 * 3}}, 2, "interleaved a multiple of it; each of 1"),
])
def test_ranks_that_cannot_be_laid_out(settings, ranks, words):
    assert any(words in problem for problem in rank_problems(config(**settings), ranks))


def test_copies_can_be_as_many_as_the_ranks_make():
    assert ParallelConfig(dp_replicate=-1, dp_shard=4, tp=2).sizes(24) == (1, 3, 4, 1, 2)


@pytest.mark.parametrize("steps, problem", [
    ([4, 2], "convert.average [4, 2]: name each step once, in order, and none above train.steps 1000."),
    ([2, 2000], "convert.average [2, 2000]: name each step once, in order, and none above train.steps 1000.")])
def test_the_steps_of_an_average_are_steps_of_the_training_in_order(steps, problem):
    assert problems(config().model_copy(update={"convert": ConvertConfig(average=steps)})) == [problem]


def test_profiled_ranks_are_there():
    wanted = config(train={"profile": {"start": 5, "ranks": [0, 2]}})
    assert rank_problems(wanted, 4) == []
    assert rank_problems(wanted, 2) == ["train.profile.ranks names 2, but there are 2 ranks, from 0 on."]


