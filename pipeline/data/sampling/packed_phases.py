"""The order of samples over phases whose documents are packed (over_phases.py has what is common).

At one length a source's sequences are those of the plan of all its documents, shuffled anew each epoch, over all phases
of that length: the order is that of one phase without end. Where the length changes, what the epoch has left is planned
anew: the pieces in sequences that were not drawn, neighbours in a document joined, packed into sequences of the new
length. They are drawn first, shuffled; then come whole epochs. So every token comes once an epoch, whatever the
lengths, and none is passed over. What is paid for that: the rest of a document of which a part was read stands apart
from it, and where it ends before what was read, one token of input has no label.

What the epoch has left follows from the draws before, so a rollback in an earlier phase has it planned again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from pipeline.config.phases import Phase, PhasePlan
from pipeline.data.exclusion import Excluded
from pipeline.data.sampling.order import Pool, permute, unpermute
from pipeline.data.sampling.over_phases import OverPhases, Part

PACKED = 1
"""Version of the order over packed phases. A change that moves any sample must raise it."""


class Located(NamedTuple):
    """Where samples come from: pool, pass over it (epoch), number of the plan, and of the sequence among those that the
    plan makes of the pool; int64 of one shape."""

    pool: np.ndarray
    epoch: np.ndarray
    plan: np.ndarray
    sequence: np.ndarray


class Stretch(NamedTuple):
    """Sequences that a plan makes of a source, and that are gone through in a shuffled order."""

    plan: int
    sequences: int
    tokens: int


class Left(NamedTuple):
    """What an epoch has left of a source: a stretch of it without the first `drawn` sequences in the order of `key`
    (`permute`)."""

    pool: int
    stretch: Stretch
    drawn: int
    key: tuple[int, ...]


class Plans(Protocol):
    """The plans of a packing, by number. On all ranks alike."""

    def whole(self, length: int) -> list[Stretch]:
        """What the plan of all documents makes of each source."""

    def rest(self, length: int, left: Sequence[Left]) -> list[Stretch]:
        """What a plan makes of what is left of sources, in their order; the same plan whenever the same is asked."""


@dataclass(frozen=True)
class PackedReading:
    """How a source is being read at sequences of one length, in one phase or several in a row.

    Attributes:
        length: of the sequences. whole: all that there are in an epoch.
        epoch: the one in which the reading began.
        rest: what the epoch had left then; None where the reading began with a whole one. of: the phase that it began
            with, which tells its shuffle from others.
        draws: sequences taken since.
    """

    length: int
    whole: Stretch
    epoch: int = 0
    rest: Stretch | None = None
    of: int = 0
    draws: int = 0

    @property
    def first(self) -> int:
        """Sequences before the first whole epoch."""
        return 0 if self.rest is None else self.rest.sequences

    def key(self, epoch: int, seed: int, pool: int) -> tuple[int, ...]:
        """Of the shuffle of an epoch."""
        rest = self.rest is not None and epoch == self.epoch
        return (seed, pool, epoch, self.length, self.of) if rest else (seed, pool, epoch)

    def stretch(self, epoch: int) -> tuple[Stretch, int]:
        """The sequences of an epoch, and how many were drawn before them."""
        if self.rest is not None and epoch == self.epoch:
            return self.rest, 0
        before = epoch - self.epoch - (self.rest is not None)
        return self.whole, self.first + before * self.whole.sequences

    def epoch_of(self, draws: np.ndarray) -> np.ndarray:
        """In which epoch sequences come, by their number since the reading began."""
        later = (draws - self.first) // self.whole.sequences
        return self.epoch + (later if self.rest is None else np.maximum(later, -1) + 1)

    def places(self, draws: np.ndarray, seed: int, pool: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Epoch, plan and number in it of sequences by their number since the reading began, int64."""
        epochs = self.epoch_of(draws)
        plans, sequences = np.empty_like(draws), np.empty_like(draws)
        for epoch in np.unique(epochs).tolist():
            here, (stretch, before) = epochs == epoch, self.stretch(epoch)
            plans[here] = stretch.plan
            sequences[here] = permute(draws[here] - before, stretch.sequences, self.key(epoch, seed, pool))
        return epochs, plans, sequences

    def draws_of(self, plan: int, sequences: np.ndarray, begin: int, end: int, seed: int,
                 pool: int) -> tuple[np.ndarray, np.ndarray]:
        """`places` backwards: which of the draws [begin, end) since the reading began, at least one, give sequences of
        a plan; draw and sequence, int64 of one length."""
        first, last = self.epoch_of(np.array([begin, end - 1])).tolist()
        found = [(np.empty(0, np.int64), np.empty(0, np.int64))]
        for epoch in range(first, last + 1):
            stretch, before = self.stretch(epoch)
            if stretch.plan == plan:
                draws = before + unpermute(sequences, stretch.sequences, self.key(epoch, seed, pool))
                drawn = (draws >= begin) & (draws < end)
                found.append((draws[drawn], sequences[drawn]))
        return np.concatenate([draws for draws, _ in found]), np.concatenate([of for _, of in found])

    def tokens(self, draws: int) -> int:
        """Tokens in the first `draws` sequences since the reading began; of some of an epoch as many as its sequences
        have on average, without padding."""
        epoch = int(self.epoch_of(np.array([draws]))[0])
        stretch, before = self.stretch(epoch)
        whole = (epoch - self.epoch - 1) * self.whole.tokens + (self.rest or self.whole).tokens
        return (whole if epoch > self.epoch else 0) + round((draws - before) * stretch.tokens / stretch.sequences)

    def left(self, seed: int, pool: int) -> tuple[int, Left | None]:
        """The epoch in which the reading stands, and what is left of it; None where that is all of the source."""
        epoch = int(self.epoch_of(np.array([self.draws]))[0])
        stretch, before = self.stretch(epoch)
        if stretch.plan == self.whole.plan and self.draws == before:
            return epoch, None
        return epoch, Left(pool, stretch, self.draws - before, self.key(epoch, seed, pool))


