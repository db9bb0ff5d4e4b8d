"""The order of samples over phases: still a pure function of the sample number, and its state still one integer.

Sample numbers go on over phases. Each source is cut into grains of as many tokens as the longest sequence of any phase
has, and the grains of an epoch are shuffled as sequences are in `order.py`: with one length a grain is a sequence, and
the order is that of one phase without end. A phase of shorter sequences takes grains in their order too, a window of
many at a time, and shuffles the sequences within a window. So no token comes twice before a source has been gone
through, whatever the lengths. What is paid for that: where the length changes, the rest of the window that was begun is
left to the next epoch (at most WINDOW grains or a sixteenth of the source, `Reading.passed_over`).

A phase whose length does not divide the grain reads its sources anew, by itself: what it reads was read before or will
be again.

Phases end by steps. Samples that a rollback left out (pipeline/data/exclusion.py) push the phases after them back by as
many numbers, of what lies before nothing changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from pipeline.config.phases import Phase, PhasePlan
from pipeline.data.exclusion import Excluded, sample_numbers
from pipeline.data.sampling.order import Pool, SampleOrder, permute, unpermute
from pipeline.errors import UserError
from pipeline.files import sha256_json

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


@dataclass(frozen=True)
class _Part:
    """A phase as laid out: its first sample number, and how its sources stand when it begins."""

    phase: Phase
    mix: SampleOrder
    first: int
    readings: tuple[Reading, ...]

    def draws(self, samples: int) -> np.ndarray:
        """Sequences of each source among the first `samples` of the phase."""
        block, rest = divmod(samples, self.mix.period)
        counted: np.ndarray = block * self.mix.quotas + np.bincount(self.mix.pattern[:rest],
                                                                   minlength=len(self.readings))
        return counted

    def after(self, samples: int) -> tuple[Reading, ...]:
        """How the sources stand after so many samples of the phase."""
        return tuple(replace(reading, draws=reading.draws + int(count))
                     for reading, count in zip(self.readings, self.draws(samples), strict=True))


class PhasedOrder:
    """The order of training sequences over the phases of a plan.

    Args:
        pools: a token stream for each source.
        plan: the phases; where one has no mixture, its sources have shares in proportion to their tokens.
        seed, content: as of `SampleOrder`.

    Attributes:
        plan_sha256: of the tokens, the seed and the first phase.
        links: of each phase, with all that goes before it.

    Raises:
        UserError: a source that is to be used holds less than one grain, or its share is too small.
    """

    def __init__(self, pools: Sequence[Pool], plan: PhasePlan, seed: int, content: Any = None) -> None:
        self.pools, self.plan, self.seed = list(pools), plan, seed
        self._mixes = [self._mix(phase) for phase in plan.phases]
        base = sha256_json({"phased": PHASED, "seed": seed, "grain": plan.grain, "content": content,
                            "pools": [[pool.name, pool.tokens] for pool in pools]}, streamed="content")
        self.links: list[str] = []
        for phase in plan.phases:
            self.links.append(sha256_json({
                "before": self.links[-1] if self.links else base, "first_step": phase.first_step,
                "sequences": phase.sequences, "length": phase.train.sequence_length, "shares": self._shares(phase)}))
        self.plan_sha256 = self.links[0]
        self.leave_out(Excluded())

    def _shares(self, phase: Phase) -> list[float]:
        mixture = phase.train.mixture
        return [float(pool.tokens if mixture is None else mixture[pool.name]) for pool in self.pools]

    def _mix(self, phase: Phase) -> SampleOrder:
        """How the sources are mixed in a phase: a `SampleOrder` of which only that counts."""
        shares, length, grain = self._shares(phase), phase.train.sequence_length, self.plan.grain
        grain = grain if grain % length == 0 else length
        short = [f"{pool.name} ({pool.tokens:,})" for pool, share in zip(self.pools, shares, strict=True)
                 if share > 0 and not pool.sequences(grain)]
        if short:
            raise UserError(f"{phase.name} takes sequences from {', '.join(short)}: so few training tokens do not fill "
                            f"one of {grain:,} and a label. Give more text, leave the source out of that phase's "
                            f"mixture (0), or lower train.sequence_length and train.grain_tokens.")
        try:
            return SampleOrder(self.pools, grain, self.seed, shares)
        except UserError as error:
            if phase.train.mixture is not None:
                raise
            raise UserError(f"{phase.name} has no mixture, so its sources have shares by their tokens. {error} Give it "
                            f"a mixture.") from None

    def leave_out(self, excluded: Excluded) -> None:
        """Lay the phases out with these sample numbers left out, which a rollback may have added to."""
        self.excluded = excluded
        parts: list[_Part] = []
        first = 0
        states: list[dict[int, Reading]] = [{} for _ in self.pools]
        used: list[dict[int, int]] = [{} for _ in self.pools]  # the last phase that took of each reading
        over = [{pool.name: 0 for pool in self.pools} for _ in self.plan.phases]
        for phase, mix in zip(self.plan.phases, self._mixes, strict=True):
            length = phase.train.sequence_length
            kind = 0 if self.plan.grain % length == 0 else length
            part = _Part(phase, mix, first, tuple(self._reading(pool, state.get(kind), phase)
                                                  for pool, state in zip(self.pools, states, strict=True)))
            parts.append(part)
            end = excluded.take(first, phase.steps * phase.sequences).end
            for number, (reading, share) in enumerate(zip(part.after(end - first), self._shares(phase), strict=True)):
                if share > 0:
                    before = states[number].get(kind)
                    if before is not None and before.length != length:  # only now nothing goes on with it
                        over[used[number][kind]][self.pools[number].name] += before.passed_over
                    states[number][kind], used[number][kind] = reading, phase.number
            first = end
        self.end, self._passed_over = first, over
        # At once: threads beside the loader may be asking where samples that are used already come from.
        self._laid_out = parts, np.array([part.first for part in parts], dtype=np.int64)

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
        parts, begins = self._laid_out
        phases = np.searchsorted(begins, samples, side="right") - 1
        pools, epochs, starts, lengths = (np.empty_like(samples) for _ in range(4))
        for number in np.unique(phases):
            here, part = phases == number, parts[number]
            block, place = np.divmod(samples[here] - part.first, part.mix.period)
            pool = part.mix.pattern[place].astype(np.int64)
            draw = block * part.mix.quotas[pool] + part.mix.ranks[place]
            epoch, start = np.empty_like(draw), np.empty_like(draw)
            for index in np.unique(pool):
                mine, reading = pool == index, part.readings[index]
                epoch[mine], start[mine] = reading.places(reading.draws + draw[mine], self.seed, int(index))
            pools[here], epochs[here], starts[here] = pool, epoch, start
            lengths[here] = part.phase.train.sequence_length
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
        parts, begins = self._laid_out
        for part, end in zip(parts, [*begins[1:].tolist(), below], strict=True):
            count = int(part.draws(max(0, min(end, below) - part.first))[pool])
            if part.phase.train.sequence_length != length or not count:
                continue
            reading = part.readings[pool]
            draws, of = reading.draws_of(sequences, reading.draws, reading.draws + count, self.seed, pool)
            block, rank = np.divmod(draws - reading.draws, int(part.mix.quotas[pool]))
            samples = part.first + block * part.mix.period + np.flatnonzero(part.mix.pattern == pool)[rank]
            order = np.argsort(samples)
            found.append((samples[order], of[order]))
        nothing = np.empty(0, np.int64)
        return (np.concatenate([nothing, *(samples for samples, _ in found)]),
                np.concatenate([nothing, *(of for _, of in found)]))

    def plan_at(self, samples: int) -> str:
        """SHA-256 of what has decided the first `samples` samples: the tokens, the seed and the phases begun."""
        return self.links[max(0, int(np.searchsorted(self._laid_out[1], samples, side="left")) - 1)]

    def consumed(self, samples: int) -> list[dict[str, int]]:
        """Of each phase, the tokens of each source among the first `samples` samples that were not left out."""
        found = []
        for (part, until), left_out in zip(self._within(samples), self.left_out(samples), strict=True):
            counts = part.draws(until - part.first) * part.phase.train.sequence_length
            found.append({pool.name: int(count) - left_out[pool.name]
                          for pool, count in zip(self.pools, counts, strict=True)})
        return found

    def left_out(self, samples: int) -> list[dict[str, int]]:
        """Of each phase, the tokens of each source that were left out among the first `samples` samples."""
        found = []
        for part, until in self._within(samples):
            numbers = sample_numbers(self.excluded.within(part.first, until))
            counts = np.bincount(self.locate(numbers).pool, minlength=len(self.pools))
            found.append({pool.name: int(count) * part.phase.train.sequence_length
                          for pool, count in zip(self.pools, counts, strict=True)})
        return found

    def _within(self, samples: int) -> list[tuple[_Part, int]]:
        """Each phase, and where in it the first `samples` samples end."""
        parts, begins = self._laid_out
        ends = [*begins[1:].tolist(), max(samples, self.end)]
        return [(part, max(part.first, min(samples, end))) for part, end in zip(parts, ends, strict=True)]

    def passed_over(self) -> list[dict[str, int]]:
        """Of each phase, the tokens of each source that it leaves to the next epoch, where the next phase that goes on
        with the source has another length."""
        return self._passed_over

    def epochs(self, samples: int) -> dict[str, float]:
        """Tokens trained on in the first `samples` samples over the tokens that there are, by source."""
        phases = self.consumed(samples)
        return {pool.name: sum(phase[pool.name] for phase in phases) / pool.tokens if pool.tokens else 0.0
                for pool in self.pools}
