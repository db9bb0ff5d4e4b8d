"""Sequences that go on together become what each becomes alone, however they come and go."""

import copy
import random

import pytest
import torch

from drover.model.config import ModelConfig
from drover.model.generate import generate
from drover.model.generation import cache
from drover.model.generation.batch import Batch
from drover.model.generation.sampling import Sampling
from drover.model.generation.writer import stream
from tests.refusal import refused
from tests.tiny_models import DESCENDANT, opinionated

CONFIG = ModelConfig(dim=48, layers=3, heads=6, kv_heads=2, ffn_dim=64, vocab_size=90, context_length=64)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [15, 16], [17] * 20, [4]]
MODELS = {"llama": {}, "descendant": DESCENDANT}


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return opinionated(CONFIG.model_copy(update=MODELS[request.param])).double()


@pytest.fixture(params=[2, 256], ids=["caches that grow", "caches with room"])
def room(request, monkeypatch):
    monkeypatch.setattr(cache, "STEP", request.param)


def written(model, prompts, samplings):
    """The rows, when all have ended."""
    batch = Batch(model)
    rows = [batch.add(prompt, sampling) for prompt, sampling in zip(prompts, samplings, strict=True)]
    while len(batch):
        batch.step()
    return rows


def together(*given):
    return [row.tokens for row in written(*given)]


def settings(chance: random.Random) -> Sampling:
    return Sampling(max_tokens=chance.randint(1, 30), temperature=chance.choice([0, 0.7, 1.5]),
                    top_k=chance.choice([None, 5, 40]), top_p=chance.choice([1.0, 0.9]), min_p=chance.choice([0, 0.02]),
                    repetition_penalty=chance.choice([1.0, 1.2]), seed=chance.randint(0, 2**63 - 1),
                    stop_ids={chance.randint(0, 89)})


def test_rows_that_come_and_go_become_what_each_becomes_alone(model, room):
    chance = random.Random(5)
    asked = [([chance.randint(0, 89) for _ in range(chance.randint(1, 30))], settings(chance)) for _ in range(24)]
    alone = [together(model, [prompt], [sampling])[0] for prompt, sampling in asked]
    batch, rows, waiting = Batch(model), [], list(asked)
    while waiting or len(batch):
        for _ in range(chance.choice([0, 0, 1, 3])):
            if waiting:
                rows.append(batch.add(*waiting.pop(0)))
        if chance.random() < 0.2 and len(batch):  # somebody goes away
            victim = batch.add([chance.randint(0, 89)] * chance.randint(1, 30), Sampling(max_tokens=30))
            batch.step()
            batch.step()
            batch.drop(victim)
        batch.step()
    assert [row.tokens for row in rows] == alone
    ends = {row.end for row in rows}
    assert ends == {"stop", "length"} and all((row.end == "length") == (len(row.tokens) == row.sampling.max_tokens)
                                              for row in rows)


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.1, "top_p": 0.9}])
def test_a_row_is_what_generate_gives_and_touches_nothing_global(model, room, sampling):
    """With a cache, and by full passes for each token."""
    state = torch.get_rng_state()

    def generated(prompts=PROMPTS, seed=7, count=20, **more):
        return generate(model, prompts, count, **{"top_p": 1.0, **sampling}, seed=seed, stop_ids={3, 11}, **more)

    expected = generated()
    assert expected == generated(use_cache=False) == generated(use_cache=False, multiple_of=4)
    assert (expected == generated(seed=8)) is (sampling["temperature"] == 0)
    assert generated(count=0) == [[]] * len(PROMPTS) and len(set(map(tuple, expected))) >= 4  # it looks at its prompts
    refused(ValueError, "Prompt 1 is empty", generated, [[1], []])
    refused(ValueError, "must be at least 0, not -1", generated, count=-1)
    model.train()
    assert generated(PROMPTS[:1])[0] == expected[0] and model.training, "neighbours do not matter"
    model.eval()
    found = together(model, PROMPTS, [Sampling(max_tokens=20, seed=7 + number, stop_ids={3, 11}, **sampling)
                                      for number in range(len(PROMPTS))])
    assert found == expected and any(len(row) < 20 for row in found)
    assert torch.equal(torch.get_rng_state(), state)


def test_one_pass_gives_every_row_a_token_and_a_prompts_last_logits_alone(model):
    passes = []
    handle = model.register_forward_hook(lambda module, given, out: passes.append((*given[0].shape, out.shape[1])))
    try:
        together(model, PROMPTS, [Sampling(max_tokens=5)] * len(PROMPTS))
    finally:
        handle.remove()
    assert passes == [*((1, len(prompt), 1) for prompt in PROMPTS), *[(len(PROMPTS), 1, 1)] * 4]


@pytest.mark.parametrize(("prompt", "said"), [
    ([], "The prompt is empty"), ([1] * 60, "60 tokens; with 5 new ones it exceeds the context_length of 64"),
    ([90], r"outside 0 \.\. 89"), ([-1], r"outside 0 \.\. 89")])
def test_prompts_that_cannot_be_continued_are_refused(model, prompt, said):
    batch = Batch(model)
    refused(ValueError, said, batch.add, prompt, Sampling(max_tokens=5))
    assert len(batch) == 0 and batch.add([0, 89] + [1] * 57, Sampling(max_tokens=5))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_scores_are_no_numbers_ends_alone(model, temperature):
    broken = copy.deepcopy(model)
    broken.tok_embeddings.weight[7] = torch.nan
    broken.output.weight[7] = 0  # where both are one matrix
    batch = Batch(broken)
    sampling = Sampling(max_tokens=5, temperature=temperature, seed=3)
    rows = [batch.add(prompt, sampling) for prompt in ([1, 2], [3, 7, 8, 9, 10])]
    batch.step()
    rows.append(batch.add([4], sampling))  # where the failed one lay, and shorter
    while len(batch):
        batch.step()
    assert [row.end for row in rows] == ["length", "failed", "length"] and not rows[1].tokens
    assert [row.tokens for row in rows[::2]] == together(broken, [[1, 2], [4]], [sampling] * 2)
    refused(FloatingPointError, "scores are NaN", list,
            stream(broken, lambda token: b"x", [[1], [7]], [Sampling(max_tokens=5, temperature=temperature)] * 2))
