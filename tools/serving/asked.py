"""Parse and check a request's JSON. One error names everything that is wrong."""

from __future__ import annotations

import codecs
import json
import secrets
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from drover.model.generation.sampling import Sampling
from drover.model.generation.scores import TokenScore
from drover.model.generation.writer import Piece
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Record, parsed_json
from drover.pipeline.evaluation.open_model import OpenedModel
from drover.pipeline.evaluation.prompts import ChatTemplate, prompt_ids, readable_bytes
from drover.tools.serving.worker import RefusedError

MOST_CHOICES, MOST_LOGPROBS = 128, 5
"""OpenAI's limits for n and logprobs."""
MOST_STOPS, LONGEST_STOP = 16, 256
"""Limits of `stop`: strings, and characters of each. The text is searched for them after every token."""
LONGEST_TOKEN, SPARE = 32, 10_000
"""Limit of a text before it is tokenized, in characters: LONGEST_TOKEN for each token of the context, and SPARE for
characters that a tokenizer drops."""
UNSUPPORTED = {"presence_penalty": "take repetition_penalty, or leave it out", "suffix": "leave it out",
               "frequency_penalty": "take repetition_penalty, or leave it out", "logit_bias": "leave it out"}
"""OpenAI's fields that are accepted with their default values only, and what to do instead."""
UNSUPPORTED_IN_CHATS = dict.fromkeys(("echo", "logprobs", "response_format", "tools"), "leave it out")
Lists = dict[str, list[Any]]
"""`logprobs` of a choice: four lists with one entry per token."""
KEYS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def _listed(value: Any) -> Any:
    """Put a single text, or a single list of ids, into a list."""
    ids = isinstance(value, list) and value and all(isinstance(each, int) for each in value)
    return [value] if ids or isinstance(value, str) else value


class Common(BaseModel):
    """Fields of both kinds of request. top_k, min_p and repetition_penalty are not OpenAI's."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str = ""
    max_tokens: int | None = Field(None, ge=0)
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    stream: bool = False
    stream_options: Record = {}
    stop: Annotated[list[Annotated[str, Field(max_length=LONGEST_STOP)]], BeforeValidator(_listed),
                    Field(max_length=MOST_STOPS)] = []
    seed: int | None = None
    user: str = ""
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    echo: bool = False


class AskedCompletion(Common):
    """The body of /v1/completions."""

    prompt: Annotated[list[str | Annotated[list[int], Field(min_length=1)]], BeforeValidator(_listed),
                      Field(min_length=1)]
    best_of: int | None = None


class Message(BaseModel):
    """A message of a chat; other fields are passed to the template."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str
    content: str


