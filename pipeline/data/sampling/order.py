"""Which sequence is sample number g: a pure function, so that the loader's whole state is one integer.

`sample(g)` for g = 0, 1, 2, ... depends on the token shards, the sequence length, the mixture and the seed only:
never on ranks, micro-batches, workers or restarts. A checkpoint stores the number of samples used and the hash of
the plan; any number of ranks can go on from there with every sample used exactly once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.config.mixture import SMALLEST_SHARE, share_too_small
from pipeline.errors import UserError
from pipeline.files import sha256_json

ALGORITHM = 1
"""Version of the order. A change that moves any sample must raise it."""
PERIOD = 4096
"""Samples after which a mixture's shares are met exactly, to within one sample a source. It is longer where a source
would get none of so many."""
LEAST = 8
"""Samples that each source gets in a period that is longer."""
ROUNDS = 6


@dataclass(frozen=True)
class Pool:
    """A stream of tokens that is cut into sequences and shuffled as one: a source, or all of them.

    packed: how many sequences a packing makes of it; None: it is cut wherever a sequence is full. plan: what identifies
    that packing.
    """

    name: str
    tokens: int
    packed: int | None = None
    plan: str = ""

    def sequences(self, length: int) -> int:
        """How many sequences of `length` tokens it holds; if it is cut, each with a label for its last token."""
        return max(0, self.tokens - 1) // length if self.packed is None else self.packed

    def identity(self) -> list[Any]:
        """What the plan hash has of it."""
        packing = [] if self.packed is None else [{"packing": "best_fit", "sequences": self.packed, "plan": self.plan}]
        return [self.name, self.tokens, *packing]


class SampleOrder:
    """The order of training sequences.

    Args:
        pools: token streams; every sequence of a pool is used once before any is used again.
        length: tokens per sequence.
        seed: decides the shuffle.
        shares: weight of each pool among the samples; needed where there are several pools.
        content: JSON value that identifies the tokens (shard hashes), or an iterator over the items of a list of them;
            enters the plan hash only.

    Attributes:
        plan_sha256: of all that decides the order. links: it alone, as of a training in one phase.

    Raises:
        UserError: a pool that is to be used holds less than one sequence, or its share is below SMALLEST_SHARE.
    """

    def __init__(self, pools: list[Pool], length: int, seed: int, shares: list[float] | None = None,
                 content: Any = None) -> None:
        shares = shares or [1.0] * len(pools)
        assert len(shares) == len(pools) and len(pools) > 0
        self.pools, self.length, self.seed = pools, length, seed
        self.counts = np.array([pool.sequences(length) for pool in pools], dtype=np.int64)
        empty = [pool.name for pool, count, share in zip(pools, self.counts, shares, strict=True)
                 if share > 0 and count == 0]
        if empty:
            raise UserError(f"The training tokens of {', '.join(empty)} do not fill one sequence of "
                            f"{length} tokens. Give more text, or lower train.sequence_length.")
        self.period = _period([pool.name for pool in pools], shares)
        self.pattern, self.ranks, self.quotas = _pattern(shares, seed, self.period)
        longer = {} if self.period == PERIOD else {"period": self.period}
        self.plan_sha256 = sha256_json({
            "algorithm": ALGORITHM, "length": length, "seed": seed, "shares": [float(share) for share in shares],
            "pools": [pool.identity() for pool in pools], "content": content, **longer}, streamed="content")
        self.links = [self.plan_sha256]

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Where samples come from.

        Args:
            samples: sample numbers, int64 of any shape.

        Returns:
            pool, epoch and sequence number inside the pool, each int64 of the same shape.
        """
        block, place = np.divmod(np.asarray(samples, dtype=np.int64), self.period)
        pool = self.pattern[place]
        draw = block * self.quotas[pool] + self.ranks[place]  # how many samples of this pool came before
        epoch, turn = np.divmod(draw, self.counts[pool])
        sequence = np.empty_like(turn)
        for number in np.unique(pool).tolist():
            own = pool == number
            for turned in np.unique(epoch[own]).tolist():
                here = own & (epoch == turned)
                sequence[here] = permute(turn[here], int(self.counts[number]), (self.seed, number, turned))
        return pool, epoch, sequence

    def inverse(self, pool: int, sequences: np.ndarray, below: int) -> tuple[np.ndarray, np.ndarray]:
        """Which samples are these sequences: `locate` backwards.

        Args:
            sequences: numbers of sequences of the pool, int64, one dimension.
            below: only samples with smaller numbers are given.

        Returns:
            sample and sequence, int64 of one length: a sequence has one sample an epoch, as far as `below` reaches. The
            samples ascend.
        """
        quota, count = int(self.quotas[pool]), int(self.counts[pool])
        blocks, rest = divmod(below, self.period)
        draws = blocks * quota + int(np.count_nonzero(self.pattern[:rest] == pool))  # samples of the pool before it
        if not draws or not len(sequences):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        turns = [epoch * count + unpermute(sequences, count, (self.seed, pool, epoch))
                 for epoch in range(-(-draws // count))]
        drawn = np.stack(turns)
        wanted = drawn < draws
        block, rank = np.divmod(drawn[wanted], quota)
        samples = block * self.period + np.flatnonzero(self.pattern == pool)[rank]
        order = np.argsort(samples)
        return samples[order], np.broadcast_to(np.asarray(sequences, np.int64), drawn.shape)[wanted][order]

    def epochs(self, samples: int) -> dict[str, float]:
        """How often each pool has been gone through after `samples` samples."""
        block, rest = divmod(samples, self.period)
        used = block * self.quotas + np.bincount(self.pattern[:rest], minlength=len(self.pools))
        return {pool.name: float(count / size) if size else 0.0
                for pool, count, size in zip(self.pools, used, self.counts, strict=True)}


def permute(numbers: np.ndarray, size: int, key: tuple[int, ...]) -> np.ndarray:
    """A keyed permutation of range(size), applied to `numbers`, without a table.

    A Feistel network of six splitmix64 rounds over the smallest even number of bits that holds `size`; results
    outside the range walk the cycle until they fall inside (fewer than four steps on average).
    """
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    keys = _round_keys(key)
    result = np.asarray(numbers, dtype=np.uint64).copy()
    outside = np.ones(result.shape, dtype=bool)
    while outside.any():
        left, right = result[outside] >> np.uint64(half), result[outside] & mask
        for round_key in keys:
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        result[outside] = (left << np.uint64(half)) | right
        outside[outside] = result[outside] >= np.uint64(size)
    return result.astype(np.int64)


def unpermute(numbers: np.ndarray, size: int, key: tuple[int, ...]) -> np.ndarray:
    """The inverse of `permute`: the rounds backwards, walking each cycle the other way round."""
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    keys = _round_keys(key)[::-1]
    result = np.asarray(numbers, dtype=np.uint64).copy()
    outside = np.ones(result.shape, dtype=bool)
    while outside.any():
        left, right = result[outside] >> np.uint64(half), result[outside] & mask
        for round_key in keys:
            left, right = right ^ (_mix(left ^ round_key) & mask), left
        result[outside] = (left << np.uint64(half)) | right
        outside[outside] = result[outside] >= np.uint64(size)
    return result.astype(np.int64)


def _period(names: list[str], shares: list[float]) -> int:
    """The length of a period: PERIOD where each source with a share gets a place in it, else the smallest power of two
    in which each gets LEAST."""
    fractions = np.asarray(shares, dtype=np.float64) / np.sum(shares)
    wanted = fractions > 0
    if _quotas(shares, PERIOD)[wanted].all():
        return PERIOD
    smallest = int(np.where(wanted, fractions, np.inf).argmin())
    if fractions[smallest] < SMALLEST_SHARE:
        raise UserError(share_too_small(names[smallest], float(fractions[smallest])))
    return max(2 * PERIOD, 1 << math.ceil(math.log2(LEAST / fractions[smallest])))


def _quotas(shares: list[float], period: int) -> np.ndarray:
    """Places of each pool in a period."""
    exact = np.asarray(shares, dtype=np.float64) / np.sum(shares) * period
    quotas = np.floor(exact).astype(np.int64)
    # Largest remainders get the places that rounding down left; ties go to the earlier pool.
    quotas[np.argsort(quotas - exact, kind="stable")[:period - quotas.sum()]] += 1
    return quotas


def _pattern(shares: list[float], seed: int, period: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pool of each place in a period, rank of the place among those of its pool, places of each pool."""
    quotas = _quotas(shares, period)
    unshuffled = np.repeat(np.arange(len(shares)), quotas)
    pattern = unshuffled[permute(np.arange(period), period, (seed, len(shares), period))]
    ranks = np.empty(period, dtype=np.int64)
    for pool in range(len(shares)):
        places = np.flatnonzero(pattern == pool)
        ranks[places] = np.arange(len(places))
    return pattern, ranks, quotas


def _round_keys(key: tuple[int, ...]) -> np.ndarray:
    state = np.zeros(1, dtype=np.uint64)
    for part in key:
        state = _mix(state ^ np.uint64(part & 0xFFFFFFFFFFFFFFFF))
    return _mix(state + np.arange(1, ROUNDS + 1, dtype=np.uint64))


def _mix(value: np.ndarray) -> np.ndarray:
    """The splitmix64 step (Steele, Lea, Flood 2014), vectorised; arithmetic is modulo 2^64."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
