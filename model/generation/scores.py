"""The model's own log-probabilities of tokens, before temperature, penalties and top_k, top_p, min_p."""

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
        logprob: in nats, given all tokens before it.
        top: (id, logprob) of the most probable tokens at its position, the highest first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def token_scores(scores: Tensor, tokens: Sequence[int], count: int) -> list[TokenScore]:
    """The score of one token at each position, with the `count` most probable tokens there.

    scores: (positions, vocabulary) logits; only (positions, count + 1) values are copied to the host.
    """
    logprobs = scores.log_softmax(dim=-1)
    wanted = torch.tensor(tokens, dtype=torch.int64, device=scores.device).unsqueeze(1)
    own = logprobs.gather(1, wanted).squeeze(1).tolist()
    best, ids = logprobs.topk(min(count, scores.shape[1]))
    return [TokenScore(token, logprob, tuple(zip(*top, strict=True))) for token, logprob, *top in
            zip(tokens, own, ids.tolist(), best.tolist(), strict=True)]
