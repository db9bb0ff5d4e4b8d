"""Sample numbers into batches, read ahead in threads.

The loader's state decides nothing: `batch_of(samples)` is the same whenever and wherever it is asked for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from pipeline.data.exclusion import Excluded
from pipeline.data.sampling.batch import Batch, assemble
from pipeline.data.sampling.lookahead import Lookahead
from pipeline.data.sampling.order import SampleOrder
from pipeline.data.sampling.packing import Packing, Plans
from pipeline.data.sampling.streams import Held, Sequences, Windows
from pipeline.data.shard_table import joined
from pipeline.data.token_shards import TokenShard
from pipeline.errors import UserError


class Readings(NamedTuple):
    """When some tokens of a shard are read: the sample, ascending, the epoch, and which tokens [start, stop) of the
    shard; int64 of one length."""

    samples: np.ndarray
    epochs: np.ndarray
    starts: np.ndarray
    stops: np.ndarray


class TrainingData:
    """Training sequences by sample number.

    Args:
        shards: token shards of the training split by source, in the order of the configuration.
        length: tokens per sequence.
        seed: of the order.
        mixture: share of each source; None: all sources in one pool, each sequence once an epoch.
        content: what identifies the tokens, for the plan hash (see `SampleOrder`).
        vocabulary: how many ids there are; a batch with another one is refused. None: it is not known.
        packing: how documents are put into sequences; None: one after another, cut wherever a sequence is full.

    Attributes:
        order: which sequence is sample number g.
        streams: the sequences of each of its pools.
    """

    def __init__(self, shards: Mapping[str, Sequence[TokenShard]], length: int, seed: int,
                 mixture: dict[str, float] | None, content: object, vocabulary: int | None = None,
                 packing: Packing | None = None) -> None:
        self.length, self.vocabulary, self._packing = length, vocabulary, packing
        parts = {"all": joined(list(shards.values()))} if mixture is None else shards
        shares = None if mixture is None else [mixture[name] for name in parts]
        plans = None if packing is None else Plans(packing)
        self.streams: list[Sequences] = [Windows(part, length) if plans is None else plans.sequences(part)
                                         for part in parts.values()]
        pools = [stream.pool(name) for name, stream in zip(parts, self.streams, strict=True)]
        self.order = SampleOrder(pools, length, seed, shares, content)
        self._lookahead = Lookahead(self._places)

    @property
    def packings(self) -> Sequence[Packing]:
        """The plans of packings that sequences come from; none where documents lie one after another."""
        return () if self._packing is None else (self._packing,)

    def packing_facts(self) -> dict[str, Any]:
        """Figures of the packing; empty without one."""
        return {} if self._packing is None else self._packing.figures()

    def batch(self, first: int, count: int) -> Batch:
        """Samples [first, first + count) in order."""
        return self.batch_of(np.arange(first, first + count, dtype=np.int64))

    def batch_of(self, samples: np.ndarray) -> Batch:
        """The samples with these numbers (int64, one dimension), in the order given.

        Raises:
            UserError: a shard cannot be read, or holds an id that is outside the vocabulary; on a GPU that would be an
                assertion far from its cause.
        """
        found = self.located(samples)
        length = found[0][0].length
        rows = np.empty((len(samples), length + 1), np.uint32)
        starts, used = zip(*(stream.fill(sequence, row) for (stream, sequence), row in zip(found, rows, strict=True)),
                           strict=True)
        if self.vocabulary is not None and rows.max() >= self.vocabulary:
            row, place = np.argwhere(rows >= self.vocabulary)[0].tolist()
            stream, sequence = found[row]
            raise UserError(self._foreign(*stream.place(sequence, place)))
        return assemble(rows, starts, None if min(used) == length else used)

    def located(self, samples: np.ndarray) -> list[tuple[Sequences, int]]:
        """Of each sample the stream, and the number of the sequence in it."""
        pools, sequences = (places.tolist() for places in self._lookahead.locate(samples))
        return [(self.streams[pool], sequence) for pool, sequence in zip(pools, sequences, strict=True)]

    def _places(self, samples: np.ndarray) -> tuple[np.ndarray, ...]:
        pools, _, sequences = self.order.locate(samples)
        return pools, sequences

    def streams_of(self, samples: np.ndarray) -> Iterator[tuple[Sequences, np.ndarray]]:
        """The streams that samples come from, each with the numbers of the sequences in it, int64. It may be asked for
        any samples beside the loader."""
        pools, sequences = self._places(samples)
        for pool in np.unique(pools).tolist():
            yield self.streams[pool], sequences[pools == pool]

    def readings_of(self, pool: int, index: int, begin: int, end: int, below: int) -> Readings:
        """When tokens of a shard, all of one document, are read: `located` and `spans` backwards.

        Args:
            pool, index: the stream, and the shard's place in it.
            begin, end: tokens [begin, end) of the shard.
            below: only samples with smaller numbers are given.
        """
        held = self.streams[pool].holding(index, begin, end)
        return self._readings(held, *self.order.inverse(pool, np.unique(held.numbers), below))

    def _readings(self, held: Held, samples: np.ndarray, sequences: np.ndarray) -> Readings:
        """What is read in samples that are sequences of those held."""
        first, stop = (np.searchsorted(held.numbers, sequences, side) for side in ("left", "right"))
        times = stop - first
        places = np.arange(int(times.sum())) + (first - (np.cumsum(times) - times)).repeat(times)
        return Readings(samples.repeat(times), self.order.locate(samples)[1].repeat(times), held.starts[places],
                        held.stops[places])

    def shard_rows(self, samples: np.ndarray) -> np.ndarray:
        """The rows, in the table of shards, of those that the samples with these numbers are read from; ascending, each
        once. Nothing is read."""
        return np.unique(np.concatenate([stream.rows(numbers) for stream, numbers in self.streams_of(samples)]))

    def _foreign(self, shard: TokenShard, at: int) -> str:
        """What is told of a token of a shard whose id is outside the vocabulary."""
        document = shard.document_at(at)
        return (f"{shard.name} holds the id {shard.tokens(at, at + 1)[0]} at its token {at} (document {document}, key "
                f"{shard.document_key(document)}), but the vocabulary has {self.vocabulary} ids: its content was "
                f"changed. Delete the file and run --stage encode again, which makes it anew; then the same command "
                f"goes on.")

    def leave_out(self, excluded: Excluded) -> None:
        """Know which samples are left out for good: where there are phases, those after them move."""

    def plan_at(self, samples: int) -> str:
        """SHA-256 of what has decided the first `samples` samples."""
        return self.order.plan_sha256


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
