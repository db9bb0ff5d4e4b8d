"""Our model as a model of the lm-evaluation-harness.

The harness on every rank runs as if it were alone, with the same requests in the same order. This module then
distributes the requests among the ranks, which hold the whole model or a shard of it. (The harness's own work sharing
lets a rank without documents fail while others wait for it forever.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partialmethod
from typing import Any, TypeVar

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from drover.model.devices import exact
from drover.model.generation.sampling import Sampling
from drover.model.generation.stream import stream
from drover.pipeline.core.errors import UserError
from drover.pipeline.evaluation.placing import Placed
from drover.pipeline.evaluation.prompts import readable_bytes
from drover.pipeline.parallel.ranks import ALONE, Ranks
from drover.pipeline.tokenization.base import Tokenizer

LOGITS_IN_MEMORY = 2**27
"""Most logits of one forward pass (0.5 GB in float32); batches are made smaller to stay below."""
NEW_TOKENS = 256
"""Length of a generated answer if the task does not set one."""

Request = tuple[tuple[str, str] | None, list[int], list[int]]
"""((context, continuation) or None for a window of a text, context ids, continuation ids)"""
Pair = tuple[list[int], list[int]]
"""(context ids, continuation ids)"""
Given = TypeVar("Given")
Result = TypeVar("Result")


class HarnessModel(TemplateLM):
    """A Llama and its tokenizer.

    Every text follows a BOS, as in training. A context that is too long loses its beginning after the BOS;
    `truncated` counts these.

    Args:
        placed: the model.
        tokenizer: its tokenizer.
        batch: most sequences in a forward pass.
        length: tokens per forward pass; None: the model's context.
        ranks: share the work, each with the model.
        ends: ids that end a generated text besides EOS.

    Raises:
        UserError: the length is more than the model's context.
    """

    def __init__(self, placed: Placed, tokenizer: Tokenizer, *, batch: int, length: int | None = None,
                 ranks: Ranks = ALONE, ends: Collection[int] = ()) -> None:
        super().__init__()
        self.placed, self.model, self._tokenizer, self.batch = placed, placed.model, tokenizer, batch
        context = self.model.config.context_length
        self.length = length or context
        if self.length > context:
            raise UserError(f"Windows of {length} tokens are more than the model's context of {context}.")
        self.ranks, self.truncated = ranks, 0
        self._stop_ids = {tokenizer.eos_id, *ends}
        self._device = next(self.model.parameters()).device

    @property
    def eot_token_id(self) -> int:
        """End of a document."""
        return self._tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """BOS, which replaces an empty context."""
        return self._tokenizer.bos_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Ids of a text, without BOS and EOS."""
        return list(self._tokenizer.encode(string))

    def _encode_pair(self, context: str, continuation: str) -> Pair:
        """Ids of both, BOS first.

        The pair is encoded as one text, as in a document, and then cut. If a token crosses the cut, context and
        continuation are encoded separately: otherwise the harness would score too few tokens of the continuation, or
        none, which beats every other choice.
        """
        context_ids, continuation_ids = super()._encode_pair(context, continuation)
        blank = context[len(context.rstrip()):]
        if self.tok_encode(context + continuation) != context_ids + continuation_ids or not continuation_ids:
            context_ids = self.tok_encode(context[:len(context) - len(blank)])
            continuation_ids = self.tok_encode(blank + continuation)
        return [self.prefix_token_id, *context_ids], continuation_ids

    loglikelihood = partialmethod(TemplateLM.loglikelihood, disable_tqdm=True)
    """Log-probability in nats of each continuation, and whether greedy decoding would give it."""

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Log-probability in nats of each whole text, every token predicted once; long texts in windows."""
        texts = [request.args[0] for request in requests]
        values = self._summed([
            [make_disjoint_window(pair) for pair in get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, self.length, context_len=1)] for text in texts])
        for text, value in zip(texts, values, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), value)
        return values

    def documents(self, documents: Sequence[Sequence[int]]) -> list[float]:
        """Log-probability in nats of each document, given as ids from BOS to EOS, all but BOS predicted once. Documents
        are cut into windows that overlap by one token, as in `bits_per_byte`."""
        return self._summed([[(list(ids[start:start + 1]), list(ids[start + 1:start + 1 + self.length]))
                              for start in range(0, len(ids) - 1, self.length)] for ids in documents])

    def _summed(self, windows: Sequence[list[Pair]]) -> list[float]:
        """Log-probability of each text, given as windows (context, continuation); all texts' windows share batches."""
        scored = iter(self._loglikelihood_tokens([(None, *pair) for text in windows for pair in text]))
        return [sum(next(scored)[0] for _ in text) for text in windows]

    def _loglikelihood_tokens(self, requests: list[Request], disable_tqdm: bool = True,
                              **kwargs: Any) -> list[tuple[float, bool]]:
        pairs = [self._fit(context, continuation) for _, context, continuation in requests]
        order = sorted(range(len(pairs)), key=lambda number: -len(pairs[number][0]) - len(pairs[number][1]))

        def score(batch: list[int]) -> dict[int, tuple[float, bool]]:
            found = dict(zip(batch, self._score([pairs[number] for number in batch]), strict=True))
            for number, result in found.items():
                if (text := requests[number][0]) is not None:
                    self.cache_hook.add_partial("loglikelihood", text, result)
            return found

        scored = {number: result for found in self._dealt(self._batches(order, pairs), score)
                  for number, result in found.items()}
        return [scored[number] for number in range(len(pairs))]

    def _fit(self, context: list[int], continuation: list[int]) -> Pair:
        """Shorten the context from the left, so that context and continuation fit the window."""
        if len(continuation) > self.length:
            raise UserError(f"A task asks for the probability of an answer of {len(continuation)} tokens, but the "
                            f"model takes {self.length}. Use a task with shorter answers.")
        surplus = len(context) + len(continuation) - 1 - self.length
        if surplus <= 0:
            return context, continuation
        self.truncated += 1
        kept = context[surplus:]
        return ([context[0], *kept[1:]] if context[0] == self.prefix_token_id else kept), continuation

    def _batches(self, order: list[int], pairs: Sequence[Pair]) -> list[list[int]]:
        """Request numbers, longest first, in batches that do not depend on the number of ranks."""
        batches: list[list[int]] = []
        at = 0
        while at < len(order):
            longest = sum(map(len, pairs[order[at]]))
            size = max(1, min(self.batch, LOGITS_IN_MEMORY // (longest * self._tokenizer.size)))
            batches.append(order[at:at + size])
            at += size
        return batches

    @torch.inference_mode()
    def _score(self, batch: list[Pair]) -> list[tuple[float, bool]]:
        """Log-probability and greediness of each continuation of one batch, padded on the right."""
        tokens = pad_sequence([torch.tensor(context + continuation) for context, continuation in batch], True)
        logits: Tensor = self.model(tokens[:, :-1].to(self.device))  # (batch, length - 1, vocabulary)
        logits = logits.to(exact(self.device))
        results = []
        for number, (context, continuation) in enumerate(batch):
            first = len(context) - 1
            scores = logits[number, first:first + len(continuation)].double().log_softmax(dim=-1)
            wanted = torch.tensor(continuation, device=logits.device)
            value = scores.gather(-1, wanted.unsqueeze(-1)).sum()
            results.append((float(value), bool((scores.argmax(dim=-1) == wanted).all())))
        return results

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """The model's continuation of each context, up to the first stop string. Request i uses seed i."""
        work = [self._to_write(seed, *request.args) for seed, request in enumerate(requests)]

        def write(numbers: range) -> list[str]:
            texts = self._write([work[number] for number in numbers])
            for number, text in zip(numbers, texts, strict=True):
                self.cache_hook.add_partial("generate_until", requests[number].args, text)
            return texts

        batches = [range(start, min(start + self.batch, len(work))) for start in range(0, len(work), self.batch)]
        return [text for texts in self._dealt(batches, write) for text in texts]

    def _to_write(self, seed: int, context: str, settings: dict[str, Any]) -> tuple[list[int], Sampling]:
        """A context's ids, BOS first, truncated on the left if the new tokens need the room, and the sampling settings
        of the task."""
        names = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # in the harness's order
        asked = next((settings[name] for name in names if settings.get(name) is not None), NEW_TOKENS)
        new = max(1, min(int(asked), self.length // 2))
        ids, _ = self._fit([self.prefix_token_id, *self.tok_encode(context)], [self.eot_token_id] * (new + 1))
        until = settings.get("until") or []
        drawn = {name: settings[name] for name in ("top_p", "top_k", "min_p", "repetition_penalty")
                 if settings.get(name)}  # other libraries use 0 for none
        return ids, Sampling(
            max_tokens=new, seed=seed, stop_ids=self._stop_ids,
            temperature=float(settings.get("temperature", 1.0)) if settings.get("do_sample", False) else 0.0,
            stop=tuple(stop for stop in ([until] if isinstance(until, str) else until) if stop), **drawn)

    def _write(self, prompts: Sequence[tuple[list[int], Sampling]]) -> list[str]:
        """The model's continuations of one batch of prompts."""
        texts = [""] * len(prompts)
        for piece in stream(self.model, readable_bytes(self._tokenizer), [ids for ids, _ in prompts],
                            [sampling for _, sampling in prompts]):
            texts[piece.number] += piece.text
        return texts

    def _dealt(self, work: list[Given], function: Callable[[Given], Result]) -> list[Result]:
        """Results of `function` in the order of `work`, each computed by one rank, on every rank. An error on one rank
        is raised on all, which would otherwise wait for it."""
        rank, world = self.ranks.rank, self.ranks.world
        made: list[Result] = []
        problem: Exception | None = None
        try:
            with self.placed.together:
                made = [function(item) for item in work[rank::world]]
        except Exception as error:
            if self.placed.broken or world == 1:
                raise
            problem = error if isinstance(error, UserError) else RuntimeError(
                f"{type(error).__name__} on rank {rank}: {error}")
            problem.__cause__ = error.__cause__ if problem is error else error
        parts = self.ranks.gather((made, problem))
        if failed := problem or next((told for _, told in parts if told is not None), None):
            raise failed
        return [parts[number % world][0][number // world] for number in range(len(work))]
