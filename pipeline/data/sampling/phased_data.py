"""Training sequences over phases, of whichever length a phase has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from pipeline.config.phases import PhasePlan
from pipeline.data.exclusion import Excluded
from pipeline.data.sampling.loader import Readings, TrainingData
from pipeline.data.sampling.lookahead import Lookahead
from pipeline.data.sampling.order import Pool
from pipeline.data.sampling.packed_phases import PackedOrder
from pipeline.data.sampling.phases import PhasedOrder
from pipeline.data.sampling.streams import Sequences, Windows
from pipeline.data.token_shards import TokenShard


class OverPhasesData(TrainingData):
    """Training sequences of an order over phases, however they are made of documents."""

    order: PhasedOrder | PackedOrder  # type: ignore[assignment]

    def leave_out(self, excluded: Excluded) -> None:
        """See TrainingData."""
        self.order.leave_out(excluded)
        self._lookahead = Lookahead(self._places)

    def plan_at(self, samples: int) -> str:
        """See TrainingData."""
        return self.order.plan_at(samples)


class PhasedData(OverPhasesData):
    """Training sequences by sample number. A batch lies within a phase: its sequences are of one length.

    Args:
        shards: token shards of the training split by source, in the order of the configuration.
        plan: the phases.
        seed, content, vocabulary: as of TrainingData.
    """

    order: PhasedOrder

    def __init__(self, shards: Mapping[str, Sequence[TokenShard]], plan: PhasePlan, seed: int, content: object,
                 vocabulary: int | None = None) -> None:
        self.vocabulary, self.length, self._packing = vocabulary, plan.grain, None
        whole = [Windows(part, plan.grain) for part in shards.values()]
        self.streams: list[Sequences] = list(whole)
        # A sequence begins at a multiple of its own length, so it is one of the windows of that length.
        self._cut = {(pool, length): stream.of_length(length) for pool, stream in enumerate(whole)
                     for length in {phase.train.sequence_length for phase in plan.phases}}
        pools: list[Pool] = [stream.pool(name) for name, stream in zip(shards, whole, strict=True)]
        self.order = PhasedOrder(pools, plan, seed, content)
        self._lookahead = Lookahead(self._places)

    def located(self, samples: np.ndarray) -> list[tuple[Sequences, int]]:
        """See TrainingData."""
        pools, starts, lengths = (found.tolist() for found in self._lookahead.locate(samples))
        return [(self._cut[pool, length], start // length)
                for pool, start, length in zip(pools, starts, lengths, strict=True)]

    def streams_of(self, samples: np.ndarray) -> Iterator[tuple[Sequences, np.ndarray]]:
        """See TrainingData."""
        pools, starts, lengths = self._places(samples)
        for (pool, length), stream in self._cut.items():
            here = (pools == pool) & (lengths == length)
            if here.any():
                yield stream, starts[here] // length

    def readings_of(self, pool: int, index: int, begin: int, end: int, below: int) -> Readings:
        """See TrainingData."""
        found: list[Readings] = []
        for (of, length), stream in self._cut.items():
            if of == pool:
                held = stream.holding(index, begin, end)
                found.append(self._readings(held, *self.order.inverse(pool, length, held.numbers, below)))
        whole = Readings(*(np.concatenate(parts) for parts in zip(*found, strict=True)))
        order = np.argsort(whole.samples)
        return Readings(*(part[order] for part in whole))

    def _places(self, samples: np.ndarray) -> tuple[np.ndarray, ...]:
        found = self.order.locate(samples)
        return found.pool, found.start, found.length
