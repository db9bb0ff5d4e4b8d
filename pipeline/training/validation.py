"""What is looked at while training: held-out bits per byte per source, and texts from fixed prompts.

Both use every rank (a sharded model needs all of them in each forward pass) and draw on no state of training:
switching them on or off changes no weight.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from model.generate import generate
from pipeline.config.batch import BatchPlan
from pipeline.config.phases import PhasePlan
from pipeline.contract.stage_work import Work
from pipeline.data.chosen_documents import ChosenDocuments, choose
from pipeline.data.shard_table import Opener, ShardTable, open_shards
from pipeline.evaluation.bits_per_byte import HeldoutBatches, HeldoutText, measure
from pipeline.parallel.compiling import compiles, uncompiled
from pipeline.parallel.context_parallel import whole_losses
from pipeline.parallel.grid import Grid
from pipeline.training.engines.engine import Engine


class Validation:
    """A fixed part of each source's held-out documents, measured now and then."""

    def __init__(self, work: Work, grid: Grid, table: ShardTable, opener: Opener | None = None) -> None:
        train, self.grid = work.config.train, grid
        texts = grid.ranks.by_leader(lambda: heldout_texts(work, table, opener))
        # In all phases as in the first, so that the figures make one curve.
        first = BatchPlan.of(PhasePlan.of(train).phases[0].train, work.config.parallel, grid.ranks.world)
        self.batches = HeldoutBatches(texts, length=first.sequence_length, batch=first.micro_batch,
                                      rank=grid.data_rank, world=grid.data_ranks)
        self.batches.keep_own()
        self.first = True

    def measure(self, engine: Engine, pulse: Callable[[], None] = lambda: None) -> dict[str, float]:
        """Bits per byte of each source; the same on every rank and for every number of ranks, up to rounding. The first
        time (`first`), it may have to compile.

        pulse: called before each batch.
        """
        model = engine.model

        def forward(tokens: Tensor, labels: Tensor, documents: Tensor, positions: Tensor) -> Tensor:
            pulse()
            if self.grid.context > 1:
                return whole_losses(model, self.grid.mesh["context"], tokens, labels, documents, positions)
            nats: Tensor = model(tokens, labels, documents=documents, positions=positions, reduction="none")
            return nats
        model.eval()
        found = measure(forward, self.batches, self.grid.ranks.device, copies=self.grid.sample_ranks)
        engine.free_unsharded()
        model.train()
        self.first = False
        return {name: result.bits_per_byte for name, result in found.items()}


def heldout_texts(work: Work, table: ShardTable, opener: Opener | None = None) -> dict[str, HeldoutText]:
    """What is measured on, by source; for one rank, which tells the others."""
    folder, found = work.input("encode")[0], {}
    for source in work.config.shard.sources:
        shards = open_shards(folder, table, "heldout", source.name, opener)
        chosen = choose(shards, work.config.train.heldout_tokens)
        if len(chosen):
            found[source.name] = HeldoutText(list(ChosenDocuments(shards, chosen)), int(chosen.text_bytes.sum()))
    return found


class Samples:
    """Continuations of the configured prompts, always drawn with the same random numbers."""

    def __init__(self, work: Work, grid: Grid) -> None:
        self.train, self.split, self.leads = work.config.train, grid.tensor, grid.ranks.leads
        self.compiled = compiles(self.train, grid.ranks.device)
        self.prompts = grid.ranks.by_leader(lambda: self._prompts(work))

    def _prompts(self, work: Work) -> list[tuple[str, list[int]]]:
        """The prompts and their ids; none where what the vocabulary needs is missing. For one rank, which also puts
        what is drawn into words."""
        try:
            from pipeline.tokenization.kinds import load_tokenizer
            self.tokenizer = load_tokenizer(work.input("tokenizer")[0])
        except ImportError as error:
            work.say(f"no sample texts while training: rank 0 lacks {error.name}, which the vocabulary needs")
            return []
        room = work.config.model.context_length - self.train.sample_tokens
        return [(text, [self.tokenizer.bos_id, *self.tokenizer.encode(text)][:room]) for text in self.train.prompts]

    def draw(self, engine: Engine, pulse: Callable[[], None] = lambda: None) -> list[tuple[str, str]]:
        """(prompt, continuation) pairs, on rank 0. No token ends a text early, so that every rank does as many passes.

        pulse: called before each token.

        Raises FloatingPointError, on every rank, where the model's scores are NaN.
        """
        if not self.prompts:
            return []
        if self.compiled:  # each length would be compiled anew
            with uncompiled():
                return self._draw(engine, pulse)
        return self._draw(engine, pulse)

    def _draw(self, engine: Engine, pulse: Callable[[], None]) -> list[tuple[str, str]]:
        # Under tensor parallelism sequences are split evenly: no single new tokens, hence no cache.
        try:
            drawn = generate(engine.model, [ids for _, ids in self.prompts], self.train.sample_tokens, temperature=0.8,
                             top_p=0.95, seed=0, stop_ids=(), use_cache=self.split == 1, multiple_of=self.split,
                             pulse=pulse)
        finally:
            engine.free_unsharded()
        return [(text, self.tokenizer.decode(ids)) for (text, _), ids in zip(self.prompts, drawn, strict=True)] \
            if self.leads else []
