"""What orders of samples over phases have in common, however sequences are made of documents.

They are still pure functions of the sample number, whose state is one integer; the numbers go on over phases. Phases
end by steps. Samples that a rollback left out (pipeline/data/exclusion.py) push the phases after them back by as many
numbers, of what lies before nothing changes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from pipeline.config.phases import Phase, PhasePlan
from pipeline.data.exclusion import Excluded, sample_numbers
from pipeline.data.sampling.order import Pool, SampleOrder
from pipeline.errors import UserError
from pipeline.files import sha256_json

R = TypeVar("R")
"""How a source is being read: in one phase, or in several in a row."""


@dataclass(frozen=True)
class Part(Generic[R]):
    """A phase as laid out: its first sample number, and how its sources stand when it begins."""

    phase: Phase
    mix: SampleOrder
    first: int
    readings: tuple[R, ...]

    def draws(self, samples: int) -> np.ndarray:
        """Sequences of each source among the first `samples` of the phase."""
        block, rest = divmod(samples, self.mix.period)
        counted: np.ndarray = block * self.mix.quotas + np.bincount(self.mix.pattern[:rest],
                                                                   minlength=len(self.readings))
        return counted

    def drawn(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source of samples, and how many of the phase's samples of that source come before; int64."""
        block, place = np.divmod(samples - self.first, self.mix.period)
        pool = self.mix.pattern[place].astype(np.int64)
        return pool, block * self.mix.quotas[pool] + self.mix.ranks[place]

    def samples(self, pool: int, draws: np.ndarray) -> np.ndarray:
        """`drawn` backwards: the samples with which the source is drawn from, by how many come before."""
        block, rank = np.divmod(draws, int(self.mix.quotas[pool]))
        found: np.ndarray = self.first + block * self.mix.period + np.flatnonzero(self.mix.pattern == pool)[rank]
        return found


class Here(NamedTuple, Generic[R]):
    """Some of the samples asked for, those of one source in one phase: which, and how many were drawn before."""

    mask: np.ndarray
    part: Part[R]
    pool: int
    draws: np.ndarray


