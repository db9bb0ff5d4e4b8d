"""Sampling: the cache changes nothing, the settings do what they say, nothing global is touched."""

import copy

import pytest
import torch

from model.attention.module import KeyValueCache
from model.config import ModelConfig
from model.generate import generate
from model.generation.sampling import Sampling, draw
from model.llama import Llama, initialise
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


@pytest.mark.parametrize("pieces", [[1] * 12, [5] + [1] * 7, [4, 3, 1, 4]])
@torch.no_grad()
def test_cached_logits_equal_the_full_forward(model, pieces):
    tokens = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(0))
    caches = [KeyValueCache(12) for _ in range(CONFIG.layers)]
    cached = torch.cat([model(piece, caches=caches) for piece in tokens.split(pieces, dim=1)], dim=1)
    assert torch.allclose(cached, model(tokens), rtol=0, atol=1e-5)


@pytest.mark.parametrize("settings", [{"temperature": 0.0, "top_p": 1.0}, {"temperature": 1.0, "top_p": 0.9}])
def test_generation_with_and_without_cache(model, settings):
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10]]
    cached = generate(model, prompts, 20, **settings, seed=1, stop_ids=())
    plain = generate(model, prompts, 20, **settings, seed=1, stop_ids=(), use_cache=False)
    assert cached == plain
    assert [len(tokens) for tokens in cached] == [20, 20, 20]


def test_greedy_takes_the_most_likely(model):
    tokens = [1, 2, 3]
    for _ in range(5):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    assert generate(model, [[1, 2, 3]], 5, temperature=0, top_p=1, seed=0, stop_ids=()) == [tokens[3:]]


def test_seed_decides_and_neighbours_do_not(model):
    def sample(prompts, seed):
        return generate(model, prompts, 12, temperature=1, top_p=1, seed=seed, stop_ids=())

    assert sample([[1]], 0) == sample([[1]], 0)
    assert sample([[1]], 0) != sample([[1]], 1)
    assert sample([[1], [2]], 0)[1] == sample([[7, 8], [2]], 0)[1]
    assert sample([[1], [1]], 0)[0] != sample([[1], [1]], 0)[1]


def test_stops_and_leaves_the_stop_out(model):
    tokens = generate(model, [[1, 2]], 10, temperature=1, top_p=1, seed=3, stop_ids=())[0]
    stop = tokens[4]
    expected = tokens[: tokens.index(stop)]
    assert generate(model, [[1, 2]], 10, temperature=1, top_p=1, seed=3, stop_ids={stop}) == [expected]


def test_global_state_is_left_alone(model):
    state = torch.get_rng_state()
    for training in (True, False):
        model.train(training)
        generate(model, [[1]], 3, temperature=1, top_p=1, seed=0, stop_ids=())
        assert model.training is training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


def frequencies(**settings) -> torch.Tensor:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    generator, sampling = torch.Generator().manual_seed(0), Sampling(**{"temperature": 1.0, **settings})
    draws = [draw(logits, sampling, generator) for _ in range(4000)]
    return torch.bincount(torch.tensor(draws), minlength=4) / 4000


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.1, 0.4, 0.2, 0.3]),
        ({"temperature": 0.5}, [1 / 30, 16 / 30, 4 / 30, 9 / 30]),
        ({"top_p": 0.69}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.71}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"top_p": 0.01}, [0, 1, 0, 0]),
        ({"top_k": 1}, [0, 1, 0, 0]),
        ({"top_k": 3}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"top_k": 2, "top_p": 0.5}, [0, 1, 0, 0]),
        ({"min_p": 0.6}, [0, 4 / 7, 0, 3 / 7]),
        ({"min_p": 1.0}, [0, 1, 0, 0]),
        ({"top_p": 0.95, "min_p": 0.3}, [0, 4 / 9, 2 / 9, 3 / 9]),
    ],
)
def test_sampling_follows_the_settings(settings, expected):
    actual = frequencies(**settings)
    golden = torch.tensor(expected, dtype=torch.float32)
    assert torch.allclose(actual, golden, rtol=0, atol=0.025)
    assert torch.equal(actual == 0, golden == 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": [[1], []]}, "Prompt 1 is empty"),
        ({"prompts": [[1] * 30]}, r"30 tokens; with 3 new ones it exceeds the context_length of 32"),
        ({"prompts": [[50]]}, r"outside 0 \.\. 49"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
    ],
)
def test_refusals(model, changes, message):
    arguments = {
        "prompts": [[1]],
        "max_new_tokens": 3,
        "temperature": 1.0,
        "top_p": 1.0,
        "seed": 0,
        "stop_ids": (),
    }
    with pytest.raises(ValueError, match=message):
        generate(model, **(arguments | changes))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_scores_that_are_no_numbers_are_named(model, temperature):
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.norm.weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="scores are NaN"):
        generate(broken, [[1]], 3, temperature=temperature, top_p=0.9, seed=0, stop_ids=())
