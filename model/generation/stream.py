"""Continues several prompts together and yields their texts piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from drover.model.attention.module import KeyValueCache
from drover.model.generation.cache import RowCaches
from drover.model.generation.sampling import Sampling, draw, penalised
from drover.model.generation.text import TextStream
from drover.model.llama import Llama

End = Literal["stop", "length"]


@dataclass(frozen=True)
class GeneratedPiece:
    """The next piece of a text.

    Attributes:
        number: of the prompt.
        text: to be appended to the pieces before; empty only in the last piece.
        end: the reason if this is the last piece: "stop" (a stop string or a stop id), "length"; None otherwise.
    """

    number: int
    text: str
    end: End | None


class Row:
    """A prompt that is being continued.

    Attributes:
        tokens: the new ids so far, without the one that stopped it.
        end: see `GeneratedPiece`.
    """

    def __init__(self, number: int, prompt: Sequence[int], sampling: Sampling) -> None:
        self.number = number
        self.prompt = list(prompt)
        self.sampling = sampling
        self.tokens: list[int] = []
        self.end: End | None = None
        self._text = TextStream(sampling.stop)
        self._generator = torch.Generator(device="cpu").manual_seed(sampling.seed)

    def choose(self, scores: Tensor) -> int:
        """The next token. scores: (vocabulary,) logits on the CPU. Raises FloatingPointError if they are NaN."""
        if self.sampling.repetition_penalty != 1:
            scores = penalised(scores, torch.tensor([*self.prompt, *self.tokens]), self.sampling.repetition_penalty)
        return draw(scores, self.sampling, self._generator)

    def add(self, token: int, token_bytes: Callable[[int], bytes]) -> GeneratedPiece:
        """Append the next token; returns the text that is certain now."""
        text = ""
        if token in self.sampling.stop_ids:
            self.end = "stop"
        else:
            self.tokens.append(token)
            text = self._text.add(token_bytes(token))
            if len(self.tokens) == self.sampling.max_tokens:
                self.end = "length"
        if self.end is not None:
            text += self._text.finish()
        if self._text.stopped:  # also by broken characters at the end
            self.end = "stop"
        return GeneratedPiece(self.number, text, self.end)


def stream(
    model: Llama,
    token_bytes: Callable[[int], bytes],
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[Sampling],
) -> Iterator[GeneratedPiece]:
    """Continue all prompts together, one token for each in a forward pass. Yields pieces as soon as they are certain.

    A text depends only on its prompt and settings, except for rounding: the order of sums changes with the number of
    rows. A prompt is read alone, without padding, and has its own random numbers.

    Args:
        model: whole on its device, in evaluation mode.
        token_bytes: the UTF-8 bytes of a token, b"" for one without text.

    Raises:
        ValueError: a prompt is empty, has ids outside the vocabulary, or is too long for the context.
        FloatingPointError: the model's logits are NaN.
    """
    rows = [Row(number, prompt, sampling)
            for number, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))]
    for row in rows:
        if problem := prompt_problem(model, row.prompt, row.sampling.max_tokens):
            raise ValueError(f"The prompt {problem}")
    caches, tokens = _read(model, rows)
    while rows:
        for row, token in zip(rows, tokens, strict=True):
            piece = row.add(token, token_bytes)
            if piece.text or piece.end:
                yield piece
        remaining = [index for index, row in enumerate(rows) if row.end is None]
        rows = [rows[index] for index in remaining]
        if rows:
            tokens = _continue(model, rows, caches, remaining)


@torch.inference_mode()
def _read(model: Llama, rows: Sequence[Row]) -> tuple[RowCaches, list[int]]:
    """Read every prompt by itself; the caches of all rows, and each row's first token."""
    tokens, prompts = [], []
    for row in rows:
        caches = [KeyValueCache(len(row.prompt)) for _ in range(model.config.layers)]
        ids = torch.tensor([row.prompt], device=model.tok_embeddings.weight.device)
        tokens += _chosen([row], model(ids, caches=caches, last_only=True)[:, -1])
        prompts.append(caches)
    return RowCaches(prompts), tokens


@torch.inference_mode()
def _continue(model: Llama, rows: Sequence[Row], caches: RowCaches, remaining: Sequence[int]) -> list[int]:
    """The next token of every row. remaining: the places of these rows in the caches."""
    caches.keep(remaining)
    weight = model.tok_embeddings.weight
    tokens = torch.tensor([row.tokens[-1:] for row in rows], device=weight.device)
    positions, mask = caches.begin(weight.dtype, weight.device)
    scores = model(tokens, positions=positions, mask=mask, caches=caches.layers)[:, -1]
    caches.end()
    return _chosen(rows, scores)


def _chosen(rows: Sequence[Row], scores: Tensor) -> list[int]:
    """The next token of each row. scores: (rows, vocabulary) logits. They are copied to the host only if a row needs
    sampling."""
    if all(row.sampling.plain for row in rows):
        best, tokens = scores.max(dim=-1)
        if best.isnan().any():  # NaN counts as the largest
            raise FloatingPointError("the model's scores are NaN")
        return tokens.tolist()
    return [row.choose(own) for row, own in zip(rows, scores.cpu(), strict=True)]


def prompt_problem(model: Llama, prompt: Sequence[int], max_new_tokens: int) -> str | None:
    """Why a prompt cannot be continued by so many tokens, as the rest of a sentence; None if it can."""
    vocabulary, context = model.config.vocab_size, model.config.context_length
    assert vocabulary is not None
    if not prompt:
        return "is empty: give at least the token that begins a text."
    if len(prompt) + max_new_tokens > context:
        return (f"has {len(prompt)} tokens; with {max_new_tokens} new ones it exceeds the context_length of "
                f"{context}.")
    if min(prompt) < 0 or max(prompt) >= vocabulary:
        return f"has token ids outside 0 .. {vocabulary - 1}."
    return None
