"""Which samples a step trained on, and which step trained on a sample, as logged or as planned."""

from __future__ import annotations

import sys
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from drover.pipeline.config.phases import PhasePlan
from drover.pipeline.core.console import echo
from drover.pipeline.core.errors import UserError
from drover.pipeline.data.exclusion import sample_numbers
from drover.tools.ledger import Ledger, trained_on

What = Literal["trained", "skipped", "left out", "to come"]


@dataclass(frozen=True)
class Passage:
    """How a sample was used.

    step: the step that trained on it, skipped its update, used it before a rollback, or will train on it.
    rank: the data-parallel rank that has it, out of --ranks; None for a sample that a rollback left out.
    why: the reason why it was skipped or left out.
    """

    step: int
    what: What
    rank: int | None = None
    why: str = ""


class Steps:
    """The steps of a run: those in its log that no rollback undid, and planned ones.

    Args:
        ledger: the run's records.
        ranks: number of data-parallel ranks.

    Attributes:
        done: the last step in the log.
        planned: the last step of the plan.
    """

    def __init__(self, ledger: Ledger, ranks: int = 1) -> None:
        self.ledger, self.ranks = ledger, ranks
        self.phases = PhasePlan.of(ledger.run.config.train)
        self.planned, self.done = self.phases.steps, max(ledger.final, default=0)
        self._excluded = ledger.excluded()

    def check_ranks(self, step: int | None = None) -> None:
        """UserError if the ranks do not divide the sequences of a step (default: of every step)."""
        for phase in self.phases.phases if step is None else [self.phases.phase_of(step)]:
            if self.ranks < 1 or phase.sequences % self.ranks:
                within = f" of phase {phase.number + 1}" if self.phases.declared else ""
                raise UserError(f"--ranks must divide the {phase.sequences} sequences of a step{within}; asked: "
                                f"{self.ranks} ranks.")

    def warn_of_changes(self) -> None:
        """Warn if the settings changed during the run, so that earlier steps may have had another order."""
        if any(event.get("accepted") for event in self.ledger.events):
            echo("warning: the settings of this run were changed (--accept-changes); earlier steps may have trained on "
                 "other text than is shown here", file=sys.stderr)

    @property
    def end(self) -> int:
        """The sample after the last one of the log and of the plan."""
        planned = self._excluded.take(0, self.phases.sequences_between(0, self.planned)).end
        return max([planned, *(line["samples"][1] for line in self.ledger.final.values())])

    def samples(self, step: int) -> np.ndarray:
        """The sample numbers of a step (from 1), ascending."""
        if (line := self.ledger.final.get(step)) is None:
            before = self.phases.sequences_between(0, step - 1)
            return self._excluded.numbers(0, before, self.phases.sequences_between(0, step) - before)
        return sample_numbers(trained_on(line))

    def skipped(self, step: int) -> str:
        """Why a step's update was skipped; "" if it was not."""
        return str(self.ledger.final.get(step, {}).get("skipped", ""))

    def passage(self, sample: int) -> Passage:
        """How a sample was used, or will be."""
        for rollback in self.ledger.rollbacks:
            if rollback.plan_sha256 in self.ledger.data.order.links and any(
                    first <= sample < end for first, end in rollback.samples):
                return Passage(rollback.step, "left out", why=rollback.why)
        firsts, steps = self._firsts
        place = bisect_right(firsts, sample) - 1
        if place < 0 or not any(first <= sample < end for first, end in trained_on(self.ledger.final[steps[place]])):
            before = sample - sum(end - first for first, end in self._excluded.within(0, sample))
            step = self.phases.step_of(before)
        else:
            step = steps[place]
        why = self.skipped(step)
        what: What = "skipped" if why else "trained" if step <= self.done else "to come"
        parts = np.array_split(self.samples(step), self.ranks)
        return Passage(step, what, next(rank for rank, own in enumerate(parts) if sample in own), why)

    @cached_property
    def _firsts(self) -> tuple[list[int], list[int]]:
        """First samples of the logged steps, ascending, and those steps."""
        pairs = sorted((line["samples"][0], step) for step, line in self.ledger.final.items())
        return [first for first, _ in pairs], [step for _, step in pairs]
