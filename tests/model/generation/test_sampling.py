"""The settings check themselves, and their formulas are those of transformers' processors; for the repetition penalty
test_against_transformers shows it."""

import itertools

import pytest
import torch

from drover.model.generation.sampling import Sampling, draw, kept
from tests.refusal import refused


def test_everything_that_is_wrong_is_said_at_once():
    with pytest.raises(ValueError) as caught:
        Sampling(max_tokens=0, temperature=-1, top_k=0, top_p=0, min_p=2, repetition_penalty=0, seed=-1, stop=("a", ""))
    for name in ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop"):
        assert f"{name} must be" in str(caught.value)
    for wrong in ({"temperature": float("nan")}, {"temperature": float("inf")}, {"top_p": float("nan")},
                  {"min_p": float("nan")}, {"repetition_penalty": float("nan")}, {"top_p": 1.01}, {"stop": "end"},
                  {"seed": 2**63}):
        refused(ValueError, next(iter(wrong)), Sampling, **wrong)
    Sampling(max_tokens=1, temperature=0, top_k=1, top_p=1, min_p=1, seed=2**63 - 1)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_what_is_drawn_from_is_what_transformers_leaves(temperature):
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )
    chance = torch.Generator().manual_seed(2)
    for top_k, top_p, min_p in itertools.product((None, 1, 7, 1000), (0.3, 0.9, 1.0), (0.0, 0.05, 0.5)):
        theirs = LogitsProcessorList([
            TemperatureLogitsWarper(temperature), *([TopKLogitsWarper(top_k)] if top_k else []),
            TopPLogitsWarper(top_p), *([MinPLogitsWarper(min_p)] if min_p else [])])
        for _ in range(3):
            scores = torch.randn(200, generator=chance, dtype=torch.float64) * 3
            expected = theirs(None, scores[None].clone())[0].softmax(-1)
            probabilities, ids = kept(scores, Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p))
            result = torch.zeros_like(scores).scatter(0, ids, probabilities / probabilities.sum())
            assert torch.equal(result > 0, expected > 0)
            assert torch.allclose(result, expected, rtol=1e-12, atol=0)


def test_draws_have_the_probabilities_of_what_is_left_and_their_seed_decides():
    scores, sampling = torch.tensor([0.1, 0.4, 0.2, 0.3]).log(), Sampling(temperature=1.0, top_k=3, top_p=0.95)

    def drawn(seed, count):
        generator = torch.Generator().manual_seed(seed)
        return [draw(scores, sampling, generator) for _ in range(count)]

    assert drawn(0, 50) == drawn(0, 50) != drawn(1, 50)
    shares = torch.bincount(torch.tensor(drawn(0, 4000)), minlength=4) / 4000
    assert shares[0] == 0 and torch.allclose(shares, torch.tensor([0, 4 / 9, 2 / 9, 3 / 9]), rtol=0, atol=0.025)
    assert draw(scores, Sampling(temperature=0), None) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_scores_that_are_no_numbers_are_named(temperature):
    refused(FloatingPointError, "scores are NaN", draw, torch.tensor([1.0, torch.nan, 2.0]),
            Sampling(temperature=temperature), torch.Generator())
