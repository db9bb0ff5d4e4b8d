"""What a request asks for: its JSON checked, with everything that is wrong said at once."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from model.generation.sampling import Sampling
from pipeline.errors import UserError
from pipeline.evaluation.open_model import OpenedModel
from pipeline.evaluation.prompts import ChatTemplate, prompt_ids, readable_bytes
from tools.serving.logprobs import MOST_LOGPROBS, Telling, token_names

MOST_CHOICES = 128
"""OpenAI's limit for n."""
MOST_STOPS, LONGEST_STOP = 16, 256
"""Of a request: strings in `stop`, and characters of each. They are looked for after every token."""
SPARE = 10_000
"""Characters, white space for example, that a tokenizer may leave out of a text."""


class RefusedError(Exception):
    """A request that is answered with an error. status: of HTTP. kind, code, param: OpenAI's `type`, `code` and
    `param`. retry_after_s: when it may be worth trying again."""

    def __init__(self, message: str, status: int = 400, kind: str = "invalid_request_error", code: str | None = None,
                 param: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.code, self.param, self.retry_after_s = status, kind, code, param, retry_after_s


class Common(BaseModel):
    """What both kinds of request may say. top_k, min_p and repetition_penalty are not OpenAI's."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str = ""
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    n: int = 1
    stream: bool = False
    stream_options: dict[str, Any] = {}
    stop: Any = None
    seed: int | None = None
    user: str = ""
    presence_penalty: float = 0
    frequency_penalty: float = 0
    logit_bias: Literal[None] = None


class AskedCompletion(Common):
    """The body of /v1/completions."""

    prompt: Any
    echo: bool = False
    best_of: int | None = None
    suffix: Literal[None] = None
    logprobs: int | None = None


class AskedChat(Common):
    """The body of /v1/chat/completions."""

    messages: Any
    max_completion_tokens: int | None = None
    logprobs: Literal[False] = False
    response_format: Literal[None] = None
    tools: Literal[None] = None


@dataclass(frozen=True)
class Asked:
    """A request that can be served.

    prompts: ids, one entry a choice. samplings: of each choice. shown: the text that each choice begins with (`echo`).
    prompt_tokens: of the different prompts together. tellings: how the tokens of each choice are told, where
    `logprobs` asks for them.
    """

    prompts: list[list[int]]
    samplings: list[Sampling]
    shown: list[str]
    stream: bool
    include_usage: bool
    prompt_tokens: int
    tellings: list[Telling] | None = None


class Reader:
    """Reads requests to one model.

    Args:
        name: what clients call the model.
        ending_ids: ids that end a text.
        template: for chats, where there is one.
    """

    def __init__(self, opened: OpenedModel, name: str, ending_ids: frozenset[int],
                 template: ChatTemplate | None) -> None:
        self.opened, self.name, self.ending_ids, self.template = opened, name, ending_ids, template

    def completion(self, body: bytes) -> Asked:
        """A body of /v1/completions. Raises RefusedError."""
        asked = self._checked(AskedCompletion, body)
        assert isinstance(asked, AskedCompletion)
        if asked.best_of not in (None, asked.n):
            raise RefusedError("best_of is not supported: ask for n and choose.", param="best_of")
        prompts = self._prompts(asked.prompt)
        self._refuse_long([prompt for prompt in prompts if isinstance(prompt, str)], "prompt")
        ids = [prompt_ids(self.opened, prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        shown = [prompt if isinstance(prompt, str) else self._text(prompt) for prompt in prompts]
        if not 0 <= (asked.logprobs or 0) <= MOST_LOGPROBS:
            raise RefusedError(f"logprobs must be from 0 to {MOST_LOGPROBS}, not {asked.logprobs}.", param="logprobs")
        found = self._asked(asked, ids, shown if asked.echo else [""] * len(ids),
                            16 if asked.max_tokens is None else asked.max_tokens)
        return found if asked.logprobs is None else self._told(found, asked.logprobs, asked.echo)

    def chat(self, body: bytes) -> Asked:
        """A body of /v1/chat/completions. Raises RefusedError."""
        assert self.template is not None
        asked = self._checked(AskedChat, body)
        assert isinstance(asked, AskedChat)
        wanted = "messages must be a list of objects with role and content, both strings, and at least one."
        if not isinstance(asked.messages, list) or not asked.messages or not all(map(_is_message, asked.messages)):
            raise RefusedError(wanted, param="messages")
        self._refuse_long(["".join(message["content"] for message in asked.messages)], "messages")
        try:
            ids = self.template.ids(asked.messages)
        except UserError as error:
            raise RefusedError(str(error), param="messages") from None
        room = max(1, self.opened.config.context_length - len(ids))
        said = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
        return self._asked(asked, [ids], [""], room if said is None else said)

    def _told(self, asked: Asked, count: int, echo: bool) -> Asked:
        """The same with `count` log-probabilities a token, of the prompts' tokens too where these are shown."""
        names, content = token_names(self.opened), readable_bytes(self.opened)
        return replace(asked, samplings=[replace(sampling, logprobs=count, prompt_logprobs=count if echo else None)
                                         for sampling in asked.samplings],
                       tellings=[Telling(names, content, ids if echo else (), text)
                                 for ids, text in zip(asked.prompts, asked.shown, strict=True)])

    def _checked(self, form: type[Common], body: bytes) -> Common:
        try:
            said = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise RefusedError(f"The body is no JSON: {error}.") from None
        if not isinstance(said, dict):
            raise RefusedError("The body must be a JSON object.")
        try:
            asked = form.model_validate({key: value for key, value in said.items() if value is not None})
        except ValidationError as error:
            wrong = [_sentence(problem) for problem in error.errors()]
            first = error.errors()[0]["loc"]
            raise RefusedError(" ".join(wrong), param=str(first[0]) if first else None) from None
        for field in ("presence_penalty", "frequency_penalty"):
            if getattr(asked, field):
                raise RefusedError(f"{field} is not supported: take repetition_penalty, or leave it out.", param=field)
        if asked.model not in ("", self.name):
            raise RefusedError(f"The model {asked.model!r} is not here; this server has {self.name!r}.", status=404,
                               code="model_not_found", param="model")
        return asked

    def _prompts(self, prompt: Any) -> list[Any]:
        """Strings and lists of ids, one a prompt."""
        if isinstance(prompt, str) or _are_ids(prompt):
            return [prompt]
        if isinstance(prompt, list) and prompt and all(isinstance(each, str) or _are_ids(each) for each in prompt):
            return prompt
        raise RefusedError("prompt must be a string, a list of token ids, or a list of such, and not be empty.",
                           param="prompt")

    @cached_property
    def _most_characters(self) -> int:
        """More than so many are not made into tokens: as many as the context's tokens hold at most, each the longest
        of the vocabulary, and some that a tokenizer drops."""
        content = readable_bytes(self.opened)
        longest = max(len(content(id)) for id in range(self.opened.config.vocab_size or 0))
        return SPARE + longest * self.opened.config.context_length

    def _refuse_long(self, texts: list[str], param: str) -> None:
        """Before they are made into tokens, which takes a tokenizer seconds for megabytes."""
        if len(texts) > MOST_CHOICES:
            raise RefusedError(f"{param} has {len(texts)} texts; at most {MOST_CHOICES} are taken.", param=param)
        if any(len(text) > self._most_characters for text in texts):
            raise RefusedError(f"{param} has a text of more than {self._most_characters} characters, too long for "
                               f"{self.opened.config.context_length} tokens.", code="context_length_exceeded",
                               param=param)

    def _text(self, ids: list[int]) -> str:
        return b"".join(map(readable_bytes(self.opened), ids)).decode("utf-8", errors="replace")

    def _asked(self, asked: Common, prompts: list[list[int]], shown: list[str], max_tokens: int) -> Asked:
        if not 1 <= asked.n <= MOST_CHOICES:
            raise RefusedError(f"n must be from 1 to {MOST_CHOICES}, not {asked.n}.", param="n")
        stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
        if not isinstance(stop, list) or not all(isinstance(each, str) for each in stop):
            raise RefusedError("stop must be a string or a list of strings.", param="stop")
        if len(stop) > MOST_STOPS or any(len(each) > LONGEST_STOP for each in stop):
            raise RefusedError(f"stop must be at most {MOST_STOPS} strings of at most {LONGEST_STOP} characters.",
                               param="stop")
        seed = asked.seed if asked.seed is not None else secrets.randbelow(2**62)
        try:
            sampling = Sampling(max_tokens=max_tokens, temperature=asked.temperature, top_k=asked.top_k,
                                top_p=asked.top_p, min_p=asked.min_p, seed=seed, stop=tuple(stop),
                                repetition_penalty=asked.repetition_penalty, stop_ids=self.ending_ids)
        except ValueError as error:
            raise RefusedError(str(error), param=str(error).split(" ")[0]) from None
        context, vocabulary = self.opened.config.context_length, self.opened.config.vocab_size or 0
        for ids in prompts:
            if len(ids) + max_tokens > context:
                raise RefusedError(f"The prompt has {len(ids)} tokens; with max_tokens {max_tokens} that exceeds the "
                                   f"model's context of {context}. Shorten it, or ask for fewer tokens.",
                                   code="context_length_exceeded", param="max_tokens")
            if not ids or min(ids) < 0 or max(ids) >= vocabulary:
                raise RefusedError(f"prompt has token ids outside 0 .. {vocabulary - 1}.", param="prompt")
        choices = [(ids, text) for ids, text in zip(prompts, shown, strict=True) for _ in range(asked.n)]
        return Asked(prompts=[ids for ids, _ in choices], shown=[text for _, text in choices],
                     samplings=[replace(sampling, seed=(seed + number) % 2**63) for number in range(len(choices))],
                     stream=asked.stream, include_usage=bool(asked.stream_options.get("include_usage")),
                     prompt_tokens=sum(map(len, prompts)))


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def _sentence(problem: Any) -> str:
    name = ".".join(map(str, problem["loc"]))
    if problem["type"] == "extra_forbidden":
        return f"{name} is not known here."
    if problem["type"] in ("literal_error", "none_required"):
        return f"{name} is not supported: leave it out."
    if problem["type"] == "missing":
        return f"{name} is missing."
    return f"{name}: {problem['msg']}."


Read = Callable[[bytes], Asked]
"""`Reader.completion` or `Reader.chat`."""
