"""Texts from prompts, several at once: the pieces are the text of the tokens, and end as asked."""

import pytest

from drover.model.generate import generate
from drover.model.generation.sampling import Sampling
from drover.model.generation.writer import Writer, stream
from drover.pipeline.tokenization.simple import ByteTokenizer
from tests.tiny_models import for_tokenizer

TOKENIZER = ByteTokenizer()
PROMPTS = [[TOKENIZER.bos_id, *text.encode()] for text in ("one", "a longer prompt, of many bytes", "2", "")]


@pytest.fixture(scope="module")
def model():
    return for_tokenizer(TOKENIZER).double()


@pytest.fixture(scope="module")
def plain(model):
    """What the model writes without being stopped."""
    return [generate(model, [prompt], 40, temperature=1, top_p=1, seed=number, stop_ids=())[0]
            for number, prompt in enumerate(PROMPTS)]


def sampled(number, **settings):
    return Sampling(**{"max_tokens": 40, "temperature": 1, "seed": number, **settings})


def test_a_text_that_is_stopped_by_several_tokens_or_dropped_leaves_the_others_alone(model, plain):
    whole = [TOKENIZER.decode(tokens) for tokens in plain]
    place, stop = next((start, whole[1][start:start + 2]) for start in range(8, 39)
                       if whole[1].find(whole[1][start:start + 2]) == start
                       and "\ufffd" not in whole[1][start:start + 2])
    writer = Writer(model, TOKENIZER.token_bytes)
    for number, prompt in enumerate(PROMPTS):
        writer.begin(number, prompt, sampled(number, stop=(stop,) if number == 1 else ()))
    texts, ends = dict.fromkeys(range(4), ""), {}
    for step in range(40):
        if step == 7:
            writer.drop(0)
            writer.drop("never begun")
        for piece in writer.step():
            assert piece.key not in ends and (piece.text or piece.end)
            texts[piece.key] += piece.text
            if piece.end:
                ends[piece.key] = (piece.end, piece.tokens)
    assert len(writer) == 0 and whole[0].startswith(texts[0]) and len(texts[0]) <= 7
    assert [texts[number] for number in (1, 2, 3)] == [whole[1][:place], *whole[2:]]
    assert ends == {1: ("stop", ends[1][1]), 2: ("length", 40), 3: ("length", 40)} and ends[1][1] < 40


def test_a_stop_id_ends_its_text(model, plain):
    stop = plain[2][10]
    before = plain[2][:plain[2].index(stop)]
    pieces = list(stream(model, TOKENIZER.token_bytes, PROMPTS[2:3], [sampled(2, stop_ids={stop})]))
    assert "".join(piece.text for piece in pieces) == TOKENIZER.decode(before)
    assert (pieces[-1].end, pieces[-1].tokens) == ("stop", len(before))
