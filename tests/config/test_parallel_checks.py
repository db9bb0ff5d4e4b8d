"""What cannot be spread is refused with the numbers, before anything starts."""

import importlib.util
from types import SimpleNamespace

import pytest

from launch.checks import configuration_problems
from model.attention import BACKENDS
from model.config import ModelConfig
from pipeline.config.checks import problems, rank_problems
from pipeline.config.data import TokenizerConfig
from pipeline.config.parallel import ParallelConfig
from pipeline.config.training import TrainConfig
from pipeline.config.tree import Config
from pipeline.errors import UserError

MODEL = ModelConfig(dim=64, layers=4, heads=4, kv_heads=2, context_length=256)


def config(train=None, model=MODEL, tokenizer=None, **parallel):
    return Config(model=model, train=TrainConfig(**train or {}), parallel=ParallelConfig(**parallel),
                  tokenizer=TokenizerConfig(kind="byte", **tokenizer or {}))


@pytest.mark.parametrize(("settings", "words"), [
    ({"tp": 4}, "model.kv_heads (2) is not divisible by parallel.tp (4)"),
    ({"tp": 2, "model": MODEL.model_copy(update={"vocab_size": 513})}, "the vocabulary (513) is not divisible"),
    ({"tp": 2, "model": MODEL.model_copy(update={"context_length": 257})}, "model.context_length (257)"),
    ({"tp": 2, "train": {"sequence_length": 127, "batch_tokens": 127 * 8}}, "train.sequence_length (127)"),
    ({"dp_shard": 0}, "parallel.dp_shard is 0"),
    ({"offload": "optimizer"}, "parallel.offload 'optimizer' is for parallel.engine 'deepspeed'"),
    ({"engine": "deepspeed", "tp": 2}, "spreads one copy over all ranks"),
    ({"engine": "deepspeed", "offload": "params"}, "needs parallel.zero_stage 3, not 2"),
    ({"engine": "deepspeed", "reshard": "never"}, "parallel.reshard 'never' is for parallel.engine 'fsdp2'"),
    ({"engine": "deepspeed", "reduce": "last"}, "parallel.reduce 'last' is for parallel.engine 'fsdp2'"),
    ({"engine": "deepspeed", "train": {"precision": "fp64"}}, "'fp64' needs parallel.engine 'fsdp2'"),
    ({"engine": "deepspeed", "zero_stage": 3, "train": {"compile": True}}, "train.compile true does not work"),
    ({"train": {"recomputed_blocks": 5}}, "train.recomputed_blocks 5 is more than model.layers 4"),
    ({"train": {"activation_checkpointing": "selective", "kept_activations": []}}, "train.kept_activations is empty"),
    ({"train": {"attention": "flash"}}, "train.attention 'flash' is not known; there are auto, sdpa, by_document"),
])
def test_impossible_combinations_are_said_with_their_numbers(settings, words):
    assert any(words in problem for problem in problems(config(**settings))), problems(config(**settings))


def test_every_known_attention_and_a_class_of_ones_own_are_accepted():
    for name in ("auto", *BACKENDS, "my_package.my_module:MyBackend"):
        assert problems(config(train={"attention": name})) == []


def test_a_vocabulary_that_was_made_divisible_is_accepted():
    model = MODEL.model_copy(update={"vocab_size": 514, "heads": 4, "kv_heads": 2})
    assert problems(config(model=model, tp=2)) == []


@pytest.mark.parametrize(("settings", "ranks", "words"), [
    ({"tp": 2}, 3, "3 ranks are not divisible by 2 (parallel: dp_replicate 1 x tp 2, dp_shard -1 for the rest)"),
    ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, 4, "dp_replicate 2 x dp_shard 2 x tp 2 is 8, but there are 4 ranks"),
    ({"train": {"micro_batch": 8, "sequence_length": 256, "batch_tokens": 256 * 8}}, 2, "8 sequences"),
])
def test_ranks_that_cannot_be_laid_out(settings, ranks, words):
    assert any(words in problem for problem in rank_problems(config(**settings), ranks))


def test_ranks_of_a_tensor_group_share_their_samples():
    settings = {"train": {"micro_batch": 8, "sequence_length": 256, "batch_tokens": 256 * 8}}
    assert rank_problems(config(tp=2, **settings), 2) == []


def test_a_missing_deepspeed_is_noticed_before_the_job_starts(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec",
                        lambda name, *rest: None if name == "deepspeed" else found(name, *rest))
    wanted = config(engine="deepspeed", train={"batch_tokens": 256 * 64})
    with pytest.raises(UserError, match="deepspeed is not installed here"):
        configuration_problems(wanted, [SimpleNamespace(key="train", stage="train", to_run=True, ranks=1)], "mine.yaml")
