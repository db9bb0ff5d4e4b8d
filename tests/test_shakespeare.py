"""The character models that are compared with nanoGPT: their size and budget."""

import pytest

from drover.pipeline.config.loading import load_config
from tests.conftest import REPOSITORY

ROWS = 640
"""65 characters, 256 bytes and 256 special ids, padded to a multiple of 128."""


def gpt_parameters(layers, width, vocabulary=65):
    """As nanoGPT counts: without the positions' embedding and without biases, the output tied to the embedding."""
    return layers * 12 * width**2 + (2 * layers + 1) * width + vocabulary * width


@pytest.mark.parametrize("name, layers, width", [("shakespeare_char", 4, 128), ("shakespeare_char_gpu", 6, 384)])
def test_the_models_are_no_larger_than_nanogpts(name, layers, width):
    config = load_config(REPOSITORY / f"configs/{name}.yaml")
    assert (config.model.layers, config.model.heads, config.model.dim) == (layers, layers, width)
    parameters = config.model.model_copy(update={"vocab_size": ROWS}).parameter_count
    assert 0.95 * gpt_parameters(layers, width) < parameters <= gpt_parameters(layers, width)
    assert (config.shard.validation_rule, config.shard.validation_share) == ("tail", 0.1)
