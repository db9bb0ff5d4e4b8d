"""How layers are dealt out over the stages of a pipeline, and stages over its ranks."""

import pytest

from drover.model.config import ModelConfig
from drover.model.presets import PRESETS
from drover.pipeline.config.training import ParallelConfig
from drover.pipeline.parallel.stages import bubble, stage_layers

WIDE = ModelConfig(dim=64, layers=12, heads=4, kv_heads=4, ffn_dim=128, vocab_size=1024)
"""Whose embedding weighs as much as 1.6 layers."""


def counts(model, stages):
    """The layers of each stage, all in order."""
    result = stage_layers(model, stages)
    assert [layer for layers in result for layer in layers] == list(range(model.layers))
    return [len(layers) for layers in result]


def test_embedding_and_output_matrix_count_as_the_layers_that_they_weigh():
    assert counts(PRESETS["llama3.1_405b"], 16) == [7, *[8] * 14, 7]  # as in the Llama 3 paper
    assert counts(WIDE, 4) == [2, 4, 4, 2] and counts(WIDE.model_copy(update={"vocab_size": None}), 4) == [2, 3, 4, 3]
    assert counts(WIDE.model_copy(update={"vocab_size": 64}), 4) == [3, 3, 3, 3] and counts(WIDE, 12) == [1] * 12


@pytest.mark.parametrize("settings, expected", [
    ({}, 0.0), ({"pp": 16}, 15 / 16),
    ({"pp": 16, "pp_schedule": "interleaved", "pp_stages": 2}, 15 / 16 * 4 / 8),
    # Of 64 stages some have one layer: the costliest has two, and the busiest rank eight.
    ({"pp": 16, "pp_schedule": "interleaved", "pp_stages": 4}, 15 / 16 * 2 / 8)])
def test_a_pipeline_waits_for_its_costliest_stage(settings, expected):
    assert bubble(PRESETS["llama3.1_405b"], ParallelConfig(**settings), 16) == expected
