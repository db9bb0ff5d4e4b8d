"""The order of samples over phases whose sequences are cut from running text (over_phases.py has what is common).

Each source is cut into grains of as many tokens as the longest sequence of any phase
has, and the grains of an epoch are shuffled as sequences are in `order.py`: with one length a grain is a sequence, and
the order is that of one phase without end. A phase of shorter sequences takes grains in their order too, a window of
many at a time, and shuffles the sequences within a window. So no token comes twice before a source has been gone
through, whatever the lengths. What is paid for that: where the length changes, the rest of the window that was begun is
left to the next epoch (at most WINDOW grains or a sixteenth of the source, `Reading.passed_over`).

A phase whose length does not divide the grain reads its sources anew, by itself: what it reads was read before or will
be again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from pipeline.config.phases import Phase, PhasePlan
from pipeline.data.exclusion import Excluded
from pipeline.data.sampling.order import Pool, permute, unpermute
from pipeline.data.sampling.over_phases import OverPhases, Part

PHASED = 1
"""Version of the order over phases. A change that moves any sample must raise it."""
WINDOW = 1024
"""The most grains in which the sequences of a shorter phase are shuffled."""
PART = 16
"""A window is at most this part of a source."""
ANEW = 1 << 32
"""What the epochs of sources that are read anew begin at, and by how much they are apart."""


class Located(NamedTuple):
    """Where samples come from: pool, pass over it (epoch), first token in it, and length, int64 of one shape."""

    pool: np.ndarray
    epoch: np.ndarray
    start: np.ndarray
    length: np.ndarray


@dataclass(frozen=True)
class Reading:
    """How a source is being read at sequences of one length, in one phase or several in a row.

    Attributes:
        length: of the sequences. grain: tokens of a grain. grains: how many the source has.
        first: grains that were taken before. draws: sequences taken since.
        anew: epochs are counted from here; 0 where the reading goes on from the one before.
    """

    length: int
    grain: int
    grains: int
    first: int = 0
    draws: int = 0
    anew: int = 0

    @property
    def each(self) -> int:
        """Sequences of a grain."""
        return self.grain // self.length

    @property
    def window(self) -> int:
        """Grains of a window."""
        return 1 if self.each == 1 else max(1, min(WINDOW, self.grains // PART))

    @property
    def begun(self) -> int:
        """Grains of the windows that were begun."""
        return -(-self.draws // (self.window * self.each)) * self.window

    @property
    def passed_over(self) -> int:
        """Tokens of the window that was begun and not finished."""
        return self.begun * self.grain - self.draws * self.length

    def places(self, draws: np.ndarray, seed: int, pool: int) -> tuple[np.ndarray, np.ndarray]:
        """Epoch and first token of sequences by their number since the reading began, int64."""
        key = (seed, pool) if not self.anew else (seed, pool, self.anew)
        grain, part = draws, np.zeros_like(draws)
        if self.each > 1:
            number, inside = np.divmod(draws, self.window * self.each)
            shuffled = np.empty_like(inside)
            for window in np.unique(number):
                here = number == window
                shuffled[here] = permute(inside[here], self.window * self.each,
                                         (*key, self.length, self.first, int(window)))
            inner, part = np.divmod(shuffled, self.each)
            grain = number * self.window + inner
        epoch, turn = np.divmod(self.first + grain, self.grains)
        found = np.empty_like(turn)
        for number in np.unique(epoch):
            here = epoch == number
            found[here] = permute(turn[here], self.grains, (*key, int(number)))
        return self.anew + epoch, found * self.grain + part * self.length

    def draws_of(self, sequences: np.ndarray, begin: int, end: int, seed: int,
                 pool: int) -> tuple[np.ndarray, np.ndarray]:
        """`places` backwards: which of the draws [begin, end) since the reading began give these sequences.

        Args:
            sequences: numbers of the sequences of this length that the source has, int64, one dimension.

        Returns:
            draw and sequence, int64 of one length.
        """
        key = (seed, pool) if not self.anew else (seed, pool, self.anew)
        grain, part = np.divmod(sequences, self.each)
        inside = grain < self.grains  # those behind the last whole grain are never drawn
        sequences, grain, part = sequences[inside], grain[inside], part[inside]
        first, last = (self.first + windows * self.window for windows in (
            begin // (self.window * self.each), -(-end // (self.window * self.each))))
        # (epochs, sequences): how many grains of this reading were taken before
        taken = np.stack([epoch * self.grains + unpermute(grain, self.grains, (*key, epoch))
                          for epoch in range(first // self.grains, -(-last // self.grains))]) - self.first
        wanted = (taken >= first - self.first) & (taken < last - self.first)
        draws, of, parts = (np.broadcast_to(one, taken.shape)[wanted] for one in (taken, sequences, part))
        if self.each > 1:
            number, inner = np.divmod(draws, self.window)
            shuffled = inner * self.each + parts
            draws = number * self.window * self.each
            for window in np.unique(number):
                here = number == window
                draws[here] += unpermute(shuffled[here], self.window * self.each,
                                         (*key, self.length, self.first, int(window)))
        drawn = (draws >= begin) & (draws < end)
        return draws[drawn], of[drawn]


class PhasedOrder(OverPhases[Reading]):
    """The order of training sequences over the phases of a plan.

    Args:
        pools, plan, seed: see `OverPhases`. content: as of `SampleOrder`.

    Raises:
        UserError: a source that is to be used holds less than one grain, or its share is too small.
    """

    def __init__(self, pools: Sequence[Pool], plan: PhasePlan, seed: int, content: Any = None) -> None:
        super().__init__(pools, plan, seed, {"phased": PHASED, "seed": seed, "grain": plan.grain, "content": content,
                                             "pools": [[pool.name, pool.tokens] for pool in pools]})
        self.leave_out(Excluded())

    def _streams(self, phase: Phase) -> tuple[list[Pool], int]:
        grain, length = self.plan.grain, phase.train.sequence_length
        return self.pools, grain if grain % length == 0 else length

    def leave_out(self, excluded: Excluded) -> None:
        """See OverPhases."""
        parts: list[Part[Reading]] = []
        first = 0
        states: list[dict[int, Reading]] = [{} for _ in self.pools]
        used: list[dict[int, int]] = [{} for _ in self.pools]  # the last phase that took of each reading
        over = [{pool.name: 0 for pool in self.pools} for _ in self.plan.phases]
        for phase, mix in zip(self.plan.phases, self._mixes, strict=True):
            length = phase.train.sequence_length
            kind = 0 if self.plan.grain % length == 0 else length
            part = Part(phase, mix, first, tuple(self._reading(pool, state.get(kind), phase)
                                                 for pool, state in zip(self.pools, states, strict=True)))
            parts.append(part)
            end = excluded.take(first, phase.steps * phase.sequences).end
            for number, (count, share) in enumerate(zip(part.draws(end - first), self.shares(phase), strict=True)):
                if share > 0:
                    before = states[number].get(kind)
                    if before is not None and before.length != length:  # only now nothing goes on with it
                        over[used[number][kind]][self.pools[number].name] += before.passed_over
                    reading = part.readings[number]
                    states[number][kind] = replace(reading, draws=reading.draws + int(count))
                    used[number][kind] = phase.number
            first = end
        self._passed_over = over
        self._lay_out(parts, first, excluded)

    def _reading(self, pool: Pool, before: Reading | None, phase: Phase) -> Reading:
        """How a source is read in a phase; before: how it was read last, by grains or anew, as this phase does."""
        grain, length = self.plan.grain, phase.train.sequence_length
        if before is not None and before.length == length:
            return before
        if grain % length:
            return Reading(length, length, max(1, pool.sequences(length)), anew=(phase.number + 1) * ANEW)
        first = 0 if before is None else before.first + before.begun
        return Reading(length, grain, max(1, pool.sequences(grain)), first)

    def locate(self, samples: np.ndarray) -> Located:
        """Where samples, int64 numbers of any shape, come from."""
        samples = np.asarray(samples, dtype=np.int64)
        pools, epochs, starts, lengths = (np.empty_like(samples) for _ in range(4))
        for here, part, pool, draws in self._here(samples):
            reading = part.readings[pool]
            pools[here], lengths[here] = pool, reading.length
            epochs[here], starts[here] = reading.places(reading.draws + draws, self.seed, pool)
        return Located(pools, epochs, starts, lengths)

    def inverse(self, pool: int, length: int, sequences: np.ndarray, below: int) -> tuple[np.ndarray, np.ndarray]:
        """Which samples are these sequences: `locate` backwards, over all phases of sequences of that length.

        Args:
            sequences: numbers of those that the pool's stream has if it is cut every `length` tokens; int64, one
                dimension.
            below: only samples with smaller numbers are given.

        Returns:
            sample and sequence, int64 of one length. The samples ascend.
        """
        found: list[tuple[np.ndarray, np.ndarray]] = []
        for part, count in self._taken(pool, below):
            if part.phase.train.sequence_length != length:
                continue
            reading = part.readings[pool]
            draws, of = reading.draws_of(sequences, reading.draws, reading.draws + count, self.seed, pool)
            samples = part.samples(pool, draws - reading.draws)
            order = np.argsort(samples)
            found.append((samples[order], of[order]))
        nothing = np.empty(0, np.int64)
        return (np.concatenate([nothing, *(samples for samples, _ in found)]),
                np.concatenate([nothing, *(of for _, of in found)]))

    def _tokens(self, part: Part[Reading], pool: int, draws: int) -> int:
        return draws * part.phase.train.sequence_length

    def _tokens_of(self, part: Part[Reading], samples: np.ndarray) -> list[int]:
        counts = np.bincount(self.locate(samples).pool, minlength=len(self.pools))
        return (counts * part.phase.train.sequence_length).tolist()

    def passed_over(self) -> list[dict[str, int]]:
        """Of each phase, the tokens of each source that it leaves to the next epoch, where the next phase that goes on
        with the source has another length."""
        return self._passed_over
