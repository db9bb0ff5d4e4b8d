"""Sample numbers into batches: packed windows of documents, read ahead in threads.

The loader holds no state of its own: `batch_of(samples)` is the same whenever and wherever it is asked for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from pipeline.data.order import Pool, SampleOrder
from pipeline.data.shard_table import Shards, joined
from pipeline.data.token_shards import TokenShard
from pipeline.errors import UserError

IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """Sequences ready for the model; every tensor is (sequences, length).

    Attributes:
        tokens: int64 ids.
        labels: int64, the next token; -100 where the next token starts another document.
        documents: int32, number of the document within its window; attention stays inside one.
        positions: int64, 0 at each document's (or, where it was cut, window's) start.
        targets: how many labels count.
        lengths: of each sequence the lengths of its documents, on the host: nobody waits for a device to read them.
    """

    tokens: Tensor
    labels: Tensor
    documents: Tensor
    positions: Tensor
    targets: int
    lengths: tuple[tuple[int, ...], ...]

    def split(self, sequences: int) -> Iterator[Batch]:
        """Micro-batches of so many sequences."""
        for number, parts in enumerate(zip(*(tensor.split(sequences) for tensor in (
                self.tokens, self.labels, self.documents, self.positions)), strict=True)):
            tokens, labels, documents, positions = parts
            yield Batch(tokens, labels, documents, positions, int((labels != IGNORED).sum()),
                        self.lengths[number * sequences:(number + 1) * sequences])

    def to(self, device: torch.device) -> Batch:
        """The same batch on `device`."""
        if device.type == "cpu":
            return self
        tokens, labels, documents, positions = (
            tensor.pin_memory().to(device, non_blocking=True)
            for tensor in (self.tokens, self.labels, self.documents, self.positions))
        return Batch(tokens, labels, documents, positions, self.targets, self.lengths)


class TokenStream:
    """Token shards laid end to end, read by position. They may be many more than are open at once (`Shards`)."""

    def __init__(self, shards: Sequence[TokenShard]) -> None:
        self.shards = shards
        counts = shards.token_counts if isinstance(shards, Shards) else [shard.token_count for shard in shards]
        self.ends = np.cumsum(counts, dtype=np.int64)

    @property
    def tokens(self) -> int:
        """Length of the stream."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def window(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [start, stop) as int64, and the places among them (relative to start) where documents start."""
        tokens, starts = [], []
        index = int(np.searchsorted(self.ends, start, side="right"))
        at = start
        while at < stop:
            shard = self.shards[index]
            offset = int(self.ends[index]) - shard.token_count
            end = min(stop, int(self.ends[index]))
            tokens.append(shard.tokens(at - offset, end - offset).astype(np.int64))
            starts.append(shard.document_starts(at - offset, end - offset) + (offset - start))
            at, index = end, index + 1
        return np.concatenate(tokens), np.concatenate(starts)

    def foreign(self, start: int, tokens: np.ndarray, vocabulary: int) -> str:
        """What is told of an id among `tokens`, which begin at `start`, that is outside the vocabulary."""
        place = int(np.argmax(tokens >= vocabulary))
        index = int(np.searchsorted(self.ends, start + place, side="right"))
        shard = self.shards[index]
        at = start + place - (int(self.ends[index]) - shard.token_count)
        document = shard.document_at(at)
        return (f"{shard.path} holds the id {tokens[place]} at its token {at} (document {document}, key "
                f"{shard.document_key(document)}), but the vocabulary has {vocabulary} ids: its content was changed. "
                f"Delete the file and run --stage encode again, which makes it anew; then the same command goes on.")


def pack(windows: list[tuple[np.ndarray, np.ndarray]]) -> Batch:
    """Windows of length + 1 tokens, with their document starts, as a batch of sequences of `length`."""
    tokens = np.stack([window for window, _ in windows])
    begins = np.zeros(tokens.shape, dtype=bool)
    for row, (_, starts) in enumerate(windows):
        begins[row, starts] = True
    labels = np.where(begins[:, 1:], IGNORED, tokens[:, 1:])
    begins[:, 0] = True  # a document cut by the window's edge starts anew there
    place = np.arange(tokens.shape[1])
    positions = place - np.maximum.accumulate(np.where(begins, place, 0), axis=1)
    documents = np.cumsum(begins, axis=1, dtype=np.int32) - 1
    return Batch(torch.from_numpy(np.ascontiguousarray(tokens[:, :-1])), torch.from_numpy(labels),
                 torch.from_numpy(np.ascontiguousarray(documents[:, :-1])),
                 torch.from_numpy(np.ascontiguousarray(positions[:, :-1])), targets=int((labels != IGNORED).sum()),
                 lengths=tuple(_lengths(row) for row in begins[:, :-1]))


def _lengths(begins: np.ndarray) -> tuple[int, ...]:
    return tuple(np.diff(np.flatnonzero(begins), append=len(begins)).tolist())


class TrainingData:
    """Training sequences by sample number.

    Args:
        shards: token shards of the training split by source, in the order of the configuration.
        length: tokens per sequence.
        seed: of the order.
        mixture: share of each source; None: all sources in one pool, each sequence once an epoch.
        content: what identifies the tokens, for the plan hash (see `SampleOrder`).
        vocabulary: how many ids there are; a batch with another one is refused. None: it is not known.
    """

    def __init__(self, shards: Mapping[str, Sequence[TokenShard]], length: int, seed: int,
                 mixture: dict[str, float] | None, content: object, vocabulary: int | None = None) -> None:
        self.length, self.vocabulary = length, vocabulary
        if mixture is None:
            self.streams = [TokenStream(joined(list(shards.values())))]
            names, shares = ["all"], None
        else:
            self.streams = [TokenStream(part) for part in shards.values()]
            names, shares = list(shards), [mixture[name] for name in shards]
        pools = [Pool(name, stream.tokens) for name, stream in zip(names, self.streams, strict=True)]
        self.order = SampleOrder(pools, length, seed, shares, content)

    def batch(self, first: int, count: int) -> Batch:
        """Samples [first, first + count) in order."""
        return self.batch_of(np.arange(first, first + count, dtype=np.int64))

    def batch_of(self, samples: np.ndarray) -> Batch:
        """The samples with these numbers (int64, one dimension), in the order given.

        Raises:
            UserError: a shard cannot be read, or holds an id that is outside the vocabulary; on a GPU that would be an
                assertion far from its cause.
        """
        pools, _, sequences = self.order.locate(samples)
        places = [(self.streams[pool], int(sequence) * self.length)
                  for pool, sequence in zip(pools, sequences, strict=True)]
        windows = [stream.window(start, start + self.length + 1) for stream, start in places]
        for (stream, start), (tokens, _) in zip(places, windows, strict=True):
            if self.vocabulary is not None and tokens.max() >= self.vocabulary:
                raise UserError(stream.foreign(start, tokens, self.vocabulary))
        return pack(windows)


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
