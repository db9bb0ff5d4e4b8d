"""How the logits of a forward pass become the next token: the settings and their formulas.

The formulas and their order are those of transformers' processors: repetition penalty, temperature, top_k, top_p,
min_p, each applied to the result of the one before.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LEAST_TEMPERATURE, MOST_PENALTY = 1e-3, 100.0
"""Beyond these limits logits would become infinite, and probabilities NaN."""


@dataclass(frozen=True)
class Sampling:
    """Settings for continuing one prompt. Raises ValueError with everything that is wrong.

    Attributes:
        max_tokens: the largest number of new tokens.
        temperature: divides the logits; 0 is greedy decoding (argmax), which heeds only repetition_penalty.
        top_k: sample from so many most probable tokens; None: from all.
        top_p: sample from the smallest set of most probable tokens with this total probability (Holtzman et al., 2020);
            1: from all.
        min_p: sample from tokens with at least this fraction of the highest probability (Nguyen et al., 2024); 0: from
            all.
        repetition_penalty: above 1, tokens of the prompt and of the new text become less probable (Keskar et al.,
        2019);
            1: no penalty.
        seed: of this prompt's random numbers.
        stop_ids: tokens that end the text and are not part of it.
        stop: strings that end the text. The text ends before the one that is complete first.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop_ids: Collection[int] = frozenset()
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if problems := self.problems():
            raise ValueError(" ".join(problems))

    def problems(self) -> list[str]:
        """Every impossible value as a sentence; empty if there is none."""
        wrong = [
            (self.max_tokens < 1, f"max_tokens must be at least 1, not {self.max_tokens}."),
            (self.temperature != 0 and not LEAST_TEMPERATURE <= self.temperature < math.inf,
             f"temperature must be 0, or at least {LEAST_TEMPERATURE}, not {self.temperature}."),
            (self.top_k is not None and self.top_k < 1, f"top_k must be at least 1, not {self.top_k}."),
            (not 0 < self.top_p <= 1, f"top_p must be above 0 and at most 1, not {self.top_p}."),
            (not 0 <= self.min_p <= 1, f"min_p must be from 0 to 1, not {self.min_p}."),
            (not 1 / MOST_PENALTY <= self.repetition_penalty <= MOST_PENALTY,
             f"repetition_penalty must be from {1 / MOST_PENALTY} to {MOST_PENALTY}, not {self.repetition_penalty}."),
            (not 0 <= self.seed < 2**63, f"seed must be from 0 to 2^63 - 1, not {self.seed}."),
            (isinstance(self.stop, str) or not all(self.stop), "stop must be strings of at least one character each."),
        ]
        return [sentence for is_wrong, sentence in wrong if is_wrong]

    @property
    def plain(self) -> bool:
        """Whether the next token is the argmax of the model's unchanged logits."""
        return self.temperature == 0 and self.repetition_penalty == 1


def penalised(scores: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Keskar et al. (2019), section 4.1, as transformers computes it: positive logits of seen tokens are divided by the
    penalty, negative ones multiplied by it.

    scores: (vocabulary,) logits. seen: ids, (count,) int64; repeated ids count once.
    """
    of_seen = scores[seen]
    return scores.scatter(0, seen, (of_seen * penalty).where(of_seen < 0, of_seen / penalty))


def kept(scores: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Probabilities (not summing to 1) of the tokens that may be drawn, the highest first, and their ids. Excluded
    tokens have probability 0.

    scores: (vocabulary,) logits; the temperature must be above 0. Raises FloatingPointError if they are NaN.
    """
    probabilities = (scores / sampling.temperature).softmax(dim=-1)
    if sampling.top_k is None:
        probabilities, ids = probabilities.sort(descending=True, stable=True)
    else:
        probabilities, ids = probabilities.topk(min(sampling.top_k, len(probabilities)))
    if probabilities.isnan().any():
        raise FloatingPointError("the model's scores are NaN")
    if sampling.top_k is not None:
        probabilities = probabilities / probabilities.sum()
    if sampling.top_p < 1:
        # A token stays while those before it have not reached top_p, so the most likely one always does.
        before = probabilities.cumsum(dim=-1) - probabilities
        before[0] = -1.0  # also if top_p is so small that it is rounded to 0
        probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)
    if sampling.min_p > 0:
        probabilities = probabilities.masked_fill(probabilities < sampling.min_p * probabilities[0], 0.0)
    return probabilities, ids


def draw(scores: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """The next token. scores: (vocabulary,) logits on the generator's device, after `penalised` if it is used.

    Raises FloatingPointError if they are NaN.
    """
    if sampling.temperature == 0:
        best, token = scores.max(dim=-1)
        if best.isnan():  # NaN counts as the largest
            raise FloatingPointError("the model's scores are NaN")
        return int(token)
    probabilities, ids = kept(scores, sampling)
    return int(ids[probabilities.multinomial(1, generator=generator)])
