"""Sample numbers into batches, read ahead in threads.

The loader has no state that matters: `batch_of(samples)` gives the same batch at any time on any rank.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np

from drover.pipeline.config.phases import PhasePlan
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Record
from drover.pipeline.data.exclusion import Excluded
from drover.pipeline.data.sampling.batch import Batch, assemble
from drover.pipeline.data.sampling.order import TOGETHER, Order, Pool, groups, is_one_pool, lengths_of
from drover.pipeline.data.sampling.packing import Bins, Packing, PhasePackings, Planner, Windows
from drover.pipeline.data.token_shards import Shards, joined

Sequences = Windows | Bins
"""The sequences of one length of a pool, by number."""
BLOCK, BLOCKS = 1024, 8
"""Sample numbers that are located at once, since eight cost nearly what a thousand do; and how many such are kept."""


class TrainingData:
    """Training sequences by sample number. A batch lies within a phase: its sequences are of one length.

    Args:
        shards: token shards of the training split by source, in the order of the configuration.
        plan: the phases.
        seed, content: of the order (see `Order`).
        vocabulary: how many ids there are; a batch with another one is refused. None: it is not known.
        packing: the folder for plans of packings, and what makes or reads one; None: documents lie one after another.

    Attributes:
        order: which sequence is sample number g.
        packings: the plans of packings that sequences come from; those of what epochs have left are added as phases are
            laid out.
        spaces: all sequences, by their space and pool (`order.Located`).
    """

    def __init__(self, shards: Mapping[str, Shards], plan: PhasePlan, seed: int, content: object,
                 vocabulary: int | None = None, packing: tuple[Path, Planner] | None = None) -> None:
        self.vocabulary, lengths = vocabulary, lengths_of(plan)
        parts = {TOGETHER: joined(list(shards.values()))} if is_one_pool(plan) else shards
        pools = [Pool(name, int(part.token_counts.sum())) for name, part in parts.items()]
        self.packings: Sequence[Packing] = ()
        self.spaces: Sequence[Sequence[Sequences]] = [[Windows(part, length) for part in parts.values()]
                                                      for length in lengths]
        packings = None
        if packing is not None:
            packings = PhasePackings(packing[0], list(parts.values()), lengths, packing[1])
            self.packings, self.spaces = packings.packings, packings.spaces
        self.order = Order(pools, plan, seed, content, packings)
        self._forget()

    @property
    def shards(self) -> list[Shards]:
        """What each pool is made of."""
        return [sequences.shards for sequences in self.spaces[0]]

    def packing_facts(self) -> Record:
        """Figures of each plan of a packing; empty without one."""
        return {packing.folder.name: packing.figures() for packing in self.packings}

    def batch_of(self, samples: np.ndarray) -> Batch:
        """The samples with these numbers (int64, one dimension), in the order given.

        Raises:
            UserError: a shard cannot be read, or holds an id that is outside the vocabulary; on a GPU that would be an
                assertion far from its cause.
        """
        located = self.located(samples)
        rows = np.empty((len(samples), located[0][0].length + 1), np.uint32)
        starts, used = zip(*(sequences.fill(number, row) for (sequences, number), row in
                             zip(located, rows, strict=True)), strict=True)
        if self.vocabulary is not None and rows.max() >= self.vocabulary:
            sequences, number = located[int(rows.max(1).argmax())]
            shards = map(sequences.shards.opened.shard, sequences.rows(np.array([number])).tolist())
            raise UserError(
                f"{' or '.join(str(shard.path) for shard in shards)} holds the id {rows.max()}, but the vocabulary "
                f"has {self.vocabulary} ids: its content was changed. Delete the file, run --stage encode again, which "
                f"makes it again, and then repeat this command.")
        return assemble(rows, starts, used)

    def located(self, samples: np.ndarray) -> list[tuple[Sequences, int]]:
        """Of each sample its sequences, and the number among them."""
        return [self._block(sample // BLOCK)[sample % BLOCK] for sample in samples.tolist()]

    def _located_block(self, number: int) -> list[tuple[Sequences, int]]:
        pools, _, spaces, sequences = self.order.locate(np.arange(number * BLOCK, (number + 1) * BLOCK))
        return [(self.spaces[space][pool], sequence) for pool, space, sequence in
                zip(pools.tolist(), spaces.tolist(), sequences.tolist(), strict=True)]

    def _forget(self) -> None:
        self._block = lru_cache(BLOCKS)(self._located_block)  # a new one: a thread may be filling the old

    def shard_rows(self, samples: np.ndarray) -> np.ndarray:
        """Rows, in the table, of the shards that hold these samples; ascending, each once. Nothing is read. Threads may
        call it for any samples while the loader runs."""
        pools, _, spaces, sequences = self.order.locate(samples)
        rows = [self.spaces[space][pool].rows(sequences[mask][own]) for space, mask in groups(spaces)
                for pool, own in groups(pools[mask])]
        return np.unique(np.concatenate(rows))

    def leave_out(self, excluded: Excluded) -> None:
        """Leave samples out for good: the phases after them move. Call it on all ranks alike: what epochs have left may
        have to be packed."""
        self.order.leave_out(excluded)
        self._forget()


class Prefetcher:
    """Calls `make(step)` for coming steps in threads, and gives the results in order.

    The number of threads changes how early a batch is ready, never which batch it is.
    """

    def __init__(self, make: Callable[[int], Batch], steps: range, threads: int) -> None:
        self._make, self._steps = make, iter(steps)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="loader")
        self._ahead: deque[Future[Batch]] = deque(self._pool.submit(make, step)
                                                  for step in islice(self._steps, threads + 1))
        self.waited_s = 0.0

    def next(self) -> Batch:
        """The next step's batch; `waited_s` is how long it kept the caller."""
        began = time.perf_counter()
        batch = self._ahead.popleft().result()
        self.waited_s = time.perf_counter() - began
        if (step := next(self._steps, None)) is not None:
            self._ahead.append(self._pool.submit(self._make, step))
        return batch

    def close(self) -> None:
        """Stop reading ahead."""
        self._pool.shutdown(wait=True, cancel_futures=True)
