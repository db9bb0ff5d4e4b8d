"""lm-evaluation-harness's Hugging Face model (HFLM), which computes with our network.

HFLM tokenizes with the exported tokenizer, cuts contexts, groups requests and scores them. The network is ours with the
exported weights, so it may be sharded over ranks, or be a training checkpoint. The harness on every rank runs as if it
were alone, with the same requests in the same order; the batches of requests are then divided among the ranks. (With
the harness's own division a rank without documents fails while others wait for it.)
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor, inference_mode

from drover.model.devices import exact
from drover.model.generation.sampling import Sampling
from drover.model.generation.stream import stream
from drover.pipeline.core.errors import UserError
from drover.pipeline.evaluation.open_model import OpenedModel
from drover.pipeline.evaluation.prompts import eos_ids, hugging_face_tokenizer, readable_bytes
from drover.pipeline.evaluation.running import messages_in
from drover.pipeline.parallel.ranks import ALONE, Ranks

LOGITS_IN_MEMORY = 2**27
"""Most logits of one forward pass (1 GB in float64); batches are made smaller to stay below."""
SAMPLING = ("top_p", "top_k", "min_p", "repetition_penalty")

Pair = tuple[list[int], list[int]]
"""(context ids, continuation ids)"""
Request = tuple[tuple[str, str] | None, list[int], list[int]]
"""(their texts, context ids, continuation ids)"""


class HarnessModel(HFLM):
    """An opened model for the harness.

    Args:
        opened: the model, and its tokenizers.
        batch: most sequences in a forward pass.
        length: tokens per forward pass; None: the model's context.
        ranks: share the work, each with the model.

    Attributes:
        truncated: how many contexts were too long and lost their beginning.

    Raises:
        UserError: the length is more than the model's context.
    """

    def __init__(self, opened: OpenedModel, *, batch: int, length: int | None = None, ranks: Ranks = ALONE) -> None:
        context = opened.config.context_length
        if length is not None and length > context:
            raise UserError(f"Windows of {length} tokens are more than the model's context of {context}.")
        self.opened = opened
        self.ranks = ranks
        self.truncated = 0
        self._ends = eos_ids(opened)
        described = SimpleNamespace(device=exact(opened.device), config=None)
        tokenizer = hugging_face_tokenizer(opened.tokenizer_folder)
        with messages_in(Path(os.devnull)):  # it warns that the model is not one of transformers
            super().__init__(cast(Any, described), "causal", tokenizer=tokenizer, max_length=length or context,
                             batch_size=batch, softmax_dtype="float64")

    @inference_mode()
    def _model_call(self, inps: Tensor, *_: Any, **__: Any) -> Tensor:
        return self.opened.model(inps.to(self.opened.device)).to(self.device)

    def _loglikelihood_tokens(self, requests: Sequence[Request], disable_tqdm: bool = True,
                              override_bs: int | None = None) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        if (longest := max((len(answer) for _, answer in pairs), default=0)) > self.max_length:
            raise UserError(f"A task asks for the probability of an answer of {longest} tokens, but the model takes "
                            f"{self.max_length}. Use a task with shorter answers.")
        self.truncated += sum(len(context) + len(answer) > self.max_length + 1 for context, answer in pairs)
        # The same order as in HFLM: the longest first, and those that differ in their last token together.
        order = sorted(range(len(pairs)), key=lambda number: (
            -sum(map(len, pairs[number])), [*pairs[number][0], *pairs[number][1]]))
        batches = list[list[int]]()
        while order:
            size = LOGITS_IN_MEMORY // (sum(map(len, pairs[order[0]])) * len(self.tokenizer))
            size = max(1, min(self.batch_size, size))
            batches.append(order[:size])
            order = order[size:]
        score = super()._loglikelihood_tokens
        scored = self.opened.placed.divide(
            self.ranks, batches, lambda batch: score([requests[number] for number in batch], True))
        result = {number: one for batch, results in zip(batches, scored, strict=True)
                 for number, one in zip(batch, results, strict=True)}
        return [result[number] for number in range(len(pairs))]

    def _encode_pair(self, context: str, continuation: str) -> Pair:
        """Ids of both. If a token crosses the cut, each is encoded by itself: otherwise the harness would score too few
        tokens of the continuation, or none, which beats every other choice."""
        before, after = super()._encode_pair(context, continuation)
        if not after or self.tok_encode(context + continuation)[:len(before)] != before:
            blank = context[len(context.rstrip()):]
            before = self.tok_encode(context.rstrip())
            after = self.tok_encode(blank + continuation, add_special_tokens=False)
        return before, after

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Log-probability in nats of each whole text, every token predicted once; long texts in windows. HFLM would
        also predict the BOS that the tokenizer adds."""
        return self.summed([[make_disjoint_window(pair) for pair in get_rolling_token_windows(
            self.tok_encode(request.args[0], add_special_tokens=False), self.prefix_token_id, self.max_length,
            context_len=1)] for request in requests])

    def summed(self, windows: Sequence[list[Pair]]) -> list[float]:
        """Log-probability of each text, given as windows (context, continuation); all texts' windows share batches."""
        scored = iter(self._loglikelihood_tokens([(None, *pair) for text in windows for pair in text]))
        return [sum(next(scored)[0] for _ in text) for text in windows]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """The model's continuation of each context, up to the first stop string. Request i uses seed i."""
        work = [self._prompt(seed, *request.args) for seed, request in enumerate(requests)]
        batches = [work[start:start + self.batch_size] for start in range(0, len(work), self.batch_size)]
        return [text for texts in self.opened.placed.divide(self.ranks, batches, self._continued) for text in texts]

    def _prompt(self, seed: int, context: str, settings: dict[str, Any]) -> tuple[list[int], Sampling]:
        """A context's ids, without their beginning if the new tokens need the room, and how the task samples."""
        how = normalize_gen_kwargs(settings, self.max_gen_toks)
        new = max(1, min(how["max_gen_toks"], self.max_length // 2))
        ids = self.tok_encode(context)
        room = self.max_length - new
        self.truncated += len(ids) > room
        return ids[-room:], Sampling(
            max_tokens=new, seed=seed, stop_ids=self._ends, temperature=how.get("temperature", 0.0),
            stop=tuple(filter(None, how["until"])),
            **{name: how[name] for name in SAMPLING if how.get(name)})  # other libraries use 0 for none

    def _continued(self, prompts: Sequence[tuple[list[int], Sampling]]) -> list[str]:
        """The model's continuations of one batch of prompts."""
        texts = [""] * len(prompts)
        for piece in stream(self.opened.model, readable_bytes(self.opened.tokenizer), [ids for ids, _ in prompts],
                            [sampling for _, sampling in prompts]):
            texts[piece.number] += piece.text
        return texts
