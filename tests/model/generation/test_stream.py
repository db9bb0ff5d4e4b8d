"""Prompts that are continued together become what each becomes alone; the pieces are the text of the tokens."""

import random

import pytest
import torch

from drover.model.config import ModelConfig
from drover.model.generate import generate
from drover.model.generation import cache
from drover.model.generation.sampling import Sampling
from drover.model.generation.stream import stream
from drover.pipeline.tokenization.conversion import byte_tokenizer
from tests.refusal import refused
from tests.tiny_models import DESCENDANT, for_tokenizer, opinionated

CONFIG = ModelConfig(dim=48, layers=3, heads=6, kv_heads=2, ffn_dim=64, vocab_size=90, context_length=64)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [15, 16], [17] * 20, [4]]
MODELS = {"llama": {}, "descendant": DESCENDANT}
TOKENIZER = byte_tokenizer()
TEXTS = [[TOKENIZER.bos_id, *text.encode()] for text in ("one", "a longer prompt, of many bytes", "2", "")]


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return opinionated(CONFIG.model_copy(update=MODELS[request.param])).double()


@pytest.fixture(params=[2, 256], ids=["caches that grow", "caches with room"])
def room(request, monkeypatch):
    monkeypatch.setattr(cache, "STEP", request.param)


@pytest.fixture(scope="module")
def writing():
    """A model of bytes."""
    return for_tokenizer(TOKENIZER).double()


@pytest.fixture(scope="module")
def plain(writing):
    """What it writes without being stopped."""
    return [generate(writing, [prompt], 40, temperature=1, top_p=1, seed=number, stop_ids=())[0]
            for number, prompt in enumerate(TEXTS)]


def written(model, prompts, samplings):
    """The new tokens of each prompt, and why they ended."""
    texts, ends = [""] * len(prompts), [None] * len(prompts)
    for piece in stream(model, lambda token: b"%d " % token, prompts, samplings):
        texts[piece.number] += piece.text
        ends[piece.number] = piece.end
    return [([int(token) for token in text.split()], end) for text, end in zip(texts, ends, strict=True)]


def settings(chance: random.Random) -> Sampling:
    return Sampling(max_tokens=chance.randint(1, 30), temperature=chance.choice([0, 0.7, 1.5]),
                    top_k=chance.choice([None, 5, 40]), top_p=chance.choice([1.0, 0.9]), min_p=chance.choice([0, 0.02]),
                    repetition_penalty=chance.choice([1.0, 1.2]), seed=chance.randint(0, 2**63 - 1),
                    stop_ids={chance.randint(0, 89)})


def sampled(number, **given):
    return Sampling(**{"max_tokens": 40, "temperature": 1, "seed": number, **given})


def test_prompts_together_become_what_each_becomes_alone(model, room):
    chance = random.Random(5)
    prompts = [[chance.randint(0, 89) for _ in range(chance.randint(1, 30))] for _ in range(24)]
    samplings = [settings(chance) for _ in prompts]
    together = written(model, prompts, samplings)
    assert together == [written(model, [prompt], [own])[0] for prompt, own in zip(prompts, samplings, strict=True)]
    assert {end for _, end in together} == {"stop", "length"}
    assert all((end == "length") == (len(tokens) == own.max_tokens)
               for (tokens, end), own in zip(together, samplings, strict=True))
    assert written(model, [], []) == []


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.1, "top_p": 0.9}])
def test_a_text_is_what_generate_gives_and_touches_nothing_global(model, room, sampling):
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
    result = written(model, PROMPTS, [Sampling(max_tokens=20, seed=7 + number, stop_ids={3, 11}, **sampling)
                                     for number in range(len(PROMPTS))])
    assert [tokens for tokens, _ in result] == expected and any(len(tokens) < 20 for tokens, _ in result)
    assert torch.equal(torch.get_rng_state(), state)


def test_one_pass_gives_every_prompt_a_token_and_its_last_logits_alone(model):
    passes = []
    handle = model.register_forward_hook(lambda module, given, out: passes.append((*given[0].shape, out.shape[1])))
    try:
        written(model, PROMPTS, [Sampling(max_tokens=5)] * len(PROMPTS))
    finally:
        handle.remove()
    assert passes == [*((1, len(prompt), 1) for prompt in PROMPTS), *[(len(PROMPTS), 1, 1)] * 4]


@pytest.mark.parametrize(("prompt", "words"), [
    ([], "The prompt is empty"), ([1] * 60, "60 tokens; with 5 new ones it exceeds the context_length of 64"),
    ([90], r"outside 0 \.\. 89"), ([-1], r"outside 0 \.\. 89")])
def test_prompts_that_cannot_be_continued_are_refused(model, prompt, words):
    refused(ValueError, words, written, model, [[1], prompt], [Sampling(max_tokens=5)] * 2)
    assert written(model, [[0, 89] + [1] * 57], [Sampling(max_tokens=5)])


def test_a_text_that_several_tokens_stop_leaves_the_others_alone(writing, plain):
    whole = [TOKENIZER.decode(tokens) for tokens in plain]
    place, stop = next((start, whole[1][start:start + 2]) for start in range(8, 39)
                       if whole[1].find(whole[1][start:start + 2]) == start
                       and "\ufffd" not in whole[1][start:start + 2])
    texts, ends = [""] * 4, {}
    for piece in stream(writing, TOKENIZER.token_bytes, TEXTS,
                        [sampled(number, stop=(stop,) if number == 1 else ()) for number in range(4)]):
        assert piece.number not in ends and (piece.text or piece.end)
        texts[piece.number] += piece.text
        if piece.end:
            ends[piece.number] = piece.end
    assert texts == [whole[0], whole[1][:place], *whole[2:]]
    assert ends == {0: "length", 1: "stop", 2: "length", 3: "length"}
