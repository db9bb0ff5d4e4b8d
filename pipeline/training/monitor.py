"""Hooks that measure the model while it trains: validation loss, sample texts.

They run on every rank, since a sharded model needs all ranks in each pass, and use no state of training: switching them
on or off changes no weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING

from torch import Tensor

from drover.model.generation.stream import generate
from drover.pipeline.data.token_shards import ChosenDocuments, choose, open_shards
from drover.pipeline.evaluation.bits_per_byte import ValidationBatches, ValidationText, measure
from drover.pipeline.evaluation.scores import Measurement
from drover.pipeline.parallel.blocks import compiles, uncompiled
from drover.pipeline.parallel.context_parallel import full_losses
from drover.pipeline.tokenization.tokenizer import load_tokenizer
from drover.pipeline.training.hooks import Hook

if TYPE_CHECKING:
    from drover.pipeline.training.loop import Loop


class Validation(Hook):
    """The loss on the validation sample, a fixed part of each source's validation documents, measured every so many
    steps; the same on every rank and for every number of ranks, up to rounding."""

    def __init__(self, loop: Loop) -> None:
        texts = loop.ranks.by_leader(lambda: validation_texts(loop))
        first = loop.batches.of_phase[0]  # the first phase's length in all phases, so that the values form one curve
        self.batches = ValidationBatches(texts, length=first.sequence_length, batch=first.micro_batch,
                                         rank=loop.grid.data_rank, world=loop.grid.data_ranks)
        self._first = True  # it may have to compile

    def look(self, loop: Loop) -> Mapping[str, object]:
        """Bits per byte and loss of each source's sample. NaN is logged and omitted."""
        if not loop.due(loop.config.train.validation_every):
            return {}
        model = loop.engine.model
        grid = loop.grid

        def forward(tokens: Tensor, labels: Tensor, documents: Tensor, positions: Tensor) -> Tensor:
            loop.watchdog.pulse(first=self._first)
            if grid.context > 1:
                return full_losses(model, grid.mesh["context"], tokens, labels, documents, positions)
            return model(tokens, labels, documents=documents, positions=positions, reduction="none")
        with loop.recorder.looking():
            model.eval()
            measured = measure(forward, self.batches, loop.ranks.device, copies=grid.sample_ranks)
            loop.engine.free_unsharded()
            model.train()
        self._first = False
        finite = {source: result for source, result in measured.items() if math.isfinite(result.bits_per_byte)}
        if missing := [source for source in measured if source not in finite]:
            loop.say(f"after step {loop.progress.step} the loss on the validation sample of {', '.join(missing)} is "
                     f"NaN")
        if finite:
            total = Measurement(*(sum(getattr(result, name) for result in finite.values())
                                  for name in ("nats", "targets", "text_bytes")))
            own = ", ".join(f"{source} {result.bits_per_byte:.4f}" for source, result in finite.items())
            loop.say(f"after step {loop.progress.step} validation: loss {total.loss:.4f}, {total.bits_per_byte:.4f} "
                     f"bits per byte{f' ({own})' * (len(finite) > 1)}")
        return {"validation_sample_bpb": {source: result.bits_per_byte for source, result in finite.items()},
                "validation_sample_loss": {source: result.loss for source, result in finite.items()}}


def validation_texts(loop: Loop) -> dict[str, ValidationText]:
    """The validation sample by source. Called on rank 0, which broadcasts it."""
    sources = loop.config.source_names
    result = {}
    for source, shards in open_shards(loop.batches.table, "validation", sources, loop.batches.folder).items():
        chosen = choose(shards, loop.config.train.validation_tokens)
        if len(chosen):
            result[source] = ValidationText(list(ChosenDocuments(shards, chosen)), int(chosen.text_bytes.sum()))
    return result


class Samples(Hook):
    """Continuations of the configured prompts, always drawn with the same random numbers."""

    def __init__(self, loop: Loop) -> None:
        self.prompts = loop.ranks.by_leader(lambda: self._prompts(loop))

    def _prompts(self, loop: Loop) -> list[tuple[str, list[int]]]:
        """The prompts and their ids. Called on rank 0, which also decodes the samples."""
        train = loop.config.train
        self.tokenizer = load_tokenizer(loop.work.input("tokenizer")[0])
        room = loop.config.model.context_length - train.sample_tokens
        prompts = self.tokenizer.beginnings([text.documents for text in validation_texts(loop).values()]) if (
            train.prompts is None) else train.prompts
        return [(text, [self.tokenizer.bos_id, *self.tokenizer.encode(text)][:room]) for text in prompts]

    def look(self, loop: Loop) -> Mapping[str, object]:
        """Sample texts. No token ends a text early, so that every rank does the same number of passes."""
        train = loop.config.train
        split = loop.grid.tensor
        if not self.prompts or not loop.due(train.sample_every):
            return {}
        # Under tensor parallelism sequences are split evenly, so there are no single new tokens, and hence no cache.
        # torch.compile would compile each length again.
        with (loop.recorder.looking(), uncompiled() if compiles(train, loop.ranks.device) else nullcontext()):
            try:
                drawn = generate(loop.engine.model, [ids for _, ids in self.prompts], train.sample_tokens,
                                 temperature=0.8, top_p=0.95, seed=0, stop_ids=(), use_cache=split == 1,
                                 multiple_of=split, pulse=loop.watchdog.pulse)
            except FloatingPointError as error:  # on every rank; the next loss is NaN too, so the guards act on it
                loop.say(f"no sample texts after step {loop.progress.step}: {error}")
                return {}
            finally:
                loop.engine.free_unsharded()
        if loop.ranks.is_rank_zero:
            for (prompt, _), ids in zip(self.prompts, drawn, strict=True):
                loop.recorder.write("sample", loop.progress.step, prompt, self.tokenizer.decode(ids))
        return {}
