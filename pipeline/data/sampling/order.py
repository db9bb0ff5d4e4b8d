"""Which sequence is sample number g: a pure function, so that the loader's whole state is one integer.

`sample(g)` for g = 0, 1, 2, ... depends on the token shards, the phases, the mixtures, the seed and what rollbacks left
out: never on ranks, micro-batches, workers or restarts. A checkpoint stores the number of samples used and the hash of
the plan; any number of ranks continues from there with every sample used exactly once.

Sample numbers continue over phases; a training without phases is one phase. In a phase the sources take turns (`Mix`),
and each source is read through its `Cursor`: epoch after epoch, each in a new shuffled order. Phases end by steps.
Samples that a rollback left out (pipeline/data/exclusion.py) push the phases after them back by as many numbers;
nothing before them changes. A phase of another sequence length continues the epoch:

- Running text is cut into chunks, here called grains, of as many tokens as the longest sequence of any phase has, and
  grains are shuffled. A phase of shorter sequences takes a window of many grains at a time, and shuffles the sequences
  within it. When the length changes, the next epoch has the rest of the current window (`Cursor.passed_over`). A phase
  whose length does not divide the grain reads its sources by itself, from their beginning (`PHASE_EPOCHS`).
- Packed documents: the sequences that the epoch has left are packed again to the new length, and come first. So every
  token comes exactly once an epoch, whatever the lengths.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from drover.pipeline.config.phases import Phase, PhasePlan
from drover.pipeline.config.training import SMALLEST_SHARE
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import sha256_json
from drover.pipeline.data.exclusion import Excluded, sample_numbers
from drover.pipeline.data.mixing import GOLDEN, mixed

VERSION = 2
"""Version of the order. A change that moves any sample must raise it."""
PERIOD = 4096
"""Samples after which a mixture's shares are met exactly, to within one sample a source. It is longer where a source
would get none of so many."""
LEAST = 8
"""Samples that each source gets in a period that is longer."""
ROUNDS = 6
WINDOW = 1024
"""The most grains in which the sequences of a shorter phase are shuffled."""
PART = 16
"""A window has at most 1 / PART of a source."""
PHASE_EPOCHS = 1 << 32
"""First epoch of sources that a phase reads by itself, times the phase's number from 1."""
TOGETHER = "all sources"
"""Name of the one pool of a training with neither phases nor a mixture."""


class Pool(NamedTuple):
    """Text that is shuffled as one: a source, or all of them."""

    name: str
    tokens: int


class Segment(NamedTuple):
    """Pieces of a source that are read in a shuffled order: packed sequences, or grains of running text.

    space: number of the sequences that they are, or hold (`TrainingData.spaces`). pieces: how many there are. tokens:
    of all of them, without padding. identity: of how documents are packed into them. each: sequences of a piece.
    alone: the length of the sequences, where no other length shares the pieces; else 0.
    """

    space: int
    pieces: int
    tokens: int
    identity: str = ""
    each: int = 1
    alone: int = 0


class Located(NamedTuple):
    """Where samples come from: pool, epoch of it, and sequence number `sequence` of `TrainingData.spaces[space][pool]`;
    int64 of one shape."""

    pool: np.ndarray
    epoch: np.ndarray
    space: np.ndarray
    sequence: np.ndarray


class Taken(NamedTuple):
    """What a phase takes: tokens of each pool that are trained on, and that were left out; and tokens of padding. Of
    packed sequences it is what they have on average."""

    consumed: dict[str, int]
    left_out: dict[str, int]
    padding: int


class SequenceSpace(Protocol):
    """How documents become sequences: one after another (`RunningText`), or packed (`packing.PhasePackings`). Called on
    all ranks alike.

    Attributes:
        padded: whether sequences have padding.
    """

    padded: bool

    def segments(self, length: int) -> list[Segment]:
        """An epoch of each pool at sequences of a length."""

    def continued(self, fresh: Cursor, before: Cursor) -> Cursor:
        """How a source is read on at another length. before: how it was read last. fresh: a cursor that begins with a
        whole epoch."""


