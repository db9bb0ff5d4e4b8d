"""The guards of one start of training: they judge each step, and rollbacks exclude samples permanently."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from drover.pipeline.contract.stage_work import Work
from drover.pipeline.core.console import Say
from drover.pipeline.core.files import Record
from drover.pipeline.data.exclusion import Range
from drover.pipeline.data.provenance import documents_of, named
from drover.pipeline.data.sampling.loader import TrainingData
from drover.pipeline.parallel.ranks import Ranks
from drover.pipeline.records.checkpoints import TrainingProgress
from drover.pipeline.records.rollbacks import Rollback, add_rollback, excluded_by, read_rollbacks
from drover.pipeline.training.engines.engine import StepResult
from drover.pipeline.training.guards import GuardDecision, Guards

Log = Callable[..., None]
"""(event, **details): to events.jsonl, from rank 0."""


class GuardRunner(Guards):
    """The guards of one start of training. Every method is called on all ranks alike.

    Attributes:
        batch_sequences: sequences per global batch.
        excluded: the samples that rollbacks have excluded.
        rollbacks: all rollbacks of the run.
    """

    def __init__(self, work: Work, ranks: Ranks, data: TrainingData, say: Say) -> None:
        super().__init__(work.config.train.guards)
        self.folder = work.folder
        self.ranks = ranks
        self.data = data
        self.say = say
        self.batch_sequences = 0
        self._read()

    def _read(self) -> None:
        self.rollbacks = self.ranks.by_leader(lambda: read_rollbacks(self.folder))
        self.excluded = excluded_by(self.rollbacks, self.data.order.links)
        self.data.leave_out(self.excluded)

    def judge_step(self, step: int, result: StepResult, progress: TrainingProgress, can_roll_back: bool,
                   log: Log) -> GuardDecision:
        """Judge step number `step`. Print and log anything unusual, with the documents of the batch."""
        samples = self.excluded.take(progress.samples, self.batch_sequences).ranges
        decision = self.judge(step, result.loss, result.grad_norm, samples, can_roll_back)
        assert result.applied == decision.applied, "the device and the guards decided differently"
        if decision.event and self.ranks.is_rank_zero:  # only rank 0 prints and logs, so only it reads the documents
            documents = documents_of(self.data, decision.samples)
            meaning = {"skip": "the update was skipped", "rollback": "going back to the last checkpoint",
                       "spike": "logged only"}[decision.event]
            self.say(f"{decision.text}; {meaning}. Documents: {named(documents)}")
            log(decision.event, **decision.details(), documents=[vars(document) for document in documents])
        return decision

    def describe(self, samples: Sequence[Range]) -> str:
        """See Guards. Rank 0 reads them while the others wait: if they exited first, rank 0 would be ended before it
        reports."""
        return str(self.ranks.same(named(documents_of(self.data, samples)) if self.ranks.is_rank_zero else None))

    def exclude(self, decision: GuardDecision, back_to: int) -> None:
        """Exclude the samples of a step from training permanently. The record is on disk before anything is loaded."""
        if self.ranks.is_rank_zero:
            plan = self.data.order.plan_at(decision.samples[-1][1])
            add_rollback(self.folder, Rollback(decision.step, back_to, decision.samples, plan, decision.text))
        self._read()

    def step_fields(self, decision: GuardDecision, before: int, after: int) -> Record:
        """Fields of a step's line in metrics.jsonl about skipped updates and excluded samples; empty if there are
        none."""
        fields = {"skipped": decision.skipped, "rollbacks": len(self.rollbacks),
                  "left_out": [list(part) for part in self.excluded.within(before, after)]}
        return {name: value for name, value in fields.items() if value}