class PackedOrder(OverPhases[PackedReading]):
    """The order of training sequences over the phases of a plan, documents packed.

    Args:
        pools: a source each: its name and tokens. plan, seed: see `OverPhases`. content: as of `SampleOrder`.
        plans: how documents are packed, identities: of the plan of all documents for each length, a source each.

    Phases are laid out by `leave_out`, which may plan what epochs have left: on all ranks alike.
    """

    def __init__(self, pools: Sequence[Pool], plan: PhasePlan, seed: int, content: Any, plans: Plans,
                 whole: dict[int, list[Pool]]) -> None:
        self.plans, self.whole = plans, whole
        super().__init__(pools, plan, seed, {"packed": PACKED, "seed": seed, "content": content,
                                             "pools": [[pool.name, pool.tokens] for pool in pools]})

    def _streams(self, phase: Phase) -> tuple[list[Pool], int]:
        return self.whole[phase.train.sequence_length], phase.train.sequence_length

    def _identity(self, phase: Phase) -> dict[str, Any]:
        return {"plans": [pool.identity() for pool in self._streams(phase)[0]]}

    def leave_out(self, excluded: Excluded) -> None:
        """See OverPhases."""
        parts: list[Part[PackedReading]] = []
        first = 0
        states: list[PackedReading | None] = [None] * len(self.pools)
        self._carried = [{pool.name: 0 for pool in self.pools} for _ in self.plan.phases]
        for phase, mix in zip(self.plan.phases, self._mixes, strict=True):
            part = Part(phase, mix, first, self._readings(phase, states))
            parts.append(part)
            end = excluded.take(first, phase.steps * phase.sequences).end
            for number, (count, share) in enumerate(zip(part.draws(end - first), self.shares(phase), strict=True)):
                if share > 0:
                    reading = part.readings[number]
                    states[number] = replace(reading, draws=reading.draws + int(count))
            first = end
        self._lay_out(parts, first, excluded)

    def _readings(self, phase: Phase, states: Sequence[PackedReading | None]) -> tuple[PackedReading, ...]:
        """How each source is read in a phase, given how it was read last; what it does not use, it reads in no way."""
        length, found, left = phase.train.sequence_length, list[PackedReading](), dict[int, Left]()
        whole = self.plans.whole(length)
        for pool, (before, share) in enumerate(zip(states, self.shares(phase), strict=True)):
            if before is None or not share:
                found.append(PackedReading(length, whole[pool]))
            elif before.length == length:
                found.append(before)
            else:
                epoch, rest = before.left(self.seed, pool)
                found.append(PackedReading(length, whole[pool], epoch, of=phase.number))
                if rest is not None:
                    left[pool] = rest
        for pool, stretch in zip(left, self.plans.rest(length, list(left.values())) if left else (), strict=True):
            found[pool] = replace(found[pool], rest=stretch)
            self._carried[phase.number][self.pools[pool].name] = stretch.tokens
        return tuple(found)

    def locate(self, samples: np.ndarray) -> Located:
        """Where samples, int64 numbers of any shape, come from."""
        samples = np.asarray(samples, dtype=np.int64)
        pools, epochs, plans, sequences = (np.empty_like(samples) for _ in range(4))
        for here, part, pool, draws in self._here(samples):
            reading = part.readings[pool]
            pools[here] = pool
            epochs[here], plans[here], sequences[here] = reading.places(reading.draws + draws, self.seed, pool)
        return Located(pools, epochs, plans, sequences)

    def inverse(self, pool: int, plan: int, sequences: np.ndarray, below: int) -> tuple[np.ndarray, np.ndarray]:
        """Which samples are these sequences: `locate` backwards.

        Args:
            sequences: numbers of those that the plan makes of the pool; int64, one dimension.
            below: only samples with smaller numbers are given.

        Returns:
            sample and sequence, int64 of one length. The samples ascend.
        """
        nothing = np.empty(0, np.int64)
        found = [(nothing, nothing)]
        for part, count in self._taken(pool, below):
            reading = part.readings[pool]
            draws, of = reading.draws_of(plan, sequences, reading.draws, reading.draws + count, self.seed, pool)
            samples = part.samples(pool, draws - reading.draws)
            order = np.argsort(samples)
            found.append((samples[order], of[order]))
        return np.concatenate([samples for samples, _ in found]), np.concatenate([of for _, of in found])

    def _tokens(self, part: Part[PackedReading], pool: int, draws: int) -> int:
        reading = part.readings[pool]
        return reading.tokens(reading.draws + draws) - reading.tokens(reading.draws) if draws else 0

    def _tokens_of(self, part: Part[PackedReading], samples: np.ndarray) -> list[int]:
        found, totals = self.locate(samples), [0.0] * len(self.pools)
        for pool, reading in enumerate(part.readings):
            for stretch in (reading.whole, *([] if reading.rest is None else [reading.rest])):
                if drawn := np.count_nonzero((found.pool == pool) & (found.plan == stretch.plan)):
                    totals[pool] += drawn * stretch.tokens / stretch.sequences
        return [round(total) for total in totals]

    def carried(self) -> list[dict[str, int]]:
        """Of each phase, the tokens of each source that its epoch had left where the length changed before it: they
        come first, packed anew."""
        return self._carried

    def padding(self, samples: int) -> list[int]:
        """Of each phase, the tokens of padding in the first `samples` samples that were not left out; see
        `PackedReading.tokens`."""
        taken = self.consumed(samples)
        return [(until - part.first - sum(end - first for first, end in self.excluded.within(part.first, until)))
                * part.phase.train.sequence_length - sum(tokens.values())
                for (part, until), tokens in zip(self._within(samples), taken, strict=True)]
