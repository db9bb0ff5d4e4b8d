"""Everything the training loop holds: set up in one place, in order, and taken down whatever happens."""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from pipeline.config.batch import BatchPlan
from pipeline.config.checks import rank_problems
from pipeline.config.phases import PhasePlan
from pipeline.contract.run import code_hashes
from pipeline.contract.stage_work import Work, git_state, software_versions
from pipeline.contract.stages import STAGES
from pipeline.contract.state import write_state
from pipeline.data.sampling.batch import Batch
from pipeline.errors import UserError, listed
from pipeline.parallel.compiling import compiles
from pipeline.parallel.fp8 import fp8_lines
from pipeline.parallel.grid import Grid
from pipeline.parallel.ranks import start_ranks, stop_ranks
from pipeline.records.checkpoints import CHECKPOINTS, TrainingProgress
from pipeline.records.hangs import write_places
from pipeline.records.pending_evaluations import PendingEvaluations
from pipeline.records.rollbacks import excluded_by, no_longer_left_out, read_rollbacks
from pipeline.training import garbage
from pipeline.training.async_saver import AsyncSaver
from pipeline.training.checkpoint import Checkpoints
from pipeline.training.commit import commit
from pipeline.training.copies.copying import Copying
from pipeline.training.data.opening import refuse_beyond
from pipeline.training.data.step_batches import StepBatches
from pipeline.training.data.token_check import TokenCheck
from pipeline.training.determinism import make_deterministic
from pipeline.training.device_facts import memory_explained
from pipeline.training.engines.build import build_engine
from pipeline.training.engines.engine import StepResult
from pipeline.training.guard_runner import GuardRunner
from pipeline.training.guards import Verdict
from pipeline.training.initial_weights import initial_values
from pipeline.training.monitor import Monitor
from pipeline.training.optimizers.schedule import learning_rate, planned_rate
from pipeline.training.precision import DTYPES
from pipeline.training.profiling import Profiling
from pipeline.training.rank_agreement import RankAgreement
from pipeline.training.recorder import Recorder, train_s
from pipeline.training.resume import agreed_precision, changed_code, changed_future, continued, gone_back, load
from pipeline.training.stop_request import Stop, StopRequest
from pipeline.training.summary import kernel_lines, start_facts, summary_lines
from pipeline.training.watchdog import COMPILED_STEP_S, Watchdog, longest_wait


@dataclass(frozen=True)
class Agreement:
    """What all ranks know before a step: target tokens of the global batch, how many of its tokens are padding, whether
    to save after it, and why to stop after it, if somebody was asked to."""

    targets: int
    padding: int
    save: bool
    stop: Stop | None


