"""Log-probabilities of tokens in the form of OpenAI's completions: four lists, an entry a token."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any

from model.generation.scores import TokenScore
from model.generation.writer import Piece
from pipeline.evaluation.open_model import OpenedModel
from pipeline.evaluation.prompts import readable_bytes

MOST_LOGPROBS = 5
"""OpenAI's limit for logprobs."""
Lists = dict[str, list[Any]]
KEYS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def token_names(opened: OpenedModel) -> Callable[[int], str]:
    """How an id is written: its text; `bytes:\\xf0\\x9f`, as OpenAI does, where that is no whole characters; the name
    of a special token; `token_id:N` for an id that stands for nothing."""
    special = {token: name for name, token in opened.tokenizer.special_tokens.items()}
    content_of = readable_bytes(opened)

    def name(token: int) -> str:
        content = content_of(token)
        try:
            return content.decode() or special.get(token, f"token_id:{token}")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
    return name


class Telling:
    """What is told of one choice's tokens, piece by piece.

    Args:
        names: how an id is written.
        token_bytes: the UTF-8 bytes that it stands for.
        prompt: ids that are told first (`echo`), of which the first is given and has no probability.
        shown: their text.
    """

    def __init__(self, names: Callable[[int], str], token_bytes: Callable[[int], bytes], prompt: Sequence[int],
                 shown: str) -> None:
        self._names, self._token_bytes, self._prompt, self._shown = names, token_bytes, prompt, shown

    def of(self, piece: Piece) -> Lists:
        """The lists for a piece."""
        found = self._of_prompt(piece.prompt_scores) if self._prompt else nothing()
        self._prompt = ()
        for token in piece.scores:
            self._add(found, token.score, len(self._shown) + token.start)
        return found

    def _of_prompt(self, scores: Sequence[TokenScore]) -> Lists:
        decoder, length = codecs.getincrementaldecoder("utf-8")(errors="replace"), 0
        starts = []
        for token in self._prompt:
            starts.append(min(length, len(self._shown)))
            length += len(decoder.decode(self._token_bytes(token)))
        found: Lists = {"tokens": [self._names(self._prompt[0])], "token_logprobs": [None], "top_logprobs": [None],
                        "text_offset": starts[:1]}
        for score, start in zip(scores, starts[1:], strict=True):
            self._add(found, score, start)
        return found

    def _add(self, found: Lists, score: TokenScore, start: int) -> None:
        top: dict[str, float] = {}
        for token, logprob in (*score.top, (score.token, score.logprob)):
            top.setdefault(self._names(token), logprob)  # of two ids that are written alike the likelier
        for key, value in zip(KEYS, (self._names(score.token), score.logprob, top, start), strict=True):
            found[key].append(value)


def nothing() -> Lists:
    """The lists without a token."""
    return {key: [] for key in KEYS}


def joined(parts: Sequence[Lists]) -> Lists:
    """The lists of several pieces in one."""
    return {key: [value for part in parts for value in part[key]] for key in KEYS}
