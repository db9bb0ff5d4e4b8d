"""One more token for each of several sequences, in one forward pass for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from model.attention.module import KeyValueCache
from model.generation.cache import RowCaches
from model.generation.sampling import Sampling, draw, penalised
from model.llama import Llama

End = Literal["stop", "length"]


class Row:
    """A sequence that is being continued.

    Attributes:
        prompt: its first ids.
        sampling: its settings.
        tokens: the new ids so far, without the one that stopped it.
        end: "stop" where one of its stop_ids came, "length" where it has all its tokens, None while it goes on.
    """

    def __init__(self, prompt: Sequence[int], sampling: Sampling) -> None:
        self.prompt, self.sampling = list(prompt), sampling
        self.tokens: list[int] = []
        self.end: End | None = None
        self._generator: torch.Generator | None = None

    def choose(self, scores: Tensor) -> int:
        """The next token by the row's settings. scores: (vocabulary,) on the CPU."""
        if self.sampling.repetition_penalty != 1:
            seen = torch.tensor([*self.prompt, *self.tokens])
            scores = penalised(scores, seen, self.sampling.repetition_penalty)
        if self._generator is None:
            self._generator = torch.Generator(device="cpu").manual_seed(self.sampling.seed)
        return draw(scores, self.sampling, self._generator)

    def take(self, token: int) -> bool:
        """Count the next token; whether it belongs to the text."""
        if token in self.sampling.stop_ids:
            self.end = "stop"
            return False
        self.tokens.append(token)
        if len(self.tokens) == self.sampling.max_tokens:
            self.end = "length"
        return True


class Batch:
    """Sequences that one model continues together; they come and go between the passes.

    What a row becomes depends on nothing but its prompt and settings, up to the rounding of sums whose order changes
    with the number of rows: a prompt is read alone, without padding, and its random numbers are its own.

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
        """Continue a prompt from the next step on. Raises ValueError for one that is empty, has ids that the model does
        not know, or leaves too little room in the context."""
        if problem := prompt_problem(self.model, prompt, sampling.max_tokens):
            raise ValueError(f"The prompt {problem}")
        row = Row(prompt, sampling)
        self._new.append(row)
        return row

    @torch.inference_mode()
    def drop(self, row: Row) -> None:
        """Do not continue a row any more. One that has ended has gone by itself."""
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
        """A further token for every row: each with the token that it got, None where that was one of its stop_ids.
        Rows that ended with it are not in the batch any more.

        Raises FloatingPointError where the model's scores are NaN.
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

    def _continued(self) -> list[int]:
        """The next token of every running row."""
        tokens = torch.tensor([row.tokens[-1:] for row in self._running], device=self._device)
        positions, mask = self._caches.begin(self._dtype)
        scores = self.model(tokens, positions=positions, mask=mask, caches=self._caches.layers)[:, -1]
        self._caches.end()
        return _chosen(self._running, scores)

    def _read(self, row: Row) -> int:
        """Read a prompt into the caches, as their last row; its first token."""
        length = len(row.prompt)
        caches = [KeyValueCache(length) for _ in self._caches.layers]
        tokens = torch.tensor([row.prompt], device=self._device)
        scores = self.model(tokens, caches=caches, last_only=True)[:, -1]
        self._caches.append(caches)
        return _chosen([row], scores)[0]


def _chosen(rows: Sequence[Row], scores: Tensor) -> list[int]:
    """The next token of each row. scores: (rows, vocabulary); all of them leave the device only where one is needed."""
    if all(row.sampling.plain for row in rows):
        best, tokens = scores.max(dim=-1)
        if best.isnan().any():
            raise FloatingPointError("the model's scores are NaN")
        chosen: list[int] = tokens.tolist()
        return chosen
    return [row.choose(own) for row, own in zip(rows, scores.cpu(), strict=True)]


def prompt_problem(model: Llama, prompt: Sequence[int], max_new_tokens: int) -> str | None:
    """Why a prompt cannot be continued by so many tokens, as the rest of a sentence; None where it can."""
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