class Session:
    """One attempt at training, from the newest valid checkpoint to the end or to a request to stop."""

    def __init__(self, work: Work, watchdog: Watchdog) -> None:
        try:
            self._set_up(work, watchdog)
        except (UserError, OSError):
            if hasattr(self, "copies"):
                self.copies.close()  # otherwise the store stays locked
            raise

    def _set_up(self, work: Work, watchdog: Watchdog) -> None:
        self.work, self.config, self.watchdog = work, work.config, watchdog
        if self.config.train.deterministic:
            make_deterministic()
        self.ranks = start_ranks(longest_wait(self.config), work.store)
        nodes, train = self._meet(), self.config.train
        self.lay_out()
        with self.watchdog.paused(self.ranks.barrier):
            self.batches = StepBatches(work, self.grid, self.plan, self.batch_of_phase, self.say)
        self.data = self.batches.data
        vocabulary_size = int(work.input("tokenizer")[1].counts["vocab_size"])
        self.model_config = self.config.model.model_copy(
            update={"vocab_size": self.config.model.vocab_size or vocabulary_size})
        pending = PendingEvaluations(work.run.folder, self.config)
        self.checkpoints = Checkpoints(work.folder / CHECKPOINTS, self.ranks, self.say,
                                       needed=lambda step: pending(step) or self.tokens.needs(step)
                                       or self.copies.needs(step) or step in self.config.convert.average)
        with self.watchdog.paused(self.ranks.barrier):
            self.copies = Copying(work, self.ranks, self.checkpoints, self.say)
            found = self.copies.newest_valid()
        self.has_checkpoint = found is not None
        self.plan_changes = list[str]()
        if self.plan.declared:
            rollbacks, links = self.ranks.by_leader(lambda: read_rollbacks(work.folder)), self.data.order.links
            if found:
                self.plan_changes = self.ranks.by_leader(lambda: changed_future(*found, self.plan))
                self.plan_changes += no_longer_left_out(rollbacks, links) if self.plan_changes else []
            with self.watchdog.paused(self.ranks.barrier):  # what epochs have left may have to be packed
                self.data.leave_out(excluded_by(rollbacks, links))
        plan = self.data.plan_at(found[1].samples if found else 0)
        if found:
            self.progress = continued(*found, plan, bool(work.drift))
            self.say(f"continuing after step {self.progress.step} ({self.progress.samples:,} samples used) from "
                     f"{found[0].name}")
            if self.ranks.leads and (warning := changed_code(found[0], self._about()["code"])):
                self.say(warning)
            for text in self.plan_changes:
                self.say(f"plan changed: {text}")
        else:
            self.progress = TrainingProgress(plan_sha256=plan)
        refuse_beyond(train, self.data, self.say)
        self.tokens = TokenCheck(work, self.batches.table, self.data, self.ranks, self.progress, self.say,
                                 lambda name, **details: self.recorder.event(name, **details),
                                 stored=self.batches.stored is not None)
        chosen, why = agreed_precision(train.precision, self.progress.precision, self.ranks)
        self.progress, precision = dataclasses.replace(self.progress, precision=chosen), DTYPES[chosen]
        decided = self.config.model_copy(update={"train": train.model_copy(update={"precision": chosen})})
        # So far nothing draws from it; what will must not differ from one start to the next, nor checkpoints' bytes.
        torch.manual_seed(self.config.seed + self.ranks.rank)
        self.as_rehearsed = (f"--config {shlex.quote(str(work.run.folder.absolute() / 'config.yaml'))} "
                             f"model.vocab_size={self.model_config.vocab_size}")
        with (initial_values(work, self.model_config, self.ranks, begun=found is not None) as initial,
              memory_explained(None, self.ranks, self.progress.step, self.as_rehearsed, first=True)):
            self.engine = build_engine(decided, self.model_config, self.grid, precision, self.batch.accumulation,
                                       initial)
        if compiles(train, self.ranks.device, self.config.parallel):
            watchdog.step_s = COMPILED_STEP_S
        self.guard_runner = GuardRunner(work, self.ranks, nodes, self.data, train.guards, self.batch.sequences,
                                       self.say)
        self.saver = AsyncSaver(self.checkpoints, self.ranks, train.checkpoint, self._about(), self.say,
                                self.copies.saved)
        with self.watchdog.paused(self.ranks.barrier):
            if found:
                load(found[0], self.engine, self.ranks, self.progress.updates)
            self.saver.prepare(self.engine.state_shards())
        # Peaks are known for bf16; fp8 is measured against them too, so that its figures compare with those of bf16.
        self.recorder = Recorder(work, self.ranks, self.progress, self.plan, precision == torch.bfloat16)
        with self.watchdog.paused(self.ranks.barrier):
            self.monitor = Monitor(work, self.grid, self.engine, self.recorder, watchdog, self.say, chosen,
                                   self.batches.table, self.batches.opener)
        for text in [*summary_lines(self.config, self.model_config, self.grid, self.data, why),
                     *kernel_lines(self.config, self.engine, self.ranks.device, precision),
                     *fp8_lines(decided, self.model_config, self.grid.tensor, self.ranks.device)]:
            self.say(text)
        self.profiling = Profiling(train.profile, work.folder, self.ranks, watchdog, self.say, self.recorder.event)
        self.leaving = self.begun = self.through = False
        self.stop = StopRequest(self.ranks, work.run.folder, train.stop_after_minutes, work.began)
        work.run.forget_manifests()  # of very many shards they are large
        self.copies.begin(found)
        self._begin()

    def _meet(self) -> list[str]:
        """See that all ranks run the same thing, and say where they are; the node of each."""
        agreement = RankAgreement.gather(self.ranks, self.work)
        self.say(str(agreement))
        if warning := agreement.warning():
            self.say(warning)
        if self.ranks.leads:
            write_places(self.work.folder, agreement.nodes)
        return agreement.nodes

    def lay_out(self) -> None:
        """Give each rank its place and its part of the batch; UserError where that does not come out even."""
        if problems := rank_problems(self.config, self.ranks.world):
            raise UserError(f"This run does not fit {self.ranks.world} ranks: {listed(problems)}")
        self.grid = Grid(self.ranks, self.config.parallel)
        self.plan = PhasePlan.of(self.config.train)
        self.batch_of_phase = [BatchPlan.of(phase.train, self.config.parallel, self.ranks.world)
                               for phase in self.plan.phases]
        self.batch = self.batch_of_phase[0]

    def _begin(self) -> None:
        """Go on from `self.progress`: at the start, and after a rollback."""
        with self.watchdog.paused(self.ranks.barrier):
            self.guard_runner.begin(self.progress)
        self._enter_phase()
        self.batches.begin(self.progress, self.guard_runner.excluded)
        self.step_began = time.perf_counter()
        self.watchdog.pulse()

    def _enter_phase(self) -> None:
        """Take the batch and the sequence length of the next step's phase; where one begins, say so."""
        self.phase = self.plan.phase_of(self.progress.step + 1)
        self.batch = self.batch_of_phase[self.phase.number]
        self.guard_runner.batch_sequences = self.batch.sequences
        # By the full-attention formula: 6 x matrix parameters + attention, not halved.
        self.recorder.flops_per_token = self.model_config.flops_per_token(self.batch.sequence_length, causal=False)
        if self.plan.declared and self.progress.step == self.phase.first_step:
            self.guard_runner.guards.forget()
            self.say(f"{self.phase}; batch {self.batch}")
            if self.begun:
                self._note_phase()

    def _note_phase(self) -> None:
        self.recorder.event("phase", step=self.progress.step, phase=self.phase.number + 1, text=str(self.phase))

    def __enter__(self) -> Session:
        self.stop.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.watchdog.pause()
        garbage.end()
        self.profiling.end()
        self.stop.__exit__()
        self.batches.close()
        self.tokens.close()
        if isinstance(error, (UserError, OSError)):
            # What is being written is sound, and all ranks are still there. On a full disk, what cannot be finished is
            # removed, which makes room to say so.
            self.saver.settle()
            self.copies.close()
        self._record_saves()
        self.recorder.close()
        if error is None:  # after a failure the other ranks are not here to take leave of
            stop_ranks()

    def say(self, text: str) -> None:
        """One line of the stage's story, from rank 0."""
        if self.ranks.leads:
            self.work.say(text)

    def steps(self) -> Iterator[int]:
        """Numbers of the optimizer steps that are still to be done, from 1 on; a rollback goes back among them."""
        self.monitor.catch_up(self.progress)
        self.recorder.begin(self.progress, **start_facts(self))
        self.begun = True  # what comes before the record of a start would be the start before's
        if self.plan.declared and self.progress.step == self.phase.first_step:
            self._note_phase()
        if self.plan_changes:
            self.recorder.plan_changed(self.progress.step, self.plan_changes)
        garbage.begin()
        self.profiling.begin(self.progress.step)
        self.step_began = time.perf_counter()
        while self.unfinished:
            yield self.progress.step + 1

    @property
    def unfinished(self) -> bool:
        """Whether there are steps to be done."""
        return self.progress.step < self.config.train.steps

    def checkpoint_is_due(self, step: int, agreed: Agreement) -> bool:
        """Whether to save after a step: every so many steps or minutes, before leaving, at the end, and where
        `convert.average` names it."""
        due = self.monitor.due(step, self.config.train.checkpoint.every_steps) or step in self.config.convert.average
        return due or agreed.save or agreed.stop is not None

    def lr(self, step: int) -> float:
        """Learning rate of a step."""
        if self.plan.declared:
            return planned_rate(step - 1, self.plan)
        return learning_rate(step - 1, self.config.train)

    def agree(self, batch: Batch) -> Agreement:
        """Over all ranks, in one sum: so all save, leave or fail after the same step."""
        minutes = self.config.train.checkpoint.every_minutes
        late = self.ranks.leads and minutes is not None and time.monotonic() - self.saver.last_save > 60 * minutes
        self.tokens.use(self.progress.step + 1,
                        self.guard_runner.excluded.take(self.progress.samples, self.batch.sequences).ranges)
        counted = (batch.targets, sum(batch.padding)) if self.grid.speaks else (0, 0)
        targets, padding, saves, failures, damaged, checked, *votes = self.ranks.sum(
            *counted, late, self.saver.failed, *self.tokens.votes(), *self.stop.votes())
        if failures:
            self.saver.wait()  # raises, on every rank
        if damaged:
            self.watchdog.pause()
        self.tokens.judge(damaged, checked, self._settle_damaged)
        stop = self.stop.agreed(votes)
        self.leaving = stop is not None
        return Agreement(int(targets), int(padding), bool(saves), stop)

    def update(self, step: int, batch: Batch, agreed: Agreement) -> StepResult:
        """Forward, backward and update over the batch, after the faults that a test injects into this step, and after
        replicas were compared if that is due. UserError as `memory_explained`."""
        self.watchdog.step_begins()
        with memory_explained(self.engine, self.ranks, step, self.as_rehearsed, first=not self.through):
            self.guard_runner.before(step, self.engine, lambda: self.stop.asked)
            with self.monitor.norms(step) as self.norms:
                result = self.engine.step(batch.split(self.batch.micro_batch), self.batch.accumulation, agreed.targets,
                                          self.lr(step), self.guard_runner.guards.limits())
        self.watchdog.pulse()  # judging may read documents from a store
        return result

    def judge(self, step: int, result: StepResult) -> Verdict:
        """What came of a step; where something did, it is said and logged."""
        return self.guard_runner.judge(step, result, self.progress, self.has_checkpoint, self.recorder.event)

    def roll_back(self, verdict: Verdict) -> None:
        """Go back to the newest checkpoint, and leave the samples of the judged step out for good."""
        with self.watchdog.paused(self.ranks.barrier):
            progress = gone_back(self, verdict)
        self.recorder.event("rolled_back", step=progress.step, train_s=train_s(progress),
                            lost_s=round(time.perf_counter() - self.step_began, 3))
        self._begin()

    def advance(self, step: int, result: StepResult, verdict: Verdict, agreed: Agreement) -> None:
        """Note that the step has happened, and what it was; its line goes to the log later (monitor.py says why)."""
        before, step_s = self.progress, time.perf_counter() - self.step_began
        end = self.guard_runner.excluded.take(before.samples, self.batch.sequences).end
        after = dataclasses.replace(before, step=step, samples=end, targets=before.targets + agreed.targets,
                                    tokens=before.tokens + self.batch.tokens - agreed.padding,
                                    updates=self.engine.updates, plan_sha256=self.data.plan_at(end))
        record = self.recorder.step(before, after, result, step_s, self.batches.waited_s, self.lr(step))
        record |= self.batches.fields(self.batch.tokens, agreed.padding)
        record |= self.guard_runner.step_fields(verdict, before.samples, end) | self.norms
        record |= {"phase": self.phase.number + 1} if self.plan.declared else {}
        record["shards_checked"] = self.tokens.checked
        self.progress = dataclasses.replace(after, record=record)
        self.through = True
        self.watchdog.finished(step, step_s)

    def end_step(self) -> None:
        """All that belongs to a step is done; the next one begins."""
        self._record_saves()
        self.profiling.step(self.progress.step)
        garbage.collect(self.progress.step)
        entered = self.unfinished and self.progress.step == self.phase.end_step
        if entered:
            self._enter_phase()
        self.step_began = time.perf_counter()
        self.watchdog.pulse(first=entered)  # its shapes are new

    def save(self) -> None:
        """Begin to save a checkpoint. Replicas are compared first: one of them is what is saved."""
        with self.watchdog.paused(self.ranks.barrier):
            if self.config.train.guards.replica_hash_every is not None:
                self.guard_runner.compare_replicas(self.engine, self.progress.step)
            self.tokens.before_save(self.progress, self._settle_damaged, leaving=self.leaving)
            self.progress = dataclasses.replace(self.progress, guards=self.guard_runner.guards.state())
            self.saver.save(self.engine.state_shards(), self.progress)
        self.has_checkpoint = True  # also while it is written: what comes of a step must not depend on the disk's speed

    def leave(self, stop: Stop) -> None:
        """Say and record why training ends early, once the checkpoint is there."""
        self.recorder.line.interrupt()
        ending = self._settle()
        self.ranks.barrier()  # without an agent, rank 0 has the store in which the others hear that the save is done
        step = self.progress.step
        self.say(f"stopped after step {step} ({stop.reason}); saved; the same command continues")
        self.recorder.event("stop", step=step, reason=stop.reason, **ending)
        if self.ranks.leads:
            write_state(self.work.folder, "preempted", step=step, reason=stop.reason, again=stop.again)
        self.copies.leave(step, self.config.launch.signal_s)

    def _settle(self) -> dict[str, Any]:
        """Wait until what was saved is on the disk; what to record of the end."""
        self.watchdog.pause()
        began = time.perf_counter()
        self.saver.wait()
        self._record_saves()
        return {"stall_s": round(time.perf_counter() - began, 4), "look_s": round(self.recorder.look_s, 3),
                **self.batches.finish()}

    def _settle_damaged(self) -> None:
        """Let a save in flight end, since what it is made of is damaged; nobody may go on from a copy of it."""
        self.saver.settle()
        self.copies.withdraw(self.tokens.sound_to)

    def _record_saves(self) -> None:
        self.recorder.saves([*self.saver.ended(), *self.copies.ended()])

    def finish(self) -> None:
        """Commit: the last checkpoint is proven once more and the manifest written."""
        if self.progress.step > self.config.train.steps:
            raise UserError(f"This run is at step {self.progress.step} already, beyond train.steps "
                            f"{self.config.train.steps}. Ask for at least {self.progress.step}, or use name=<another>.")
        ending = self._settle()
        checked = self.tokens.finish(self._settle_damaged)
        self.copies.finish(self.progress.step)
        self._record_saves()
        self.saver.prune()  # until now the one that this start went on from may have been needed
        found = self.checkpoints.newest_valid()
        if found is None or found[1].step != self.config.train.steps:
            raise UserError(f"The checkpoint of the last step does not read back from {self.checkpoints.folder}. "
                            f"Check the disk and run the stage again; it continues from the last good one.")
        self.recorder.event("finish", step=self.progress.step, **ending)
        self.recorder.close()
        if self.ranks.leads:
            commit(self, found[0], checked)
        self.ranks.barrier()

    def _about(self) -> dict[str, Any]:
        """What a checkpoint's marker says of how it was made; rank 0 writes it, and it alone looks."""
        if not self.ranks.leads:
            return {}
        return {"config": self.config.model_dump(mode="json"), "software": software_versions(), "git": git_state(),
                "code": code_hashes(STAGES["train"], self.config)}
