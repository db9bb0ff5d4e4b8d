import math
from types import SimpleNamespace

import pytest
import torch

from drover.model.config import ModelConfig
from drover.pipeline.evaluation.harness import HarnessModel
from drover.pipeline.evaluation.placing import Placed
from drover.pipeline.tokenization.simple import ByteTokenizer
from tests.tiny_models import for_tokenizer

VOCABULARY = ByteTokenizer()


class Uniform(torch.nn.Module):
    """Finds each of the 256 bytes equally likely and nothing else possible."""

    def __init__(self):
        super().__init__()
        self.config = ModelConfig(vocab_size=VOCABULARY.size, context_length=32)
        self.unused = torch.nn.Parameter(torch.zeros(1))

    def forward(self, tokens):
        logits = torch.full((*tokens.shape, VOCABULARY.size), -torch.inf)
        logits[..., :256] = 0
        return logits


def requests(*arguments):
    return [SimpleNamespace(args=entry) for entry in arguments]


def direct(model, context, continuation):
    """The log-probability by the book: one text at a time, log-softmax summed over the continuation.

    Blanks that end the context belong to the continuation: that is the harness's convention.
    """
    blank = context[len(context.rstrip()):]
    prefix = [VOCABULARY.bos_id, *VOCABULARY.encode(context.rstrip())]
    ids = torch.tensor([[*prefix, *VOCABULARY.encode(blank + continuation)]])
    with torch.no_grad():
        scores = model(ids[:, :-1]).double().log_softmax(-1)[0, len(prefix) - 1:]
    wanted = ids[0, len(prefix):]
    return float(scores.gather(-1, wanted[:, None]).sum()), bool((scores.argmax(-1) == wanted).all())


def test_an_answer_is_greedy_if_each_token_is_the_most_likely_one():
    """Sums of log-probabilities are compared with `direct` in tests/evaluation/test_running.py."""
    model = for_tokenizer(VOCABULARY)
    ids = [VOCABULARY.bos_id, *VOCABULARY.encode("x = ")]
    with torch.no_grad():
        best = int(model(torch.tensor([ids]))[0, -1].argmax())
    answers = HarnessModel(Placed(model), VOCABULARY, batch=3)._loglikelihood_tokens(
        [(("", ""), ids, [token]) for token in (best, (best + 1) % 256)])
    assert [greedy for _, greedy in answers] == [True, False]


def test_rolling_is_exact_for_a_uniform_byte_model():
    harness = HarnessModel(Placed(Uniform()), VOCABULARY, batch=4)
    texts = ["", "a", "x" * 32, "y" * 33, "größer" * 40]
    for text, value in zip(texts, harness.loglikelihood_rolling(requests(*((text,) for text in texts))), strict=True):
        assert value == pytest.approx(-math.log(2) * 8 * len(text.encode()), rel=1e-12)


def test_long_contexts_lose_their_beginning_but_not_bos():
    model = for_tokenizer(VOCABULARY, context_length=16)
    harness = HarnessModel(Placed(model), VOCABULARY, batch=2)
    (value, _), (short, _) = harness.loglikelihood(requests(("0123456789" * 5, "abc"), ("x", "abc")))
    assert harness.truncated == 1
    assert value == pytest.approx(direct(model, ("0123456789" * 5)[-13:], "abc")[0], abs=1e-4)
    assert short == pytest.approx(direct(model, "x", "abc")[0], abs=1e-4)


class Merging(ByteTokenizer):
    """Bytes, but "ab" is one token where it stands: encoding a pair as one text moves the cut."""

    def encode(self, text):
        return [byte for part in text.split("ab") for byte in [*part.encode(), 7]][:-1]


@pytest.mark.parametrize(("pair", "expected"), [
    (("xa", "b"), (b"xa", [*b"b"])), (("x ", "ab"), (b"x", [*b" ", 7]))])
def test_a_token_across_the_cut_leaves_no_empty_answer(pair, expected):
    context, continuation = HarnessModel(Placed(for_tokenizer(VOCABULARY)), Merging(), batch=1)._encode_pair(*pair)
    assert (bytes(context[1:]), continuation) == expected and context[0] == VOCABULARY.bos_id
