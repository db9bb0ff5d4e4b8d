"""One prompt after another: the cache changes nothing, the seed decides, nothing global is touched. What a row of
`generate` is, tests/model/generation holds to full passes and to transformers."""

import pytest
import torch

from model.config import ModelConfig
from model.generate import generate
from model.llama import Llama, initialise
from tests.refusal import refused
from tests.tiny_models import DESCENDANT

CONFIG = ModelConfig(dim=48, layers=3, heads=6, kv_heads=2, ffn_dim=64, vocab_size=50, context_length=32)


@pytest.fixture(scope="module", params=[{}, DESCENDANT], ids=["llama", "descendant"])
def model(request) -> Llama:
    config = CONFIG.model_copy(update=request.param)
    model = Llama(config)
    initialise(model, config, seed=2)
    with torch.no_grad():
        for parameter in model.layers.parameters():
            parameter.mul_(5 if parameter.ndim == 2 else 1)
    return model


def written(model, prompts=((1,),), count=12, **settings):
    return generate(model, prompts, count, **{"temperature": 1.0, "top_p": 1.0, "seed": 0, "stop_ids": (), **settings})


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"top_p": 0.9}])
def test_generation_with_and_without_cache(model, settings):
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10]]
    cached, plain, padded = (written(model, prompts, 20, **settings, **more) for more in (
        {}, {"use_cache": False}, {"use_cache": False, "multiple_of": 4}))
    assert cached == plain == padded
    assert [len(tokens) for tokens in cached] == [20, 20, 20]


def test_seed_decides_and_neighbours_do_not(model):
    assert written(model) == written(model) != written(model, seed=1)
    assert written(model, [[1], [2]])[1] == written(model, [[7, 8], [2]])[1]
    first, second = written(model, [[1], [1]])
    assert first != second


def test_global_state_is_left_alone(model):
    state = torch.get_rng_state()
    for training in (True, False):
        model.train(training)
        assert len(written(model, count=3)[0]) == 3 and model.training is training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("changes", "message"), [
    ({"prompts": [[1], []]}, "Prompt 1 is empty"), ({"count": -1}, "max_new_tokens must be at least 0, not -1"),
    ({"top_k": 0}, "top_k")])
def test_refusals(model, changes, message):
    refused(ValueError, message, written, model, **changes)
    assert written(model, count=0) == [[]]
