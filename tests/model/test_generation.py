"""Prompts that are continued together become what each becomes alone, and greedily what transformers makes of them; the
pieces are the text of the tokens, and nothing would have to be taken back."""

import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drover.model.config import ModelConfig
from drover.model.generation import stream as module
from drover.model.generation.sampling import Sampling, draw, kept
from drover.model.generation.stream import TextStream, generate, stream
from drover.pipeline.formats.weights import load_model, open_weights
from tests.refusal import refused
from tests.tiny_models import TOKENIZER_OF_BYTES, for_tokenizer, opinionated, write_huggingface

CONFIG = ModelConfig(dim=48, layers=3, heads=6, kv_heads=2, ffn_dim=64, vocab_size=90, context_length=64)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [15, 16], [17] * 20, [4]]
TEXTS = [[TOKENIZER_OF_BYTES.bos_id, *text.encode()] for text in ("def main():", "a", "Once upon a time, in", "")]


@pytest.fixture(scope="module")
def model():
    return opinionated(CONFIG).double()


@pytest.fixture(params=[2, 256], ids=["caches that grow", "caches with room"])
def room(request, monkeypatch):
    monkeypatch.setattr(module, "STEP", request.param)


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


def test_prompts_together_become_what_each_becomes_alone(model, room):
    chance = random.Random(5)
    prompts = [[chance.randint(0, 89) for _ in range(chance.randint(1, 30))] for _ in range(24)]
    samplings = [settings(chance) for _ in prompts]
    together = written(model, prompts, samplings)
    assert together == [written(model, [prompt], [own])[0] for prompt, own in zip(prompts, samplings, strict=True)]
    assert {end for _, end in together} == {"stop", "length"}
    assert all((end == "length") == (len(tokens) == own.max_tokens)
               for (tokens, end), own in zip(together, samplings, strict=True))


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.1, "top_p": 0.9}])
def test_a_text_is_what_generate_gives_and_touches_nothing_global(model, sampling):
    """With a cache, and by full passes for each token."""
    state = torch.get_rng_state()

    def generated(prompts=PROMPTS, count=20, **more):
        return generate(model, prompts, count, **{"top_p": 1.0, **sampling}, seed=7, stop_ids={3, 11}, **more)

    expected = generated()
    assert expected == generated(use_cache=False) == generated(use_cache=False, multiple_of=4)
    assert len(set(map(tuple, expected))) >= 4  # it looks at its prompts
    refused(ValueError, "Prompt 1 is empty", generated, [[1], []])
    refused(ValueError, "must be at least 0, not -1", generated, count=-1)
    model.train()
    assert generated(PROMPTS[:1])[0] == expected[0] and model.training, "neighbours do not matter"
    model.eval()
    result = written(model, PROMPTS, [Sampling(max_tokens=20, seed=7 + number, stop_ids={3, 11}, **sampling)
                                      for number in range(len(PROMPTS))])
    assert [tokens for tokens, _ in result] == expected and any(len(tokens) < 20 for tokens, _ in result)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("prompt", "words"), [
    ([], "The prompt is empty"), ([1] * 60, "60 tokens; with 5 new ones it exceeds the context_length of 64"),
    ([90], r"outside 0 \.\. 89")])
def test_prompts_that_cannot_be_continued_are_refused(model, prompt, words):
    refused(ValueError, words, written, model, [[1], prompt], [Sampling(max_tokens=5)] * 2)
    assert written(model, [[0, 89] + [1] * 57], [Sampling(max_tokens=5)])


def streamed(parts, stop=()):
    """The pieces, what followed the last, and whether it was stopped."""
    text = TextStream(stop)
    pieces = []
    for part in parts:
        pieces.append(text.add(part))
        if text.stopped:
            break
    return pieces, text.finish(), text.stopped


def cut(text, stop):
    """By the book: character by character, until the text ends with a stop string."""
    for end in range(1, len(text) + 1):
        ended = [each for each in stop if text[:end].endswith(each)]
        if ended:
            return text[:end - max(map(len, ended))], True
    return text, False


@given(content=st.one_of(st.text("ab\né😀", max_size=30).map(str.encode), st.binary(max_size=20)),
       stop=st.lists(st.text("ab\né😀", min_size=1, max_size=4), max_size=3),
       cuts=st.lists(st.integers(0, 60), max_size=20))
def test_the_pieces_are_the_text_up_to_its_stop_wherever_tokens_end(content, stop, cuts):
    places = [0, *sorted(min(place, len(content)) for place in cuts), len(content)]
    parts = [content[start:end] for start, end in itertools.pairwise(places)]
    expected, stopped = cut(content.decode("utf-8", errors="replace"), stop)
    pieces, rest, ended = streamed(parts, stop)
    assert ("".join(pieces) + rest, ended) == (expected, stopped)


@pytest.mark.parametrize("shape", [{"tied_embeddings": True}, {"head_dim": 16}])
def test_greedy_tokens_are_those_of_transformers(shape, tmp_path):
    """In float32, on the export, prompts of unequal length together."""
    from transformers import AutoModelForCausalLM
    folder = write_huggingface(tmp_path / "hf", for_tokenizer(TOKENIZER_OF_BYTES, seed=4, **shape), TOKENIZER_OF_BYTES)
    with open_weights(folder) as weights:
        ours = load_model(weights, torch.device("cpu"), torch.float32)
    theirs, eos = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), TOKENIZER_OF_BYTES.eos_id
    for penalty in (0.9, 1.0, 1.15):
        expected = [theirs.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=eos,
                                    pad_token_id=eos, repetition_penalty=penalty)[0, len(prompt):].tolist()
                    for prompt in TEXTS]
        sampling = Sampling(max_tokens=40, repetition_penalty=penalty, stop_ids={eos})
        result = written(ours, TEXTS, [sampling] * len(TEXTS))
        assert [tokens + [eos] * (end == "stop") for tokens, end in result] == expected
        assert len(set(map(tuple, expected))) == len(TEXTS)


def test_everything_that_is_wrong_is_said_at_once():
    wrong = {"max_tokens": 0, "temperature": -1, "top_k": 0, "top_p": 0, "min_p": 2, "repetition_penalty": 0,
             "seed": -1, "stop": ("a", "")}
    message = refused(ValueError, "must be", Sampling, **wrong)
    assert all(f"{name} must be" in message for name in wrong)
    for wrong in ({"temperature": float("nan")}, {"temperature": float("inf")}, {"top_p": 1.01}, {"stop": "end"},
                  {"seed": 2**63}):
        refused(ValueError, next(iter(wrong)), Sampling, **wrong)
    Sampling(max_tokens=1, temperature=0, top_k=1, top_p=1, min_p=1, seed=2**63 - 1)


def test_what_is_drawn_from_is_what_transformers_leaves():
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )
    chance = torch.Generator().manual_seed(2)
    for temperature, top_k, top_p, min_p in itertools.product((0.5, 1.7), (None, 1, 7, 1000), (0.3, 0.9, 1.0),
                                                              (0.0, 0.05, 0.5)):
        theirs = LogitsProcessorList([
            TemperatureLogitsWarper(temperature), *([TopKLogitsWarper(top_k)] if top_k else []),
            TopPLogitsWarper(top_p), *([MinPLogitsWarper(min_p)] if min_p else [])])
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
    for temperature in (0.0, 1.0):
        refused(FloatingPointError, "scores are NaN", draw, torch.tensor([1.0, torch.nan, 2.0]),
                Sampling(temperature=temperature), torch.Generator())
