"""One more token for each of several sequences, in one forward pass for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from drover.model.attention.module import KeyValueCache
from drover.model.generation.cache import RowCaches
from drover.model.generation.sampling import Sampling, draw, penalised
from drover.model.llama import Llama

End = Literal["stop", "length", "failed"]


class Row:
    """A sequence that is being continued.

    Attributes:
        prompt: its first ids.
        sampling: its settings.
        tokens: the new ids so far, without the one that stopped it.
        end: "stop" after one of its stop_ids, "length" after max_tokens, "failed" if its logits are NaN, None while it
            continues.
    """

    def __init__(self, prompt: Sequence[int], sampling: Sampling) -> None:
        self.prompt, self.sampling = list(prompt), sampling
        self.tokens: list[int] = []
        self.end: End | None = None
        self._generator = torch.Generator(device="cpu").manual_seed(sampling.seed)

    def choose(self, scores: Tensor) -> int | None:
        """The next token by the row's settings; None if the logits are NaN. scores: (vocabulary,) logits on the CPU."""
        if self.sampling.repetition_penalty != 1:
            seen = torch.tensor([*self.prompt, *self.tokens])
            scores = penalised(scores, seen, self.sampling.repetition_penalty)
        try:
            return draw(scores, self.sampling, self._generator)
        except FloatingPointError:
            return None

    def take(self, token: int | None) -> bool:
        """Add the next token (None: its logits are NaN). Returns whether it belongs to the text."""
        if token is None:
            self.end = "failed"
            return False
        if token in self.sampling.stop_ids:
            self.end = "stop"
            return False
        self.tokens.append(token)
        if len(self.tokens) == self.sampling.max_tokens:
            self.end = "length"
        return True


class Batch:
    """Sequences that one model continues together. They may be added and dropped between passes.

    A row's tokens depend only on its prompt and settings, except for rounding: the order of sums changes with the
    number of rows. A prompt is read alone, without padding, and has its own random numbers.

    Args:
        model: whole on its device, in evaluation mode.
    """

    def __init__(self, model: Llama) -> None:
        self.model = model
        self._device = model.tok_embeddings.weight.device
        self._dtype = model.tok_embeddings.weight.dtype
        self._new: list[Row] = []
        self._running: list[Row] = []  # in the order of the caches' rows
        self._caches = RowCaches(model.config.layers)

    def add(self, prompt: Sequence[int], sampling: Sampling) -> Row:
        """Continue a prompt from the next step on. Raises ValueError if it is empty, has ids outside the vocabulary, or
        is too long for the context."""
        if problem := prompt_problem(self.model, prompt, sampling.max_tokens):
            raise ValueError(f"The prompt {problem}")
        row = Row(prompt, sampling)
        self._new.append(row)
        return row

    @torch.inference_mode()
    def drop(self, row: Row) -> None:
        """Stop continuing a row. Rows that have ended are dropped automatically."""
        if row in self._new:
            self._new.remove(row)
        elif row in self._running:
            place = self._running.index(row)
            self._caches.remove(place)
            last = self._running.pop()
            if last is not row:
                self._running[place] = last

    def __len__(self) -> int:
        return len(self._running) + len(self._new)

    @torch.inference_mode()
    def step(self) -> list[tuple[Row, int | None]]:
        """One more token for every row. Returns each row with its token, or None for a stop id or NaN logits
        (`Row.end`). Rows that ended are no longer in the batch.
        """
        made: list[tuple[Row, int | None]] = []
        if self._running:
            running = list(self._running)
            for row, token in zip(running, self._continued(), strict=True):
                made.append((row, token if row.take(token) else None))
                if row.end is not None:
                    self.drop(row)
        new, self._new = self._new, []
        for row in new:
            token = self._read(row)
            made.append((row, token if row.take(token) else None))
            if row.end is None:
                self._running.append(row)
            else:
                self._caches.remove(len(self._running))
        return made

    def _continued(self) -> list[int | None]:
        """The next token of every running row."""
        tokens = torch.tensor([row.tokens[-1:] for row in self._running], device=self._device)
        positions, mask = self._caches.begin(self._dtype)
        scores = self.model(tokens, positions=positions, mask=mask, caches=self._caches.layers)[:, -1]
        self._caches.end()
        return _chosen(self._running, scores)

    def _read(self, row: Row) -> int | None:
        """Read a prompt into the caches, as their last row; its first token."""
        caches = [KeyValueCache(len(row.prompt)) for _ in self._caches.layers]
        tokens = torch.tensor([row.prompt], device=self._device)
        scores = self.model(tokens, caches=caches, last_only=True)[:, -1]
        self._caches.append(caches)
        return _chosen([row], scores)[0]


def _chosen(rows: Sequence[Row], scores: Tensor) -> list[int | None]:
    """The next token of each row, None if its logits are NaN. scores: (rows, vocabulary) logits. They are copied to the
    host only if a row needs sampling."""
    if all(row.sampling.plain for row in rows):
        best, tokens = scores.max(dim=-1)  # NaN counts as the largest
        return [None if isnan else token for token, isnan in zip(tokens.tolist(), best.isnan().tolist(), strict=True)]
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
