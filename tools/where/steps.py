"""Which samples a step trained on, and which step trained on a sample: as logged, or as it will be."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pipeline.config.phases import PhasePlan
from pipeline.config.tree import Config
from pipeline.data.exclusion import Excluded, sample_numbers
from pipeline.errors import UserError
from pipeline.files import read_lines
from pipeline.records.metrics import read_metrics
from pipeline.records.rollbacks import excluded_by, is_abandoned, read_rollbacks

What = Literal["trained", "skipped", "left out", "to come"]


@dataclass(frozen=True)
class Passage:
    """What became of a sample.

    step: that trained on it, skipped its update, saw it before a rollback left it out, or will train on it.
    rank: the data-parallel rank that had it, of as many as were asked for; None for one that no step keeps.
    why: of a skipped or left-out one.
    """

    step: int
    what: What
    rank: int | None = None
    why: str = ""


class Steps:
    """The steps of a run: those in its log that no rollback undid, and those that are still to come.

    Args:
        run: the run's folder.
        links: hashes of the order in which the samples have their numbers, one a phase.
        ranks: data-parallel ranks on which a step is thought to run.

    Attributes:
        done: the last step in the log.
        excluded: samples that rollbacks left out.
    """

    def __init__(self, run: Path, config: Config, links: Sequence[str], ranks: int = 1) -> None:
        self.run, self.links, self.ranks = run, links, ranks
        self.phases = PhasePlan.of(config.train)
        self.planned = self.phases.steps
        self.rollbacks = read_rollbacks(run / "train")
        self.excluded = excluded_by(self.rollbacks, links)
        self.logged = {record["step"]: record for record in read_metrics(run / "train/metrics.jsonl")
                       if not is_abandoned(record, self.rollbacks, links)}
        self.done = max(self.logged, default=0)

    def check_ranks(self, step: int | None = None) -> None:
        """UserError if the sequences of a step do not come out even on so many ranks; without one, those of any."""
        for phase in self.phases.phases if step is None else [self.phases.phase_of(step)]:
            if self.ranks < 1 or phase.sequences % self.ranks:
                within = f" of phase {phase.number + 1}" if self.phases.declared else ""
                raise UserError(f"--ranks must divide the {phase.sequences} sequences of a step{within}; asked: "
                                f"{self.ranks} ranks.")

    def warn_of_drift(self) -> None:
        """Say it where the log is partly of another order."""
        if any(event.get("drift") for event in read_lines(self.run / "train/events.jsonl")):
            print("warning: this run went on under other settings at some point (--accept-drift); steps before that "
                  "may have seen other text than is shown here", file=sys.stderr)

    @property
    def end(self) -> int:
        """The first sample that no step of the log or of the plan takes."""
        planned = self.excluded.take(0, self.phases.sequences_between(0, self.planned)).end
        return max([planned, *(int(record["samples"][1]) for record in self.logged.values())])

    def samples(self, step: int) -> np.ndarray:
        """The sample numbers of a step (from 1), in their order."""
        if (record := self.logged.get(step)) is None:
            before = self.phases.sequences_between(0, step - 1)
            return self.excluded.numbers(0, before, self.phases.sequences_between(0, step) - before)
        return sample_numbers(_outside(record))

    def skipped(self, step: int) -> str:
        """Why a step's update was skipped; "" if it was not."""
        return str(self.logged.get(step, {}).get("skipped", ""))

    def passage(self, sample: int) -> Passage:
        """What became of a sample, or will."""
        for rollback in self.rollbacks:
            if rollback.plan_sha256 in self.links and any(first <= sample < end for first, end in rollback.samples):
                return Passage(rollback.step, "left out", why=rollback.why)
        if (step := self._logged_step(sample)) is not None:
            why = self.skipped(step)
            return Passage(step, "skipped" if why else "trained", self._rank(step, sample), why)
        before = sample - sum(end - first for first, end in self.excluded.within(0, sample))
        step = self.phases.step_of(before)
        return Passage(step, "trained" if step <= self.done else "to come", self._rank(step, sample))

    @cached_property
    def _firsts(self) -> tuple[list[int], list[int]]:
        """First samples of the logged steps, ascending, and those steps."""
        pairs = sorted((int(record["samples"][0]), step) for step, record in self.logged.items())
        return [first for first, _ in pairs], [step for _, step in pairs]

    def _logged_step(self, sample: int) -> int | None:
        firsts, steps = self._firsts
        place = bisect_right(firsts, sample) - 1
        if place < 0:
            return None
        inside = any(first <= sample < end for first, end in _outside(self.logged[steps[place]]))
        return steps[place] if inside else None

    def _rank(self, step: int, sample: int) -> int:
        parts = np.array_split(self.samples(step), self.ranks)
        return next(rank for rank, own in enumerate(parts) if sample in own)


def _outside(record: dict[str, Any]) -> list[tuple[int, int]]:
    first, end = record["samples"]
    return Excluded(record.get("left_out", ())).outside(first, end)
