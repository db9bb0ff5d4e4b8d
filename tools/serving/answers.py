"""The JSON of answers, in OpenAI's forms."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

from tools.serving.asked import RefusedError


def error_object(error: RefusedError) -> dict[str, Any]:
    """An error's body."""
    return {"error": {"message": str(error), "type": error.kind, "param": error.param, "code": error.code}}


def event(value: Any) -> str:
    """A server-sent event."""
    return f"data: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}\n\n"


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """What was read and written, in tokens."""
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens}


class Form:
    """Answers to one request. chat: in the form of chat completions."""

    def __init__(self, model: str, *, chat: bool) -> None:
        self.chat = chat
        kind = "chat.completion" if chat else "text_completion"
        self._head = {"id": ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12), "object": kind,
                      "created": int(time.time()), "model": model}

    def whole(self, texts: list[str], ends: list[str | None], used: dict[str, int],
              logprobs: Sequence[Any]) -> dict[str, Any]:
        """The answer of a request that does not stream. logprobs: None or the lists of each choice."""
        return {**self._head, "usage": used, "choices": [
            {"index": number, "logprobs": told, "finish_reason": end,
             **({"message": {"role": "assistant", "content": text}} if self.chat else {"text": text})}
            for number, (text, end, told) in enumerate(zip(texts, ends, logprobs, strict=True))]}

    def chunk(self, number: int, text: str, end: str | None, *, first: bool, logprobs: Any) -> dict[str, Any]:
        """A piece of one choice."""
        delta = {**({"role": "assistant"} if first else {}), "content": text}
        return {**self._chunk_head(), "choices": [{"index": number, "logprobs": logprobs, "finish_reason": end,
                                                   **({"delta": delta} if self.chat else {"text": text})}]}

    def last(self, used: dict[str, int]) -> dict[str, Any]:
        """What follows the pieces where `include_usage` asks for it."""
        return {**self._chunk_head(), "choices": [], "usage": used}

    def _chunk_head(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk"} if self.chat else self._head
