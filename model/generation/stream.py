"""Continues prompts: several together, with texts that come piece by piece (`stream`), or one by one (`generate`)."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from drover.model.attention.module import KeyValueCache
from drover.model.generation.sampling import Sampling, draw, penalised
from drover.model.llama import Llama

STEP = 256
"""The capacity grows by so many tokens at least."""


class RowCache:
    """One layer's keys and values, (rows, capacity, kv_heads, head_dim) each. See KeyValueCache."""

    def __init__(self, rows: RowCaches, prompts: Sequence[KeyValueCache]) -> None:
        self._rows = rows
        # Places after a row's end are zero: attention multiplies masked values by zero, which must not give NaN.
        self._keys = _padded([cache.keys for cache in prompts])
        self._values = _padded([cache.values for cache in prompts])

    @property
    def length(self) -> int:
        """Tokens of the longest row."""
        return max(self._rows.lengths)

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append one token to each row, (rows, 1, kv_heads, head_dim) each; returns all so far, (rows, length of the
        longest, kv_heads, head_dim)."""
        capacity, end = self._keys.shape[1], self.length + 1
        if end > capacity:
            more = (0, 0, 0, 0, 0, max(STEP, capacity // 2))
            self._keys = pad(self._keys, more)
            self._values = pad(self._values, more)
        self._keys[self._rows.ends] = keys[:, 0]
        self._values[self._rows.ends] = values[:, 0]
        return self._keys[:, :end], self._values[:, :end]

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows."""
        self._keys = self._keys[rows]
        self._values = self._values[rows]


class RowCaches:
    """Every row begins at place 0. Places after its end are masked.

    Args:
        prompts: the caches of each row's prompt, one for each layer, with a batch of one.

    Attributes:
        lengths: tokens in each row.
        ends: row numbers and the places of their next tokens, (rows,) int64 each, as indices.
        layers: the cache of each layer, for `Llama.forward`.
    """

    def __init__(self, prompts: Sequence[Sequence[KeyValueCache]]) -> None:
        self.lengths = [caches[0].length for caches in prompts]
        self.ends: tuple[Tensor, Tensor]
        self.layers = [RowCache(self, caches) for caches in zip(*prompts, strict=True)]

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows. rows: numbers, ascending."""
        if len(rows) < len(self.lengths):
            self.lengths = [self.lengths[row] for row in rows]
            for layer in self.layers:
                layer.keep(rows)

    def begin(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Prepare for one more token in every row. Returns positions and mask for the forward pass.

        positions: (rows, 1) int64. mask: (rows, 1, 1, keys), added to the scores: 0 for a row's own tokens and -inf for
        the places after them; None if all rows are equally long. dtype: of queries, keys and values.
        """
        lengths = torch.tensor(self.lengths, device=device)
        positions = lengths.unsqueeze(1)
        self.ends = (torch.arange(len(lengths), device=device), lengths)
        longest = max(self.lengths)
        if min(self.lengths) == longest:
            return positions, None
        behind = torch.arange(longest + 1, device=device) > positions
        mask = torch.zeros(behind.shape, dtype=dtype, device=device).masked_fill_(behind, -torch.inf)
        return positions, mask[:, None, None]

    def end(self) -> None:
        """After the pass: every row has one more token."""
        self.lengths = [length + 1 for length in self.lengths]


def _padded(rows: Sequence[Tensor | None]) -> Tensor:
    """Tensors (1, length, kv_heads, head_dim) as one (rows, longest, kv_heads, head_dim), with zeros at the ends."""
    return pad_sequence([row[0] for row in rows if row is not None], batch_first=True)


class TextStream:
    """The text of one sequence, up to the one of its stop strings that is complete first.

    The beginning of a possible stop string, and the first bytes of an incomplete character, are held back until they
    are certain.

    Args:
        stop: strings that end the text, wherever tokens begin and end.

    Attributes:
        stopped: whether a stop string was found.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self.stopped = False
        self._stop = tuple(stop)
        self._held = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, content: bytes) -> str:
        """Add UTF-8 bytes. Returns the text that is certain now: all the rest if they complete a stop string."""
        return self._certain(self._decoder.decode(content))

    def finish(self) -> str:
        """Returns the text that was held back, after the last bytes. Bytes of a broken character become U+FFFD."""
        text = self._certain(self._decoder.decode(b"", final=True))
        rest, self._held = self._held, ""
        return text + rest

    def _certain(self, new: str) -> str:
        if self.stopped:
            return ""
        self._held += new
        result = [(place + len(stop), place) for stop in self._stop if (place := self._held.find(stop)) >= 0]
        if result:
            self.stopped = True
            _, place = min(result)  # as if characters came one by one: token boundaries do not matter
            text, self._held = self._held[:place], ""
        else:
            open_end = max((_started_stop(self._held, stop) for stop in self._stop), default=0)
            keep = len(self._held) - open_end
            text, self._held = self._held[:keep], self._held[keep:]
        return text


def _started_stop(text: str, stop: str) -> int:
    """Length of the longest beginning of `stop` at the end of `text`, which does not contain all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((count for count in range(longest, 0, -1) if text.endswith(stop[:count])), 0)


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


def generate(
    model: Llama,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    temperature: float,
    top_p: float,
    seed: int,
    stop_ids: Collection[int],
    use_cache: bool = True,
    multiple_of: int = 1,
    pulse: Callable[[], None] = lambda: None,
) -> list[list[int]]:
    """Continue each prompt by up to max_new_tokens. Returns only the new tokens, without the one that stopped it.

    temperature and top_p are those of `Sampling`. Prompt i has its own generator, seeded by seed + i. So its
    text does not depend on its neighbours, and torch's global generator is not used. use_cache=False recomputes
    everything for each token; the result is the same except for rounding. multiple_of: without a cache, sequences are
    padded at their end to multiples of this length, for models that are split along the sequence. pulse: called before
    each pass of the model. All ranks of a split model make the same passes. Raises ValueError for settings out of
    range, and for prompts that are empty or too long, FloatingPointError if the model's logits are NaN.
    """
    assert multiple_of == 1 or not use_cache, "a cache would treat the padding as text"
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be at least 0, not {max_new_tokens}.")
    sampling = Sampling(temperature=temperature, top_p=top_p)
    for index, prompt in enumerate(prompts):
        if problem := prompt_problem(model, prompt, max_new_tokens):
            raise ValueError(f"Prompt {index} {problem}")
    was_training = model.training
    model.eval()
    try:
        results = []
        for index, prompt in enumerate(prompts):
            generator = torch.Generator(device="cpu").manual_seed(seed + index)
            tokens, most = list(prompt), len(prompt) + max_new_tokens
            caches = [KeyValueCache(most) for _ in range(model.config.layers)] if use_cache else None
            while len(tokens) < most:
                pulse()
                token = draw(_scores(model, tokens, caches, multiple_of), sampling, generator)
                if token in stop_ids:
                    break
                tokens.append(token)
            results.append(tokens[len(prompt):])
        return results
    finally:
        model.train(was_training)


@torch.no_grad()
def _scores(model: Llama, tokens: list[int], caches: list[KeyValueCache] | None, multiple_of: int) -> Tensor:
    """Logits of the token after `tokens`, (vocabulary,) on the CPU. caches: of the first tokens; None: from scratch."""
    seen = max(cache.length for cache in caches) if caches else 0  # a pipeline rank fills its own
    new = tokens[seen:]
    padding = [0] * (-len(new) % multiple_of)  # after the text, where no token sees it
    logits = model(torch.tensor([new + padding], device=next(model.parameters()).device), caches=caches)
    return logits[0, len(new) - 1].cpu()
