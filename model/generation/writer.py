"""Texts from prompts, several at once, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

from model.generation.batch import Batch, End, Row
from model.generation.sampling import Sampling
from model.generation.text import TextStream
from model.llama import Llama


@dataclass(frozen=True)
class Piece:
    """What is new of a text.

    Attributes:
        key: of the text, as it was begun.
        text: to be put behind the pieces before; may be empty.
        tokens: new tokens of the text so far, those of a stop string among them.
        end: why this is its last piece: "stop" (a stop string or a stop id), "length"; None while it goes on.
    """

    key: Hashable
    text: str
    tokens: int
    end: End | None


class Writer:
    """Texts that a model writes at the same time; each may be begun and dropped while others go on.

    Args:
        model: see `Batch`.
        token_bytes: the UTF-8 bytes that a token stands for, b"" for one that stands for no text.
    """

    def __init__(self, model: Llama, token_bytes: Callable[[int], bytes]) -> None:
        self.batch, self.token_bytes = Batch(model), token_bytes
        self._texts: dict[Hashable, tuple[Row, TextStream]] = {}
        self._keys: dict[int, Hashable] = {}  # by the identity of a row

    def begin(self, key: Hashable, prompt: Sequence[int], sampling: Sampling) -> None:
        """Continue a prompt from the next step on. Raises ValueError as `Batch.add`."""
        row = self.batch.add(prompt, sampling)
        self._texts[key], self._keys[id(row)] = (row, TextStream(sampling.stop)), key

    def drop(self, key: Hashable) -> None:
        """Do not continue a text any more; one that has ended, or was never begun, is none."""
        if key in self._texts:
            row, _ = self._texts.pop(key)
            del self._keys[id(row)]
            self.batch.drop(row)

    def __len__(self) -> int:
        return len(self._texts)

    def step(self) -> list[Piece]:
        """One forward pass for all texts: the pieces that have text or are the last of theirs.

        Raises FloatingPointError where the model's scores are NaN.
        """
        pieces = []
        for row, token in self.batch.step():
            key = self._keys[id(row)]
            text = self._texts[key][1]
            new = text.add(self.token_bytes(token)) if token is not None else ""
            end: End | None = "stop" if text.stopped else row.end
            if end is not None:
                new += text.finish()
                if text.stopped:  # by the last characters, which were broken
                    end = "stop"
                self.drop(key)
            if new or end:
                pieces.append(Piece(key, new, len(row.tokens), end))
        return pieces


def stream(
    model: Llama,
    token_bytes: Callable[[int], bytes],
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[Sampling],
) -> Iterator[Piece]:
    """Continue all prompts together; the pieces as soon as they are certain, keyed by the prompts' numbers.

    Raises ValueError as `Batch.add`, FloatingPointError where the model's scores are NaN.
    """
    writer = Writer(model, token_bytes)
    for number, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        writer.begin(number, prompt, sampling)
    while len(writer):
        yield from writer.step()