class RunningText:
    """Documents one after another, cut into grains and these into sequences. See SequenceSpace."""

    padded = False

    def __init__(self, pools: Sequence[Pool], plan: PhasePlan) -> None:
        self.pools, self.plan = pools, plan

    def segments(self, length: int) -> list[Segment]:
        """See SequenceSpace."""
        fits, space = self.plan.grain % length == 0, lengths_of(self.plan).index(length)
        grain = self.plan.grain if fits else length
        counts = [max(0, pool.tokens - 1) // grain for pool in self.pools]  # each has a label for its last token
        return [Segment(space, count, count * grain, "", grain // length, 0 if fits else length) for count in counts]

    def continued(self, fresh: Cursor, before: Cursor) -> Cursor:
        """See SequenceSpace: the rest of the window that was begun is left to the next epoch."""
        return replace(fresh, first=before.first + before.started, left=before.passed_over)


class Mix:
    """How the sources of a phase take turns: a shuffled pattern, gone through again and again.

    Attributes:
        period: places of the pattern. pattern: the pool of each place. earlier: how many places before it are of the
            same pool. quotas: places of each pool.

    Raises:
        UserError: a share is below SMALLEST_SHARE.
    """

    def __init__(self, names: Sequence[str], shares: Sequence[float], seed: int) -> None:
        fractions = np.asarray(shares, dtype=np.float64) / np.sum(shares)
        wanted = fractions > 0
        self.period, self.quotas = PERIOD, _quotas(fractions, PERIOD)
        if not self.quotas[wanted].all():
            smallest = int(np.where(wanted, fractions, np.inf).argmin())
            if fractions[smallest] < SMALLEST_SHARE:
                # Mixtures of the configuration were checked.
                raise UserError(f"A phase without a mixture takes of each source its share of the tokens, and "
                                f"{names[smallest]} has {fractions[smallest]:.3g}; the smallest share that is sampled "
                                f"is {SMALLEST_SHARE:.3g}. Give each phase a mixture.")
            self.period = max(2 * PERIOD, 1 << math.ceil(math.log2(LEAST / fractions[smallest])))
            self.quotas = _quotas(fractions, self.period)
        unshuffled = np.repeat(np.arange(len(shares)), self.quotas)
        self.pattern = unshuffled[permute(np.arange(self.period), self.period, (seed, len(shares), self.period))]
        self.earlier = np.empty(self.period, dtype=np.int64)
        for _, places in groups(self.pattern):
            self.earlier[places] = np.arange(np.count_nonzero(places))

    def draws(self, samples: int) -> np.ndarray:
        """How many of the first `samples` samples are of each pool, int64."""
        block, rest = divmod(samples, self.period)
        counts: np.ndarray = block * self.quotas + np.bincount(self.pattern[:rest], minlength=len(self.quotas))
        return counts

    def turns(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The pool of each sample, and how many samples of that pool come before it; int64."""
        block, place = np.divmod(samples, self.period)
        pool = self.pattern[place]
        return pool, block * self.quotas[pool] + self.earlier[place]


@dataclass(frozen=True)
class Cursor:
    """How a source is read at sequences of one length, in one phase or in several in a row.

    Attributes:
        key: seed and pool, of the shuffles.
        length: of the sequences. full: an epoch.
        first: pieces of whole epochs that were taken before. first_epoch: added to the numbers of its epochs.
        rest: what the epoch before `first` had left; it comes first. left: tokens of that; for running text, tokens of
            the rest of a window, which the next epoch has. phase: the phase that the cursor began in.
        draws: sequences taken since it began.
    """

    key: tuple[int, int]
    length: int
    full: Segment
    first: int = 0
    first_epoch: int = 0
    rest: Segment | None = None
    left: int = 0
    phase: int = 0
    draws: int = 0

    @property
    def each(self) -> int:
        """Sequences of a piece."""
        return self.full.each

    @property
    def window(self) -> int:
        """Pieces whose sequences are shuffled together."""
        return 1 if self.each == 1 else max(1, min(WINDOW, self.full.pieces // PART))

    @property
    def started(self) -> int:
        """Pieces of the windows that were begun."""
        return -(-self.draws // (self.window * self.each)) * self.window

    @property
    def passed_over(self) -> int:
        """Tokens of the window that was begun and not finished."""
        return (self.started * self.each - self.draws) * self.length

    def epoch_of(self, pieces: np.ndarray | int) -> np.ndarray:
        """The epochs of pieces, by their number since the cursor began."""
        later = pieces - (self.rest.pieces if self.rest else 0)
        epochs: np.ndarray = self.first_epoch + np.where(
            later < 0, self.first // self.full.pieces - 1, (self.first + later) // self.full.pieces)
        return epochs

    def segment(self, epoch: int) -> tuple[Segment, int, tuple[int, ...]]:
        """The pieces of an epoch, how many pieces came before them since the cursor began, and the key of their
        shuffle."""
        if self.rest is not None and epoch == self.first // self.full.pieces - 1:
            return self.rest, 0, (*self.key, epoch, self.length, self.phase)
        before = (epoch - self.first_epoch) * self.full.pieces - self.first + (self.rest.pieces if self.rest else 0)
        return self.full, before, (*self.key, epoch)

    def places(self, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Epoch, space and number in it of sequences by their number since the cursor began, int64."""
        pieces, part = np.divmod(self._shuffled(draws), self.each) if self.each > 1 else (draws, 0)
        epochs = self.epoch_of(pieces)
        spaces, result = np.empty_like(draws), np.empty_like(draws)
        for epoch, mask in groups(epochs):
            segment, before, key = self.segment(epoch)
            spaces[mask], result[mask] = segment.space, permute(pieces[mask] - before, segment.pieces, key)
        return epochs, spaces, result * self.each + part

    def _shuffled(self, draws: np.ndarray) -> np.ndarray:
        """The sequences of each window shuffled."""
        size, result = self.window * self.each, np.empty_like(draws)
        for number, mask in groups(draws // size):
            result[mask] = number * size + permute(draws[mask] - number * size, size,
                                                  (*self.key, self.length, self.first, number))
        return result

    def tokens(self, draws: int) -> int:
        """Tokens in the first `draws` sequences since the cursor began; of packed sequences as many as they have on
        average, without padding."""
        early = min(draws, self.rest.pieces) if self.rest else 0
        return round(early * self.mean(self.rest) if self.rest else 0) + (
            (draws - early) * self.full.tokens // (self.full.pieces * self.each))

    def mean(self, segment: Segment) -> float:
        """Tokens that a sequence of a segment has on average."""
        return segment.tokens / (segment.pieces * self.each)


@dataclass(frozen=True)
class Part:
    """A phase as laid out: its first sample number, and the cursors of its sources when it begins."""

    phase: Phase
    mix: Mix
    first: int
    cursors: tuple[Cursor, ...]


class Order:
    """The order of training sequences.

    Args:
        pools: the sources, or all of them as one (`is_one_pool`).
        plan: the phases; where one has no mixture, its sources have shares in proportion to their tokens.
        seed: decides the shuffle.
        content: JSON value that identifies the tokens (shard hashes); enters the hashes only.
        space: how documents become sequences; None: as running text.

    Attributes:
        links: SHA-256 of each phase and all that goes before it. plan_sha256: the first of them.
        without_phases: what the first of them is where no phases are declared: the order in it is the same.
        excluded: samples that are left out.

    Raises:
        UserError: a source that is to be used is too small, or its share is.
    """

    excluded: Excluded

    def __init__(self, pools: Sequence[Pool], plan: PhasePlan, seed: int, content: Any = None,
                 space: SequenceSpace | None = None) -> None:
        self.pools, self.plan, self.seed = list(pools), plan, seed
        self.space: SequenceSpace = space or RunningText(self.pools, plan)
        self.links, self._mixes = list[str](), list[Mix]()
        self.without_phases = ""
        link = sha256_json({"version": VERSION, "seed": seed, "content": content,
                            "pools": [list(pool) for pool in pools]})
        for phase in plan.phases:
            length, shares = phase.train.sequence_length, self.shares(phase)
            segments = self.space.segments(length)
            if short := [f"{pool.name} ({pool.tokens:,})" for pool, share, segment in
                         zip(self.pools, shares, segments, strict=True) if share > 0 and not segment.pieces]:
                raise UserError(f"{phase.name} takes sequences from {', '.join(short)}: so few training tokens do not "
                                f"fill one of {segments[0].each * length:,} and a label. Give more text, lower "
                                f"train.sequence_length and train.grain_tokens, or give the source the weight 0 in the "
                                f"mixture.")
            self._mixes.append(Mix([pool.name for pool in self.pools], shares, seed))
            steps = [phase.first_step, phase.sequences] if plan.declared else []
            links = [sha256_json({"before": link, "steps": own, "length": length, "shares": shares,
                                  "segments": [segment[1:4] for segment in segments]}) for own in (steps, [])]
            self.without_phases = self.without_phases or links[1]
            link = links[0]
            self.links.append(link)
        self.plan_sha256 = self.links[0]
        self._laid: tuple[list[Part], np.ndarray, int] | None = None

    def shares(self, phase: Phase) -> list[float]:
        """The weight of each pool in a phase."""
        mixture = phase.train.mixture
        if mixture is None:
            return [1.0] if len(self.pools) == 1 else [float(pool.tokens) for pool in self.pools]
        return [float(mixture[pool.name]) for pool in self.pools]

    def leave_out(self, excluded: Excluded) -> None:
        """Lay the phases out without these sample numbers; a rollback calls it with more of them. Call it on all ranks
        alike: what epochs have left may have to be packed."""
        parts, first = list[Part](), 0
        states = [dict[int, Cursor]() for _ in self.pools]  # by Segment.alone
        for phase, mix in zip(self.plan.phases, self._mixes, strict=True):
            length, shares = phase.train.sequence_length, self.shares(phase)
            end = excluded.take(first, phase.steps * phase.sequences).end
            cursors = []
            counts = mix.draws(end - first).tolist()
            for number, (full, count) in enumerate(zip(self.space.segments(length), counts, strict=True)):
                cursor = Cursor((self.seed, number), length, full, phase=phase.number,
                                first_epoch=full.alone and (phase.number + 1) * PHASE_EPOCHS)
                if shares[number] > 0:
                    if (before := states[number].get(full.alone)) is not None:
                        cursor = before if before.length == length else self.space.continued(cursor, before)
                    states[number][full.alone] = replace(cursor, draws=cursor.draws + count)
                cursors.append(cursor)
            parts.append(Part(phase, mix, first, tuple(cursors)))
            first = end
        self.excluded = excluded
        self._laid = parts, np.array([part.first for part in parts], dtype=np.int64), first

    @property
    def _laid_out(self) -> tuple[list[Part], np.ndarray, int]:
        """The phases, their first samples, and the end; until `leave_out` is called, with nothing left out. Read it
        once for a computation: `leave_out` replaces it while other threads look up samples that are used already."""
        if self._laid is None:
            self.leave_out(Excluded())
        assert self._laid is not None
        return self._laid

    @property
    def end(self) -> int:
        """The first sample number that no phase takes."""
        return self._laid_out[2]

    def locate(self, samples: np.ndarray) -> Located:
        """Where samples, int64 numbers of any shape, come from. Those beyond the end are of the last phase."""
        samples = np.asarray(samples, dtype=np.int64)
        result = Located(*(np.empty_like(samples) for _ in Located._fields))
        parts, begins, _ = self._laid_out
        for number, within in groups(np.searchsorted(begins, samples, side="right") - 1):
            part = parts[number]
            pools, draws = part.mix.turns(samples[within] - part.first)
            for pool, own in groups(pools):
                mask, cursor = within.copy(), part.cursors[pool]
                mask[within] = own
                result.pool[mask] = pool
                result.epoch[mask], result.space[mask], result.sequence[mask] = cursor.places(cursor.draws + draws[own])
        return result

    def plan_at(self, samples: int) -> str:
        """SHA-256 of what has decided the first `samples` samples: the tokens, the seed and the phases begun."""
        return self.links[max(0, int(np.searchsorted(self._laid_out[1], samples, side="left")) - 1)]

    def taken(self, samples: int) -> list[Taken]:
        """What each phase takes in the first `samples` samples."""
        result = []
        parts, begins, end = self._laid_out
        for part, stop in zip(parts, [*begins[1:].tolist(), max(samples, end)], strict=True):
            until = max(part.first, min(samples, stop))
            numbers = sample_numbers(self.excluded.within(part.first, until))
            places, draws = self.locate(numbers), part.mix.draws(until - part.first).tolist()
            consumed, left_out = dict[str, int](), dict[str, int]()
            for number, (name, _) in enumerate(self.pools):
                cursor, out = part.cursors[number], places.space[places.pool == number]
                left_out[name] = round(sum(np.count_nonzero(out == segment.space) * cursor.mean(segment)
                                           for segment in (cursor.full, cursor.rest) if segment and len(out)))
                consumed[name] = draws[number] and (
                    cursor.tokens(cursor.draws + draws[number]) - cursor.tokens(cursor.draws) - left_out[name])
            trained = (until - part.first - len(numbers)) * part.phase.train.sequence_length
            result.append(Taken(consumed, left_out, trained - sum(consumed.values())))
        return result

    def epochs(self, samples: int) -> dict[str, float]:
        """Tokens trained on in the first `samples` samples over the tokens that there are, by pool."""
        phases = [phase.consumed for phase in self.taken(samples)]
        return {name: sum(phase[name] for phase in phases) / tokens if tokens else 0.0 for name, tokens in self.pools}

    def left_at(self) -> list[dict[str, int]]:
        """By phase and source, tokens that the epoch had left when the length changed before the phase. Packed
        documents: the phase begins with them. Running text: the next epoch has them."""
        return [{pool.name: cursor.left if cursor.phase == part.phase.number else 0
                 for pool, cursor in zip(self.pools, part.cursors, strict=True)} for part in self._laid_out[0]]


def is_one_pool(plan: PhasePlan) -> bool:
    """Whether all sources are shuffled as one, so that each sequence of any of them comes once an epoch."""
    return not plan.declared and plan.phases[0].train.mixture is None


def lengths_of(plan: PhasePlan) -> list[int]:
    """The lengths of sequences of the phases, each once, in the order of the phases."""
    return list(dict.fromkeys(phase.train.sequence_length for phase in plan.phases))


def groups(values: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Each of the values, and a mask of where it is."""
    return ((value, values == value) for value in np.unique(values).tolist())


def permute(numbers: np.ndarray, size: int, key: tuple[int, ...]) -> np.ndarray:
    """A keyed permutation of range(size), applied to `numbers`, without a table.

    A Feistel network of six splitmix64 rounds over the smallest even number of bits that holds `size`; results
    outside the range walk the cycle until they fall inside (fewer than four steps on average).
    """
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    keys = _round_keys(key)
    result = np.asarray(numbers, dtype=np.uint64).copy()
    walking = np.ones(result.shape, dtype=bool)
    while walking.any():
        left, right = result[walking] >> np.uint64(half), result[walking] & mask
        for round_key in keys:
            left, right = right, left ^ (mixed(GOLDEN + (right ^ round_key)) & mask)
        result[walking] = (left << np.uint64(half)) | right
        walking[walking] = result[walking] >= np.uint64(size)
    return result.astype(np.int64)


def _quotas(fractions: np.ndarray, period: int) -> np.ndarray:
    """Places of each pool in a period."""
    exact = fractions * period
    quotas = np.floor(exact).astype(np.int64)
    # Largest remainders get the places that rounding down left; ties go to the earlier pool.
    quotas[np.argsort(quotas - exact, kind="stable")[:period - quotas.sum()]] += 1
    return quotas


def _round_keys(key: tuple[int, ...]) -> np.ndarray:
    state = np.zeros(1, dtype=np.uint64)
    for part in key:
        state = mixed(GOLDEN + (state ^ np.uint64(part & 0xFFFFFFFFFFFFFFFF)))
    return mixed(GOLDEN + (state + np.arange(1, ROUNDS + 1, dtype=np.uint64)))
