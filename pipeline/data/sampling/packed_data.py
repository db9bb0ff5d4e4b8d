"""Training sequences over phases, documents packed: the plans that they come from, and the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.config.phases import PhasePlan
from pipeline.data.sampling.loader import Readings
from pipeline.data.sampling.lookahead import Lookahead
from pipeline.data.sampling.order import Pool, unpermute
from pipeline.data.sampling.packed_phases import Left, PackedOrder, Stretch
from pipeline.data.sampling.packing import Bins, Packing, Plans, write_rest
from pipeline.data.sampling.packing_plan import Planning
from pipeline.data.sampling.phased_data import OverPhasesData
from pipeline.data.sampling.streams import Sequences
from pipeline.data.shard_table import Shards
from pipeline.files import sha256_json

Planner = Callable[[Planning], Packing]
"""Makes or reads a plan: on all ranks alike."""


class PhasePackings:
    """How the documents of each source are packed in the phases of a plan: `packed_phases.Plans` in files.

    Args:
        folder: of all plans; each has one in it, by the length of its sequences. shards: by source.
        lengths: of sequences, each once; the plans of all documents are made at once.

    Attributes:
        packings: by number.
    """

    def __init__(self, folder: Path, shards: Mapping[str, Shards], lengths: Sequence[int], planner: Planner) -> None:
        self.folder, self.shards, self._planner = folder, shards, planner
        self.packings: list[Packing] = []
        self._bins: list[list[Bins]] = []  # by plan, of each source
        self._rests: dict[str, int] = {}
        opened = next(iter(shards.values())).opened
        self._whole = {length: self._add(Planning.whole(folder / str(length), opened, length)) for length in lengths}

    def pools(self, length: int) -> list[Pool]:
        """What the plan of all documents makes of each source."""
        return [bins.pool(name) for name, bins in zip(self.shards, self._bins[self._whole[length]], strict=True)]

    def bins(self, plan: int, pool: int) -> Bins:
        """The sequences that a plan makes of a source."""
        return self._bins[plan][pool]

    def whole(self, length: int) -> list[Stretch]:
        """See packed_phases.Plans."""
        return [self._stretch(self._whole[length], pool) for pool in range(len(self.shards))]

    def rest(self, length: int, left: Sequence[Left]) -> list[Stretch]:
        """See packed_phases.Plans."""
        names = list(self.shards)
        about = [[names[one.pool], self._pool(one.stretch.plan, one.pool).plan, one.drawn, list(one.key)]
                 for one in left]
        named = sha256_json([length, about])
        if named not in self._rests:
            rows = {row: one for one in left for row in self.shards[names[one.pool]].rows.tolist()}
            opened = self.shards[names[left[0].pool]].opened

            def write(path: Path, row: int) -> tuple[list[int], bytes]:
                one = rows[row]
                bins = self.bins(one.stretch.plan, one.pool)
                numbers = bins.numbers_in(row)
                taken = unpermute(numbers, one.stretch.sequences, one.key) < one.drawn
                return write_rest(path, opened.shard(row), bins.plans, row, taken, length)

            self._rests[named] = self._add(Planning(self.folder / f"{length}-left-{named[:12]}", opened, length,
                                                    np.array(list(rows), np.int64), write, about))
        return [self._stretch(self._rests[named], one.pool) for one in left]

    def _add(self, planning: Planning) -> int:
        self.packings.append(self._planner(planning))
        plans = Plans(self.packings[-1])
        self._bins.append([plans.sequences(shards) for shards in self.shards.values()])
        return len(self.packings) - 1

    def _pool(self, plan: int, pool: int) -> Pool:
        return self._bins[plan][pool].pool("")

    def _stretch(self, plan: int, pool: int) -> Stretch:
        found = self._pool(plan, pool)
        assert found.packed is not None
        return Stretch(plan, found.packed, found.tokens)


class PackedData(OverPhasesData):
    """Training sequences by sample number. A batch lies within a phase: its sequences are of one length.

    Args:
        packings: of each source, in the order of the configuration.
        plan: the phases.
        seed, content, vocabulary: as of TrainingData.

    `leave_out` lays the phases out; it may plan what epochs have left, so it is called on all ranks alike.
    """

    order: PackedOrder

    def __init__(self, packings: PhasePackings, plan: PhasePlan, seed: int, content: object,
                 vocabulary: int | None = None) -> None:
        lengths = lengths_of(plan)
        self.vocabulary, self.length, self._packings = vocabulary, max(lengths), packings
        whole = {length: packings.pools(length) for length in lengths}
        pools = [Pool(pool.name, pool.tokens) for pool in whole[lengths[0]]]
        self.streams: list[Sequences] = [packings.bins(0, pool) for pool in range(len(pools))]
        self.order = PackedOrder(pools, plan, seed, content, packings, whole)
        self._lookahead = Lookahead(self._places)

    @property
    def packings(self) -> Sequence[Packing]:
        """See TrainingData."""
        return self._packings.packings

    def bins(self, plan: int, pool: int) -> Bins:
        """The sequences that a plan makes of a source."""
        return self._packings.bins(plan, pool)

    def located(self, samples: np.ndarray) -> list[tuple[Sequences, int]]:
        """See TrainingData."""
        places = zip(*(found.tolist() for found in self._lookahead.locate(samples)), strict=True)
        return [(self.bins(plan, pool), sequence) for pool, plan, sequence in places]

    def streams_of(self, samples: np.ndarray) -> Iterator[tuple[Sequences, np.ndarray]]:
        """See TrainingData."""
        pools, plans, sequences = self._places(samples)
        for plan, pool in sorted(set(zip(plans.tolist(), pools.tolist(), strict=True))):
            yield self.bins(plan, pool), sequences[(plans == plan) & (pools == pool)]

    def readings_of(self, pool: int, index: int, begin: int, end: int, below: int) -> Readings:
        """See TrainingData."""
        found: list[Readings] = []
        for plan in range(len(self.packings)):
            held = self.bins(plan, pool).holding(index, begin, end)
            found.append(self._readings(held, *self.order.inverse(pool, plan, np.unique(held.numbers), below)))
        whole = Readings(*(np.concatenate(parts) for parts in zip(*found, strict=True)))
        order = np.argsort(whole.samples, kind="stable")
        return Readings(*(part[order] for part in whole))

    def packing_facts(self) -> dict[str, Any]:
        """See TrainingData."""
        return {packing.folder.name: packing.figures() for packing in self.packings}

    def _places(self, samples: np.ndarray) -> tuple[np.ndarray, ...]:
        found = self.order.locate(samples)
        return found.pool, found.plan, found.sequence


def lengths_of(plan: PhasePlan) -> list[int]:
    """The lengths of sequences of the phases, each once, in the order of the phases."""
    return list(dict.fromkeys(phase.train.sequence_length for phase in plan.phases))