class OverPhases(ABC, Generic[R]):
    """An order of training sequences over the phases of a plan.

    Args:
        pools: a token stream for each source.
        plan: the phases; where one has no mixture, its sources have shares in proportion to their tokens.
        seed: decides the shuffle.
        base: JSON that identifies the tokens and how they are read; `content` in it may be an iterator.

    Attributes:
        plan_sha256: of the tokens, the seed and the first phase.
        links: of each phase, with all that goes before it.
        excluded: what is left out.

    Raises:
        UserError: a source that is to be used is too small, or its share is.
    """

    excluded: Excluded

    def __init__(self, pools: Sequence[Pool], plan: PhasePlan, seed: int, base: dict[str, Any]) -> None:
        self.pools, self.plan, self.seed = list(pools), plan, seed
        self._mixes = [self._mix(phase) for phase in plan.phases]
        before = sha256_json(base, streamed="content")
        self.links: list[str] = []
        for phase in plan.phases:
            self.links.append(sha256_json({
                "before": self.links[-1] if self.links else before, "first_step": phase.first_step,
                "sequences": phase.sequences, "length": phase.train.sequence_length, "shares": self.shares(phase),
                **self._identity(phase)}))
        self.plan_sha256 = self.links[0]
        self._laid: tuple[list[Part[R]], np.ndarray] | None = None
        self._end = 0

    def _identity(self, phase: Phase) -> dict[str, Any]:
        """What else a phase's hash has of how its sequences are made."""
        return {}

    @abstractmethod
    def _streams(self, phase: Phase) -> tuple[list[Pool], int]:
        """What the sources hold for a phase, and of how many tokens one piece of it is."""

    @abstractmethod
    def _tokens(self, part: Part[R], pool: int, draws: int) -> int:
        """Tokens in the first `draws` sequences that a phase takes of a source."""

    @abstractmethod
    def _tokens_of(self, part: Part[R], samples: np.ndarray) -> list[int]:
        """Tokens of each source in these samples of a phase."""

    @abstractmethod
    def leave_out(self, excluded: Excluded) -> None:
        """Lay the phases out with these sample numbers left out, which a rollback may have added to."""

    @property
    def _laid_out(self) -> tuple[list[Part[R]], np.ndarray]:
        """The phases, and their first samples; with nothing left out, as long as `leave_out` was not called. Taken at
        once: threads beside the loader may be asking where samples that are used already come from."""
        if self._laid is None:
            self.leave_out(Excluded())
        assert self._laid is not None
        return self._laid

    @property
    def end(self) -> int:
        """The first sample number that no phase takes."""
        _ = self._laid_out
        return self._end

    def _lay_out(self, parts: list[Part[R]], end: int, excluded: Excluded) -> None:
        self.excluded, self._end = excluded, end
        self._laid = parts, np.array([part.first for part in parts], dtype=np.int64)

    def shares(self, phase: Phase) -> list[float]:
        """The weight of each source in a phase."""
        mixture = phase.train.mixture
        return [float(pool.tokens if mixture is None else mixture[pool.name]) for pool in self.pools]

    def _mix(self, phase: Phase) -> SampleOrder:
        """How the sources are mixed in a phase: a `SampleOrder` of which only that counts."""
        shares, (pools, length) = self.shares(phase), self._streams(phase)
        short = [f"{pool.name} ({pool.tokens:,})" for pool, share in zip(pools, shares, strict=True)
                 if share > 0 and not pool.sequences(length)]
        if short:
            raise UserError(f"{phase.name} takes sequences from {', '.join(short)}: so few training tokens do not fill "
                            f"one of {length:,} and a label. Give more text, leave the source out of that phase's "
                            f"mixture (0), or lower train.sequence_length and train.grain_tokens.")
        try:
            return SampleOrder(pools, length, self.seed, shares)
        except UserError as error:
            if phase.train.mixture is not None:
                raise
            raise UserError(f"{phase.name} has no mixture, so its sources have shares by their tokens. {error} Give it "
                            f"a mixture.") from None

    def _here(self, samples: np.ndarray) -> Iterator[Here[R]]:
        """Samples, int64 of any shape, by phase and source."""
        parts, begins = self._laid_out
        phases = np.searchsorted(begins, samples, side="right") - 1
        for number in np.unique(phases):
            here = phases == number
            pools, draws = parts[number].drawn(samples[here])
            for pool in np.unique(pools).tolist():
                mask = here.copy()
                mask[here] = pools == pool
                yield Here(mask, parts[number], pool, draws[pools == pool])

    def _taken(self, pool: int, below: int) -> Iterator[tuple[Part[R], int]]:
        """The phases with how many of their samples below `below` are of a source, where there are any."""
        parts, begins = self._laid_out
        for part, end in zip(parts, [*begins[1:].tolist(), below], strict=True):
            if count := int(part.draws(max(0, min(end, below) - part.first))[pool]):
                yield part, count

    def plan_at(self, samples: int) -> str:
        """SHA-256 of what has decided the first `samples` samples: the tokens, the seed and the phases begun."""
        return self.links[max(0, int(np.searchsorted(self._laid_out[1], samples, side="left")) - 1)]

    def consumed(self, samples: int) -> list[dict[str, int]]:
        """Of each phase, the tokens of each source among the first `samples` samples that were not left out."""
        found = []
        for (part, until), left_out in zip(self._within(samples), self.left_out(samples), strict=True):
            counts = part.draws(until - part.first).tolist()
            found.append({pool.name: self._tokens(part, number, count) - left_out[pool.name]
                          for number, (pool, count) in enumerate(zip(self.pools, counts, strict=True))})
        return found

    def left_out(self, samples: int) -> list[dict[str, int]]:
        """Of each phase, the tokens of each source that were left out among the first `samples` samples."""
        found = []
        for part, until in self._within(samples):
            numbers = sample_numbers(self.excluded.within(part.first, until))
            found.append({pool.name: count for pool, count in
                          zip(self.pools, self._tokens_of(part, numbers), strict=True)})
        return found

    def _within(self, samples: int) -> list[tuple[Part[R], int]]:
        """Each phase, and where in it the first `samples` samples end."""
        parts, begins = self._laid_out
        ends = [*begins[1:].tolist(), max(samples, self.end)]
        return [(part, max(part.first, min(samples, end))) for part, end in zip(parts, ends, strict=True)]

    def epochs(self, samples: int) -> dict[str, float]:
        """Tokens trained on in the first `samples` samples over the tokens that there are, by source."""
        phases = self.consumed(samples)
        return {pool.name: sum(phase[pool.name] for phase in phases) / pool.tokens if pool.tokens else 0.0
                for pool in self.pools}
