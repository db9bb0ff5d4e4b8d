"""Texts from prompts, several at once, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from drover.model.generation.batch import Batch, End, Row
from drover.model.generation.sampling import Sampling
from drover.model.generation.text import TextStream
from drover.model.llama import Llama


@dataclass(frozen=True)
class Piece:
    """The next piece of a text.

    Attributes:
        key: of the text, from `Writer.begin`.
        text: to be appended to the pieces before; may be empty.
        tokens: new tokens of the text so far, including those of a stop string.
        end: the reason if this is the last piece: "stop" (a stop string or a stop id), "length", "failed" (the model's
            logits are NaN); None otherwise.
    """

    key: Any
    text: str
    tokens: int
    end: End | None


class _Text:
    """A text in progress."""

    def __init__(self, row: Row) -> None:
        self.row, self.stream = row, TextStream(row.sampling.stop)

    def piece(self, key: Hashable, content: bytes | None) -> Piece:
        """The piece for the next token's UTF-8 bytes (None: it was a stop id). A piece without text and end can be
        skipped."""
        row, stream, new = self.row, self.stream, ""
        if content is not None:
            new = stream.add(content)
        end: End | None = "stop" if stream.stopped else row.end
        if end is not None:
            new += stream.finish()
            if stream.stopped:  # by broken characters at the end
                end = "stop"
        return Piece(key, new, len(row.tokens), end)


class Writer:
    """Texts that a model writes at the same time. Each can be started and dropped while others continue.

    Args:
        model: see `Batch`.
        token_bytes: the UTF-8 bytes of a token, b"" for one without text.
    """

    def __init__(self, model: Llama, token_bytes: Callable[[int], bytes]) -> None:
        self.batch, self.token_bytes = Batch(model), token_bytes
        self._texts: dict[Hashable, _Text] = {}
        self._keys: dict[Row, Hashable] = {}

    def begin(self, key: Hashable, prompt: Sequence[int], sampling: Sampling) -> None:
        """Continue a prompt from the next step on. Raises ValueError as `Batch.add`."""
        row = self.batch.add(prompt, sampling)
        self._texts[key], self._keys[row] = _Text(row), key

    def drop(self, key: Hashable) -> None:
        """Stop continuing a text. Unknown keys and ended texts are ignored."""
        if key in self._texts:
            row = self._texts.pop(key).row
            del self._keys[row]
            self.batch.drop(row)

    def __len__(self) -> int:
        return len(self._texts)

    def step(self) -> list[Piece]:
        """One forward pass for all texts. Returns the pieces that have text or end one."""
        pieces = []
        for row, token in self.batch.step():
            key = self._keys[row]
            piece = self._texts[key].piece(key, None if token is None else self.token_bytes(token))
            if piece.end is not None:
                self.drop(key)
            if piece.text or piece.end:
                pieces.append(piece)
        return pieces


def stream(
    model: Llama,
    token_bytes: Callable[[int], bytes],
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[Sampling],
) -> Iterator[Piece]:
    """Continue all prompts together. Yields pieces as soon as they are certain, keyed by the prompts' numbers.

    Raises ValueError as `Batch.add`, FloatingPointError if the model's logits are NaN.
    """
    writer = Writer(model, token_bytes)
    for number, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        writer.begin(number, prompt, sampling)
    while len(writer):
        for piece in writer.step():
            if piece.end == "failed":
                raise FloatingPointError("the model's scores are NaN")
            yield piece