class AskedChat(Common):
    """The body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=0)


@dataclass(frozen=True)
class Choice:
    """A text to generate: the prompt's ids and the sampling settings. shown: the prompt's text if `echo` is set.
    telling: builds `logprobs`; None without them."""

    prompt: list[int]
    sampling: Sampling
    shown: str
    telling: Telling | None


@dataclass(frozen=True)
class Asked:
    """A valid request.

    silent: `max_tokens` is 0: one token is generated for each text, and left out of the answer. prompt_tokens: the sum
    over the different prompts.
    """

    choices: list[Choice]
    silent: bool
    stream: bool
    include_usage: bool
    prompt_tokens: int


Form = TypeVar("Form", AskedCompletion, AskedChat)


class Reader:
    """Parses requests to one model.

    Args:
        name: what clients call the model.
        ending_ids: ids that end a text.
        template: for chats; None if the tokenizer has none.
    """

    def __init__(self, opened: OpenedModel, name: str, ending_ids: frozenset[int],
                 template: ChatTemplate | None) -> None:
        self.opened, self.name, self.ending_ids, self.template = opened, name, ending_ids, template

    def completion(self, body: bytes) -> Asked:
        """Parse a body of /v1/completions. Raises RefusedError."""
        asked = self._checked(AskedCompletion, body, UNSUPPORTED)
        if asked.best_of not in (None, asked.n):
            raise RefusedError("best_of is not supported: ask for n and choose.", param="best_of")
        prompts = asked.prompt
        self._refuse_long([prompt for prompt in prompts if isinstance(prompt, str)], "prompt")
        ids = [prompt_ids(self.opened, prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        vocabulary = self.opened.config.vocab_size or 0
        if any(not 0 <= token < vocabulary for one in ids for token in one):
            raise RefusedError(f"prompt has token ids outside 0 .. {vocabulary - 1}.", param="prompt")
        texts = [prompt if isinstance(prompt, str) else self._text(prompt) for prompt in prompts]
        return self._asked(asked, ids, texts, 16 if asked.max_tokens is None else asked.max_tokens)

    def chat(self, body: bytes) -> Asked:
        """Parse a body of /v1/chat/completions. Raises RefusedError."""
        assert self.template is not None
        asked = self._checked(AskedChat, body, UNSUPPORTED | UNSUPPORTED_IN_CHATS)
        self._refuse_long(["".join(message.content for message in asked.messages)], "messages")
        try:
            ids = self.template.ids([message.model_dump() for message in asked.messages])
        except UserError as error:
            raise RefusedError(str(error), param="messages") from None
        room = max(1, self.opened.config.context_length - len(ids))
        said = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
        return self._asked(asked, [ids], [""], room if said is None else said)

    def _checked(self, form: type[Form], body: bytes, unsupported: dict[str, str]) -> Form:
        try:
            said = parsed_json(body)
            json.dumps(said, ensure_ascii=False).encode()  # a lone surrogate is half of a character
        except UnicodeEncodeError:
            raise RefusedError("The body has half of a character: a surrogate without its pair.") from None
        except ValueError as error:
            raise RefusedError(f"The body is not JSON: {error}.") from None
        if not isinstance(said, dict):
            raise RefusedError("The body must be a JSON object.")
        for field, instead in unsupported.items():
            if said.pop(field, None):
                raise RefusedError(f"{field} is not supported: {instead}.", param=field)
        try:
            asked = form.model_validate({key: value for key, value in said.items() if value is not None})
        except ValidationError as error:
            names = [".".join(map(str, problem["loc"])) for problem in error.errors()]
            words = {"extra_forbidden": "{} is not a known field.", "missing": "{} is missing."}
            raise RefusedError(" ".join(words.get(problem["type"], f"{{}}: {problem['msg']}.").format(name)
                                        for name, problem in zip(names, error.errors(), strict=True)),
                               param=names[0]) from None
        if asked.model not in ("", self.name):
            raise RefusedError(f"The model {asked.model!r} is not here; this server has {self.name!r}.", status=404,
                               code="model_not_found", param="model")
        return asked

    def _refuse_long(self, texts: list[str], param: str) -> None:
        """Refuse long texts before they are tokenized, which takes seconds per megabyte."""
        if len(texts) > MOST_CHOICES:
            raise RefusedError(f"{param} has {len(texts)} texts; at most {MOST_CHOICES} are taken.", param=param)
        context = self.opened.config.context_length
        if any(len(text) > SPARE + LONGEST_TOKEN * context for text in texts):
            raise RefusedError(f"{param} has a text of more than {SPARE + LONGEST_TOKEN * context} characters, too "
                               f"long for {context} tokens.", code="context_length_exceeded", param=param)

    def _asked(self, asked: Common, prompts: list[list[int]], texts: list[str], max_tokens: int) -> Asked:
        seed = asked.seed if asked.seed is not None else secrets.randbelow(2**62)
        try:
            sampling = Sampling(max_tokens=max(1, max_tokens), temperature=asked.temperature, top_k=asked.top_k,
                                top_p=asked.top_p, min_p=asked.min_p, seed=seed, stop=tuple(asked.stop),
                                repetition_penalty=asked.repetition_penalty, stop_ids=self.ending_ids,
                                logprobs=asked.logprobs, prompt_logprobs=asked.logprobs if asked.echo else None)
        except ValueError as error:
            raise RefusedError(str(error), param=str(error).split(" ")[0]) from None
        context = self.opened.config.context_length
        for ids in prompts:
            if len(ids) + sampling.max_tokens > context:
                raise RefusedError(f"The prompt has {len(ids)} tokens; with max_tokens {max_tokens} that exceeds the "
                                   f"model's context of {context}. Shorten it, or give a smaller max_tokens.",
                                   code="context_length_exceeded", param="max_tokens")
        choices = list[Choice]()
        for ids, text in zip(prompts, texts, strict=True):
            shown, told = (text, ids) if asked.echo else ("", [])
            choices += [Choice(ids, replace(sampling, seed=(seed + len(choices) + number) % 2**63), shown,
                               None if asked.logprobs is None else Telling(self.opened, told, shown))
                        for number in range(asked.n)]
        return Asked(choices, max_tokens == 0, asked.stream, bool(asked.stream_options.get("include_usage")),
                     sum(map(len, prompts)))

    def _text(self, ids: list[int]) -> str:
        return b"".join(map(readable_bytes(self.opened.tokenizer), ids)).decode("utf-8", errors="replace")


class Telling:
    """Builds `logprobs` of one choice, piece by piece.

    Args:
        prompt: ids that come first (`echo`). The first of them has no probability.
        shown: their text.
    """

    def __init__(self, opened: OpenedModel, prompt: list[int], shown: str) -> None:
        self._special = {token: name for name, token in opened.tokenizer.special_tokens.items()}
        self._content, self._prompt, self._shown = readable_bytes(opened.tokenizer), prompt, shown

    def of(self, piece: Piece) -> Lists:
        """The lists for a piece."""
        found: Lists = {key: [] for key in KEYS}
        decoder, length, starts = codecs.getincrementaldecoder("utf-8")(errors="replace"), 0, list[int]()
        for token in self._prompt:
            starts.append(min(length, len(self._shown)))
            length += len(decoder.decode(self._content(token)))
        if self._prompt:
            self._add(found, self._prompt[0], None, None, starts[0])
        scores = [*zip(piece.prompt_scores, starts[1:], strict=bool(self._prompt)),
                  *((token.score, len(self._shown) + token.start) for token in piece.scores)]
        for score, start in scores:
            self._add(found, score.token, score.logprob, self._top(score), start)
        self._prompt = []
        return found

    def _add(self, found: Lists, token: int, *values: Any) -> None:
        for key, value in zip(KEYS, (self._name(token), *values), strict=True):
            found[key].append(value)

    def _top(self, score: TokenScore) -> dict[str, float]:
        top: dict[str, float] = {}
        for token, logprob in (*score.top, (score.token, score.logprob)):
            top.setdefault(self._name(token), logprob)  # of two ids with one name, the more probable
        return top

    def _name(self, token: int) -> str:
        """The name of an id: its text; `bytes:\\xf0\\x9f`, as OpenAI has it, if its bytes are not complete characters;
        the name of a special token; else `token_id:N`."""
        content = self._content(token)
        try:
            return content.decode() or self._special.get(token, f"token_id:{token}")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
