"""What the model itself says of tokens: log-probabilities, before temperature, penalties and cuts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenScore:
    """One token of a text.

    Attributes:
        token: its id.
        logprob: in nats, given all that stands before it.
        top: (id, logprob) of the likeliest tokens at its place, likeliest first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def token_scores(scores: Tensor, tokens: Sequence[int], count: int) -> list[TokenScore]:
    """The scores of one token at each place, beside the `count` likeliest there.

    scores: (places, vocabulary) logits; what leaves the device is (places, count + 1).
    """
    logprobs = scores.log_softmax(dim=-1)
    wanted = torch.tensor(tokens, dtype=torch.int64, device=scores.device).unsqueeze(1)
    own = logprobs.gather(1, wanted).squeeze(1).tolist()
    best, ids = logprobs.topk(min(count, scores.shape[1]))
    return [TokenScore(token, logprob, tuple(zip(*likeliest, strict=True))) for token, logprob, *likeliest in
            zip(tokens, own, ids.tolist(), best.tolist(), strict=True)]
