"""What the model says of tokens, beside one forward pass over the whole text; nothing where nobody asks."""

import pytest
import torch

from drover.model.generation import batch as batches
from drover.model.generation.sampling import Sampling
from tests.model.generation.test_batch import CONFIG, written
from tests.tiny_models import opinionated

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11, 12, 13], [17] * 20]


@pytest.fixture(scope="module")
def model():
    return opinionated(CONFIG)


def agree(scores, tokens, logprobs, count):
    """logprobs: (tokens, vocabulary), from the pass over the whole."""
    assert [score.token for score in scores] == tokens
    for score, found in zip(scores, logprobs, strict=True):
        assert score.logprob == pytest.approx(float(found[score.token]), abs=1e-5)
        best = found.topk(count)
        assert [token for token, _ in score.top] == best.indices.tolist()
        assert [value for _, value in score.top] == pytest.approx(best.values.tolist(), abs=1e-5)


@pytest.mark.parametrize("logits", [2**27, 90 * 4, 1], ids=["prompts at once", "in pieces", "token by token"])
def test_rows_together_are_told_of_as_one_pass_over_each_has_it(model, logits, monkeypatch):
    monkeypatch.setattr(batches, "LOGITS_IN_MEMORY", logits)
    common = {"max_tokens": 20, "temperature": 1.4, "top_k": 7, "repetition_penalty": 1.2}
    asked = [(2, 1), (None, None), (0, None), (90, 5)]
    rows = written(model, PROMPTS, [Sampling(seed=number, logprobs=count, prompt_logprobs=of_prompt, **common)
                           for number, (count, of_prompt) in enumerate(asked)])
    for row, (count, of_prompt) in zip(rows, asked, strict=True):
        logprobs = model(torch.tensor([row.prompt + row.tokens]))[0].log_softmax(-1)
        length = len(row.prompt)
        agree(row.scores, [] if count is None else row.tokens, logprobs[length - 1:-1] if count is not None else [],
              count or 0)
        agree(row.prompt_scores, [] if of_prompt is None else row.prompt[1:],
              logprobs[:length - 1] if of_prompt is not None else [], of_prompt or 0)


def test_nobody_asks_and_nothing_is_computed(model, monkeypatch):
    def refuse(*arguments):
        raise AssertionError
    monkeypatch.setattr(batches, "token_scores", refuse)
    assert not any(row.scores or row.prompt_scores for row in written(model, PROMPTS, [Sampling(max_tokens=4)] * 4))
    with pytest.raises(AssertionError):
        written(model, PROMPTS, [Sampling(max_tokens=4, logprobs=0)] * 4)
