"""The settings check themselves, and their formulas are those of transformers' processors."""

import itertools

import pytest
import torch

from model.generation.sampling import Sampling, draw, kept, penalised


def test_everything_that_is_wrong_is_said_at_once():
    with pytest.raises(ValueError) as caught:
        Sampling(max_tokens=0, temperature=-1, top_k=0, top_p=0, min_p=2, repetition_penalty=0, seed=-1, stop=("a", ""))
    for name in ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop"):
        assert f"{name} must be" in str(caught.value)
    for wrong in ({"temperature": float("nan")}, {"temperature": float("inf")}, {"top_p": float("nan")},
                  {"min_p": float("nan")}, {"repetition_penalty": float("nan")}, {"top_p": 1.01}, {"stop": "end"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Sampling(**wrong)


@pytest.mark.parametrize("penalty", [0.8, 1.0, 1.3])
def test_the_repetition_penalty_is_that_of_transformers(penalty):
    from transformers import RepetitionPenaltyLogitsProcessor
    chance = torch.Generator().manual_seed(1)
    for _ in range(20):
        scores = torch.randn(50, generator=chance) * 4
        seen = torch.randint(50, (30,), generator=chance)
        theirs = RepetitionPenaltyLogitsProcessor(penalty)(seen[None], scores[None].clone())[0]
        assert torch.equal(penalised(scores, seen, penalty), theirs)


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), itertools.product(
    (0.5, 1.0, 1.7), (None, 1, 7, 1000), (0.3, 0.9, 1.0), (0.0, 0.05, 0.5)))
def test_what_is_drawn_from_is_what_transformers_leaves(temperature, top_k, top_p, min_p):
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )
    theirs = LogitsProcessorList([TemperatureLogitsWarper(temperature), *([TopKLogitsWarper(top_k)] if top_k else []),
                                  TopPLogitsWarper(top_p), *([MinPLogitsWarper(min_p)] if min_p else [])])
    chance = torch.Generator().manual_seed(2)
    for _ in range(5):
        scores = torch.randn(200, generator=chance, dtype=torch.float64) * 3
        expected = theirs(None, scores[None].clone())[0].softmax(-1)
        probabilities, ids = kept(scores, Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p))
        found = torch.zeros_like(scores).scatter(0, ids, probabilities / probabilities.sum())
        assert torch.equal(found > 0, expected > 0)
        assert torch.allclose(found, expected, rtol=1e-12, atol=0)


def test_a_draw_is_from_what_is_left_and_its_seed_decides():
    scores = torch.randn(100, generator=torch.Generator().manual_seed(3))
    sampling = Sampling(temperature=1.5, top_k=40, top_p=0.5, min_p=0.1)
    probabilities, ids = kept(scores, sampling)
    allowed = set(ids[probabilities > 0].tolist())

    def drawn(seed):
        generator = torch.Generator().manual_seed(seed)
        return [draw(scores, sampling, generator) for _ in range(500)]
    assert set(drawn(0)) == allowed and drawn(0) == drawn(0) != drawn(1)
