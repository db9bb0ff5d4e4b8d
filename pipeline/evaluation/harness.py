"""Our model as the lm-evaluation-harness sees one.

Every rank holds the whole model and tells the harness that it is alone: the harness then runs the same requests in
the same order everywhere, and they are dealt out to the ranks here. (Its own way of sharing work lets a rank without
documents fail, and others wait for it forever.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from model.generate import generate
from model.llama import Llama
from pipeline.errors import UserError
from pipeline.vocabulary.base import Vocabulary

LOGITS_IN_MEMORY = 2**27
"""Most logits of one forward pass (0.5 GB in float32); batches are made smaller to stay below."""
NEW_TOKENS = 256
"""Length of a generated answer where the task does not say."""

Request = tuple[tuple[str, str], list[int], list[int]]
"""((context, continuation), context ids, continuation ids)"""
Given = TypeVar("Given")
Result = TypeVar("Result")


class HarnessModel(TemplateLM):
    """A Llama and its vocabulary.

    Every text stands after a BOS, as in training. Too long contexts lose their beginning (BOS stays), which
    `truncated` counts.

    Args:
        model: in evaluation mode, on its device.
        vocabulary: its vocabulary.
        batch: most sequences in a forward pass.
        rank, world: this process among all.
        length: tokens per forward pass; None: the model's context.
    """

    def __init__(self, model: Llama, vocabulary: Vocabulary, *, batch: int, rank: int = 0, world: int = 1,
                 length: int | None = None) -> None:
        super().__init__()
        self.model, self.vocabulary, self.batch = model, vocabulary, batch
        self.length = length or model.config.context_length
        self.share = (rank, world)
        self.truncated = 0
        self._device = next(model.parameters()).device

    @property
    def eot_token_id(self) -> int:
        """End of a document."""
        return self.vocabulary.eos_id

    @property
    def prefix_token_id(self) -> int:
        """What an empty context is."""
        return self.vocabulary.bos_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Ids of a text, without BOS and EOS."""
        return list(self.vocabulary.encode(string))

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Ids of both, BOS first.

        The pair is encoded as one text, as it would stand in a document, and cut. Where a token crosses the cut,
        each is encoded for itself: the harness would then score too few tokens of the continuation, or none, which
        beats every other choice.
        """
        context_ids, continuation_ids = super()._encode_pair(context, continuation)
        blank = context[len(context.rstrip()):]
        if self.tok_encode(context + continuation) != context_ids + continuation_ids or not continuation_ids:
            context_ids = self.tok_encode(context[:len(context) - len(blank)])
            continuation_ids = self.tok_encode(blank + continuation)
        return [self.prefix_token_id, *context_ids], continuation_ids

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Log-probability in nats of each continuation, and whether greedy decoding would give it."""
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Log-probability in nats of each whole text, every token predicted once; long texts in windows."""
        windows: list[Request] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for pair in get_rolling_token_windows(ids, self.prefix_token_id, self.length, context_len=1):
                windows.append((("", ""), *make_disjoint_window(pair)))
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (value, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += value
        return totals

    def _loglikelihood_tokens(self, requests: list[Request], disable_tqdm: bool = True,
                              **kwargs: Any) -> list[tuple[float, bool]]:
        pairs = [self._fit(context, continuation) for _, context, continuation in requests]
        order = sorted(range(len(pairs)), key=lambda number: -len(pairs[number][0]) - len(pairs[number][1]))
        batches = [[pairs[number] for number in batch] for batch in self._batches(order, pairs)]
        scored = self._dealt(batches, self._score)
        flat = [result for batch in scored for result in batch]
        results: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        for number, result in zip(order, flat, strict=True):
            results[number] = result
        return results

    def _fit(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
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

    def _batches(self, order: list[int], pairs: Sequence[tuple[list[int], list[int]]]) -> list[list[int]]:
        """Request numbers, longest first, in batches that do not depend on the number of ranks."""
        batches: list[list[int]] = []
        at = 0
        while at < len(order):
            longest = sum(map(len, pairs[order[at]]))
            size = max(1, min(self.batch, LOGITS_IN_MEMORY // (longest * self.vocabulary.size)))
            batches.append(order[at:at + size])
            at += size
        return batches

    @torch.inference_mode()
    def _score(self, batch: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Log-probability and greediness of each continuation of one batch, padded on the right."""
        rows = [context + continuation for context, continuation in batch]
        tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
        for number, row in enumerate(rows):
            tokens[number, :len(row)] = torch.tensor(row)
        logits: Tensor = self.model(tokens[:, :-1].to(self.device))  # (batch, length - 1, vocabulary)
        results = []
        for number, (context, continuation) in enumerate(batch):
            if not continuation:
                results.append((0.0, True))
                continue
            first = len(context) - 1
            scores = logits[number, first:first + len(continuation)].double().log_softmax(dim=-1)
            wanted = torch.tensor(continuation, device=self.device)
            value = scores.gather(-1, wanted.unsqueeze(-1)).sum()
            results.append((float(value), bool((scores.argmax(dim=-1) == wanted).all())))
        return results

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """What the model writes after each context, up to the first stopping string."""
        work = []
        for number, request in enumerate(requests):
            context, settings = request.args
            new = min(int(settings.get("max_gen_toks", NEW_TOKENS)), self.length // 2)
            ids, _ = self._fit([self.prefix_token_id, *self.tok_encode(context)], [self.eot_token_id] * (new + 1))
            work.append((number, ids, new, settings))
        return self._dealt(work, self._write)

    def _write(self, item: tuple[int, list[int], int, dict[str, Any]]) -> str:
        number, ids, new, settings = item
        sampled = bool(settings.get("do_sample", False))
        temperature = float(settings.get("temperature", 1.0)) if sampled else 0.0
        written, = generate(self.model, [ids], new, temperature=temperature, top_p=float(settings.get("top_p", 1.0)),
                            seed=number, stop_ids={self.eot_token_id})
        text, until = self.vocabulary.decode(written), settings.get("until") or []
        ends = [text.find(stop) for stop in ([until] if isinstance(until, str) else until) if stop]
        return text[:min((end for end in ends if end >= 0), default=len(text))]

    def _dealt(self, work: list[Given], function: Callable[[Given], Result]) -> list[Result]:
        """Results of `function` in the order of `work`, each made by one rank, on every rank."""
        rank, world = self.share
        own = [function(item) for item in work[rank::world]]
        if world == 1:
            return own
        parts: list[Any] = [None] * world
        dist.all_gather_object(parts, own)
        return [parts[number % world][number // world] for number in range(len(work))]
