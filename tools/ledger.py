"""A run's ledger: the steps and rollbacks that its train stage recorded, with the order of its samples."""

from __future__ import annotations

from functools import cached_property

from drover.pipeline.contract.run import Run
from drover.pipeline.contract.stage_work import Work
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Record, read_lines
from drover.pipeline.data.exclusion import Excluded
from drover.pipeline.records.metrics import Event, standing_lines
from drover.pipeline.records.rollbacks import excluded_by, is_abandoned, read_rollbacks
from drover.pipeline.training.data.opening import open_training_data, read_shard_table

Line = Record
"""Of metrics.jsonl: a step."""


class Ledger:
    """The records of a run, read once.

    Attributes:
        work: its train stage.
        table, data: the token shards, and the order in which training reads them, without samples that rollbacks left
            out.
        events: starts, rollbacks and damaged shards, the oldest first.
        lines: of steps, in the order of the file, without those that a change of the plan undid.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.folder = run, run.folder / "train"
        self.work = Work(run, "train", run.fingerprint("train"))
        self.table = read_shard_table(self.work)
        self.data = open_training_data(self.work, self.table, self.work.input("encode")[0])
        self.rollbacks = read_rollbacks(self.folder)
        self.events = list(read_lines(self.folder / "events.jsonl", Event))
        self.lines = standing_lines(path := self.folder / "metrics.jsonl")
        for line in self.lines:
            if absent := [name for name in ("samples", "loss", "grad_norm") if name not in line]:
                raise UserError(f"Step {line['step']} in {path} has no {' and no '.join(absent)}. Take the file from a "
                                f"copy of the run.")
        self.data.leave_out(self.excluded())  # phases lie after what rollbacks left out of those before

    def excluded(self, rollbacks: int | None = None) -> Excluded:
        """The samples that the first `rollbacks` rollbacks left out; by default all of them."""
        return excluded_by(self.rollbacks[:rollbacks], self.data.order.links)

    def is_abandoned(self, line: Line, rollbacks: int | None = None) -> bool:
        """Whether one of the first `rollbacks` rollbacks undid the step of this line."""
        return is_abandoned(line, self.rollbacks[:rollbacks], self.data.order.links)

    @cached_property
    def final(self) -> dict[int, Line]:
        """The last line of each step, unless a rollback undid it."""
        last = {line["step"]: line for line in self.lines}
        return {step: line for step, line in sorted(last.items()) if not self.is_abandoned(line)}


def trained_on(line: Line) -> list[tuple[int, int]]:
    """The samples of a step as ranges, without those that it skipped."""
    first, end = line["samples"]
    return Excluded(line.get("left_out", ())).remaining(first, end)
