"""Whether a variant of an experiment is better than its baseline, or only luckier.

Both are trained with the same seeds and measured on the same n documents. The difference D of a seed is a score of its
own over the documents (`scores.py`), and the result is the mean of D over k seeds. Chance comes from the seeds, and
from the documents, which are a sample of all text:

    s_seeds = standard deviation of D over seeds / sqrt(k),     s_documents = standard error over documents
    half width = sqrt((t(k - 1) s_seeds)^2 + (t(n - 1) s_documents)^2)

t is the quantile of Student's distribution: of 2 to 5 seeds a normal one would promise far too much. The squares of the
two parts add up (Zou and Donner, Construction of confidence limits, 2008); each alone gives its exact interval.

Of m variants, chance has m occasions. Holm's method (1979) keeps the probability of any false difference below LEVEL: a
variant counts if its interval of level LEVEL / m excludes 0, then the others if theirs do with one variant less, and so
on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import TypedDict

from drover.pipeline.core.console import counted
from drover.pipeline.core.files import Count, read_lines
from drover.pipeline.evaluation.scores import scored

Losses = Mapping[str, tuple[float, float]]
"""A run's bits and bytes of each validation document, by its key and which of the documents with this key it is."""
LEVEL = 0.05
"""Probability that a sweep in which nothing differs shows a difference."""
MORE_SEEDS = 5
POWER = 0.8
"""The share of sweeps in which a difference that "would be seen" is seen."""


class DocumentLoss(TypedDict):
    """A line of documents.jsonl."""

    source: str
    key: str
    bytes: Count
    nats: float


def read_losses(run: Path) -> Losses:
    """What the stage evaluate of a run recorded of each document; {} if it is not done."""
    result = dict[str, tuple[float, float]]()
    met = Counter[str]()  # equal documents have equal keys
    for one in read_lines(run / "evaluate" / "documents.jsonl", DocumentLoss):
        key = f"{one['source']}/{one['key']}"
        met[key] += 1
        result[f"{key}/{met[key]}"] = one["nats"] / math.log(2), one["bytes"]
    return result


def bits_per_byte(losses: Losses) -> float:
    """Of all documents together."""
    return math.fsum(bits for bits, _ in losses.values()) / math.fsum(size for _, size in losses.values())


@cache
def student(freedom: int, level: float) -> float:
    """The t that the absolute value of Student's variable exceeds with probability `level`; inf without a degree of
    freedom. By the finite series of Abramowitz and Stegun, 26.7.3 and 26.7.4, in the angle of t."""
    if freedom < 1:
        return math.inf
    low = 0.0
    high = math.pi / 2
    while low < (angle := (low + high) / 2) < high:
        cosine = math.cos(angle)
        term = cosine if freedom % 2 else 1.0
        total = 0.0
        for number in range(3 if freedom % 2 else 2, freedom + 1, 2):
            total += term
            term *= cosine * cosine * (number - 1) / number
        inside = math.sin(angle) * total
        if (2 / math.pi * (angle + inside) if freedom % 2 else inside) < 1 - level:
            low = angle
        else:
            high = angle
    return math.sqrt(freedom) * math.tan(low)


@dataclass(frozen=True)
class SeedPairs:
    """A variant's difference from the baseline, in bits per byte; below 0 it is better.

    Attributes:
        by_seed: of each seed. documents: how many both have measured.
        document_error: the standard error over documents; 0 for a single one.
        level: at which it is judged.
    """

    by_seed: Mapping[int, float]
    documents: int
    document_error: float
    level: float = LEVEL

    @property
    def value(self) -> float:
        """The mean over seeds; nan without any."""
        return fmean(self.by_seed.values()) if self.by_seed else math.nan

    @property
    def spread(self) -> float:
        """The standard deviation over seeds; inf for one."""
        return stdev(self.by_seed.values()) if len(self.by_seed) > 1 else math.inf

    def half_width(self, level: float, seeds: int | None = None) -> float:
        """Half of the interval that misses the true difference with probability `level`. seeds: as many, of the same
        spread, instead of its own."""
        seeds = seeds or len(self.by_seed)
        of_documents = student(self.documents - 1, level) * self.document_error if self.document_error else 0.0
        return math.hypot(student(seeds - 1, level) * self.spread / math.sqrt(max(1, seeds)), of_documents)

    @property
    def uncertainty(self) -> float:
        """Half of its interval."""
        return self.half_width(self.level)

    @property
    def is_seen(self) -> bool:
        """Whether the interval excludes 0."""
        return abs(self.value) > self.uncertainty

    def seen_with(self, seeds: int) -> float:
        """The smallest difference that as many seeds would show with probability POWER."""
        error = math.hypot(self.spread / math.sqrt(seeds), self.document_error)
        return self.half_width(self.level, seeds) + NormalDist().inv_cdf(POWER) * error

    def __str__(self) -> str:
        seeds = counted(len(self.by_seed), "seed")
        if len(self.by_seed) < 2:
            return f"no comparison: {seeds}, and chance shows from two on"
        if self.is_seen:
            return (f"{'better' if self.value < 0 else 'worse'} by {abs(self.value):.4f} ± {self.uncertainty:.4f} bits "
                    f"per byte ({seeds})")
        return (f"no difference was seen ({self.value:+.4f} ± {self.uncertainty:.4f}, {seeds}); {MORE_SEEDS} more "
                f"seeds would show {self.seen_with(len(self.by_seed) + MORE_SEEDS):.4f}")


def paired(baseline: Mapping[int, Losses], variant: Mapping[int, Losses]) -> SeedPairs:
    """The differences of the seeds that both have, on the documents that all of these runs have. Both by seed."""
    seeds = sorted(baseline.keys() & variant.keys())
    measured = [losses for seed in seeds for losses in (baseline[seed], variant[seed])]
    keys = [key for key in measured[0] if all(key in losses for losses in measured)] if measured else []
    apart = {seed: [variant[seed][key][0] - baseline[seed][key][0] for key in keys] for seed in seeds}
    sizes = [measured[0][key][1] for key in keys]
    items = [*zip(map(fmean, zip(*apart.values(), strict=True)), sizes, strict=True)]
    return SeedPairs({seed: math.fsum(bits) / math.fsum(sizes) for seed, bits in apart.items() if keys}, len(keys),
                     scored(items)["stderr"] or 0.0)


def judged(differences: Sequence[SeedPairs]) -> list[SeedPairs]:
    """The same, each with the level at which Holm's method judges it. Those with fewer than two seeds do not count."""
    result = [*differences]
    left = {number for number, one in enumerate(result) if len(one.by_seed) > 1}
    seen = left
    while left and seen:
        for number in left:
            result[number] = replace(result[number], level=LEVEL / len(left))
        seen = {number for number in left if result[number].is_seen}
        left = left - seen
    return result
