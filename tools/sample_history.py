"""What a run trained on: its recorded steps and rollbacks, with the order of its samples."""

from __future__ import annotations

from functools import cached_property

from drover.pipeline.contract.run import Run
from drover.pipeline.contract.stage_work import Work
from drover.pipeline.core.errors import UserError
from drover.pipeline.data.exclusion import Excluded, Range
from drover.pipeline.data.sampling.loader import TrainingData
from drover.pipeline.data.token_shards import ShardTable
from drover.pipeline.records.metrics import Line, RunFacts, excluded_by, is_abandoned
from drover.pipeline.training.data import open_training_data, read_shard_table


class SampleHistory(RunFacts):
    """The facts of a run, and its train stage's `work` and data. UserError for a step without its samples."""

    def __init__(self, run: Run) -> None:
        super().__init__(run.folder)
        self.run = run
        self.work = Work(run, "train", run.fingerprint("train"))
        for line in self.lines:
            if absent := [name for name in ("samples", "loss", "grad_norm") if name not in line]:
                raise UserError(f"Step {line['step']} in {self.train / 'metrics.jsonl'} has no "
                                f"{' and no '.join(absent)}. Take the file from a copy of the run.")

    @cached_property
    def table(self) -> ShardTable:
        """The token shards."""
        return read_shard_table(self.work)

    @cached_property
    def data(self) -> TrainingData:
        """The order in which training reads them, without samples that rollbacks left out."""
        data = open_training_data(self.work, self.table, self.work.input("encode")[0])
        data.leave_out(excluded_by(self.rollbacks, data.order.links))  # phases lie after what those before left out
        return data

    def excluded(self, rollbacks: int | None = None) -> Excluded:
        """The samples that the first `rollbacks` rollbacks left out; by default all of them."""
        return excluded_by(self.rollbacks[:rollbacks], self.data.order.links)

    def is_abandoned(self, line: Line, rollbacks: int | None = None) -> bool:
        """Whether one of the first `rollbacks` rollbacks undid the step of this line."""
        return is_abandoned(line, self.rollbacks[:rollbacks], self.data.order.links)

    @cached_property
    def final(self) -> dict[int, Line]:
        """The last line of each step, unless a rollback undid it."""
        return {line["step"]: line for line in self.steps if not self.is_abandoned(line)}


def trained_on(line: Line) -> list[Range]:
    """The samples of a step as ranges, without those that it skipped."""
    first, end = line["samples"]
    return Excluded(line.get("left_out", ())).remaining(first, end)
