"""Texts from prompts, several at once, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

from drover.model.generation.batch import Batch, End, Row
from drover.model.generation.sampling import Sampling
from drover.model.generation.scores import TokenScore
from drover.model.generation.text import TextStream
from drover.model.llama import Llama


@dataclass(frozen=True)
class ScoredToken:
    """A token's score, and the character of its text at which the token begins (one that goes on with a character that
    is not whole yet: at that character)."""

    score: TokenScore
    start: int


@dataclass(frozen=True)
class Piece:
    """What is new of a text.

    Attributes:
        key: of the text, as it was begun.
        text: to be put behind the pieces before; may be empty.
        tokens: new tokens of the text so far, those of a stop string among them.
        end: why this is its last piece: "stop" (a stop string or a stop id), "length", "failed" (the model's scores are
            NaN); None while it goes on.
        scores: where `Sampling.logprobs` asks for them, of the tokens that are certain since the piece before: those
            that begin in the text, and the stop id behind its end; none that only belongs to a stop string.
        prompt_scores: with the first piece, `Row.prompt_scores`.
    """

    key: Hashable
    text: str
    tokens: int
    end: End | None
    scores: tuple[ScoredToken, ...] = ()
    prompt_scores: tuple[TokenScore, ...] = ()


class _Text:
    """One that is being written."""

    def __init__(self, row: Row) -> None:
        self.row, self.stream = row, TextStream(row.sampling.stop)
        self._scored: list[ScoredToken] = []
        self._begun = False

    def piece(self, key: Hashable, content: bytes | None) -> Piece:
        """What is new with the next token's UTF-8 bytes (None: it was a stop id). One without text and end says nothing
        and need not be given out."""
        row, stream, new = self.row, self.stream, ""
        start = stream.length
        if content is not None:
            new = stream.add(content)
        end: End | None = "stop" if stream.stopped else row.end
        if end is not None:
            new += stream.finish()
            if stream.stopped:  # by the last characters, which were broken
                end = "stop"
        if row.sampling.logprobs is not None and row.end != "failed":
            self._scored.append(ScoredToken(row.scores[-1], stream.length if content is None else start))
        if not (new or end):
            return Piece(key, "", len(row.tokens), None)
        whole = end is not None and not stream.stopped
        certain = [token for token in self._scored if whole or token.start < stream.given]
        self._scored = self._scored[len(certain):]
        prompt, self._begun = () if self._begun else tuple(row.prompt_scores), True
        return Piece(key, new, len(row.tokens), end, tuple(certain), prompt)


class Writer:
    """Texts that a model writes at the same time; each may be begun and dropped while others go on.

    Args:
        model: see `Batch`.
        token_bytes: the UTF-8 bytes that a token stands for, b"" for one that stands for no text.
    """

    def __init__(self, model: Llama, token_bytes: Callable[[int], bytes]) -> None:
        self.batch, self.token_bytes = Batch(model), token_bytes
        self._texts: dict[Hashable, _Text] = {}
        self._keys: dict[int, Hashable] = {}  # by the identity of a row

    def begin(self, key: Hashable, prompt: Sequence[int], sampling: Sampling) -> None:
        """Continue a prompt from the next step on. Raises ValueError as `Batch.add`."""
        row = self.batch.add(prompt, sampling)
        self._texts[key], self._keys[id(row)] = _Text(row), key

    def drop(self, key: Hashable) -> None:
        """Do not continue a text any more; one that has ended, or was never begun, is none."""
        if key in self._texts:
            row = self._texts.pop(key).row
            del self._keys[id(row)]
            self.batch.drop(row)

    def __len__(self) -> int:
        return len(self._texts)

    def step(self) -> list[Piece]:
        """One forward pass for all texts: the pieces that have text or are the last of theirs."""
        pieces = []
        for row, token in self.batch.step():
            key = self._keys[id(row)]
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
    """Continue all prompts together; the pieces as soon as they are certain, keyed by the prompts' numbers.

    Raises ValueError as `Batch.add`, FloatingPointError where the model's scores are NaN.
    """
    writer = Writer(model, token_bytes)
    for number, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        writer.begin(number, prompt, sampling)
    while len(writer):
        for piece in writer.step():
            if piece.end == "failed":
                raise FloatingPointError("the model's scores are NaN")
            yield piece
