"""The training loop: its steps, and its end. `set_up` makes it."""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path

import torch

from drover.model.config import ModelConfig
from drover.pipeline.contract.stage_work import Work
from drover.pipeline.contract.state import write_state
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import output_record
from drover.pipeline.parallel.ranks import Transfer, stop_ranks
from drover.pipeline.records.checkpoints import CHECKPOINTS, MARKER, TrainingProgress, read_marker
from drover.pipeline.records.goodput import run_s
from drover.pipeline.records.hangs import PLACES
from drover.pipeline.records.metrics import ROLLBACKS, Line, RunFacts, read_metrics
from drover.pipeline.records.weight_files import FILE
from drover.pipeline.training.checkpoints import AsyncSaver, load
from drover.pipeline.training.data import DamagedTokensError, StepBatches, TokenCheck
from drover.pipeline.training.device import memory_explained
from drover.pipeline.training.engine import Engine, StepResult
from drover.pipeline.training.guards import GuardDecision, GuardRunner
from drover.pipeline.training.hooks import Hook, Stop, StopAgreement
from drover.pipeline.training.optimizers import planned_rate
from drover.pipeline.training.recorder import Recorder, packing_facts, train_s
from drover.pipeline.training.watchdog import Watchdog

MOST_BRIEF = 4
"""Starts in a row with time for one step at most, after which training does not ask for another one."""


@dataclasses.dataclass(frozen=True)
class StartFacts:
    """What is known of a start before its first step.

    Attributes:
        nodes: the node of each rank.
        plan_changes: what changed in the plan since the checkpoint, a sentence each.
        seconds: of each part of the start. rehearsal: the arguments that rehearse this run's memory.
    """

    nodes: Sequence[str]
    plan_changes: list[str]
    seconds: dict[str, float]
    rehearsal: str


@dataclasses.dataclass(frozen=True)
class PendingStep:
    """A step that is queued, and whose result the host does not know yet.

    Attributes:
        number: counted from 1. end: of its samples. rate: its learning rate.
        sums: over all ranks, of the batch's target tokens and padding and of the hooks' votes, `votes` of each hook.
        waited_s: seconds that it waited for its batch.
    """

    number: int
    end: int
    rate: float
    sums: Transfer
    votes: list[int]
    waited_s: float


@dataclasses.dataclass(eq=False, kw_only=True)
class Loop:
    """One start of training, from the newest valid checkpoint to the end or to a request to stop.

    The host reads what a step computed only when the next one's forward and backward passes are queued, so that a GPU
    always has work. All that a step entails (judging, its line, hooks) then comes between these passes and their
    update, with the weights that the step left. Before a pause (a checkpoint, a validation, the end) it reads at once.

    Attributes:
        batches: this rank's batches, step by step, with the ranks (`grid`) and the phases (`plan`).
        saver: writes checkpoints; has those on disk.
        token_check: None if the configuration turns it off.
        hooks: all hooks, in the order in which they are called. own_hooks: those of train.hooks, by name.
        progress: steps, samples and tokens done so far.
        updated: the step that was updated and not read yet.
        has_checkpoint: whether there is one, written or begun.
        save_requested: whether a hook requested a checkpoint after the current step.
        done: steps of this start.
    """

    work: Work
    watchdog: Watchdog
    batches: StepBatches
    model_config: ModelConfig
    engine: Engine
    saver: AsyncSaver
    recorder: Recorder
    guards: GuardRunner
    stop: StopAgreement
    token_check: TokenCheck | None
    hooks: list[Hook]
    progress: TrainingProgress
    facts: StartFacts

    def __post_init__(self) -> None:
        self.config = self.work.config
        self.data = self.batches.data
        self.plan = self.batches.plan
        self.grid = self.batches.grid
        self.ranks = self.grid.ranks
        self.paused = partial(self.watchdog.paused, self.ranks.barrier)
        self.own_hooks = dict[str, Hook]()
        self.has_checkpoint = self.progress.step > 0
        self.save_requested = False
        self.updated: PendingStep | None = None
        self.done = 0
        self.engine.before_update = self._before_update

    def run(self) -> None:
        """Train to the configured number of steps and commit, or save and leave on a request to stop."""
        with ExitStack() as ends:
            ends.push(self._end)
            ends.enter_context(self.stop)
            self._train()

    # ---- the loop

    def _train(self) -> None:
        self._start()
        while self.unfinished:
            step = self._begin_step()
            if self.updated is not None and not self._complete(self.updated):
                continue
            self._update(step)
            if self._pauses_after(step.number) and self._complete(step) and self.stop.stop and self.unfinished:
                return self._leave(self.stop.stop)
        self._finish()

    @property
    def unfinished(self) -> bool:
        """Whether steps remain."""
        return self.progress.step < self.config.train.steps

    @property
    def next_step(self) -> tuple[int, int]:
        """The number of the step that begins next, and the number of samples before it."""
        last = self.updated
        return (self.progress.step + 1, self.progress.samples) if last is None else (last.number + 1, last.end)

    def due(self, every: int | None, step: int | None = None) -> bool:
        """Whether an action with an interval of `every` steps is due after the last step, or after `step`. It is always
        due after the final step of training."""
        step = self.progress.step if step is None else step
        return every is not None and (step % every == 0 or step == self.config.train.steps)

    def _start(self) -> None:
        def logged() -> bool:
            metrics = read_metrics(self.work.folder / "metrics.jsonl")
            return bool(metrics) and metrics[-1]["step"] >= self.progress.step
        if self.progress.record is not None and not self.ranks.by_leader(logged):
            self._log_step()  # a kill came between a checkpoint and its step's line
        self.recorder.begin(self.progress, **self._start_facts())
        if self.facts.plan_changes:
            self.recorder.plan_changed(self.progress.step, self.facts.plan_changes)
        self.recorder.flush()
        for hook in self.hooks:
            hook.on_start(self)
        self.step_began = time.perf_counter()

    def _begin_step(self) -> PendingStep:
        """Queue an all-reduce of the hooks' votes, so that all ranks save, leave or fail after the same step, and the
        forward and backward passes."""
        batch = self.batches.next()
        votes = [hook.votes(self) for hook in self.hooks]
        counted = (batch.targets, sum(batch.padding)) if self.grid.speaks else (0, 0)
        number, samples = self.next_step
        step = PendingStep(number, self.guards.excluded.take(samples, self.batch.sequences).end,
                         planned_rate(number - 1, self.plan), self.ranks.sums(*counted, *itertools.chain(*votes)),
                         list(map(len, votes)), self.batches.waited_s)
        if not self.engine.queues:
            self._count_votes(step)  # waits until all ranks have their batch
            self.watchdog.step_begins()
        with self._memory_explained(number):
            self.engine.compute(batch.split(self.batch.micro_batch), self.batch.accumulation, step.sums.numbers[0])
        return step

    def _count_votes(self, step: PendingStep) -> None:
        """Give the hooks the sums of all ranks' votes."""
        self.save_requested = False
        sums = iter(step.sums.read()[2:])
        for hook, votes in zip(self.hooks, step.votes, strict=True):
            if votes:
                hook.on_votes(self, list(itertools.islice(sums, votes)))

    def _update(self, step: PendingStep) -> None:
        """Queue the update."""
        if self.engine.queues:
            self._count_votes(step)
        with self._memory_explained(step.number):
            self.engine.update(step.rate, self.guards.limits())
        self.updated = step

    def _memory_explained(self, number: int) -> AbstractContextManager[None]:
        """For the passes and the update of step `number`."""
        return memory_explained(self.engine, self.ranks, number, self.facts.rehearsal,
                                first=not self.done and self.updated is None)

    def _before_update(self) -> None:
        for hook in self.hooks:
            hook.before_update(self)

    def _pauses_after(self, number: int) -> bool:
        """Whether the step's result is read before the next step begins."""
        train = self.config.train
        return (not self.engine.queues or self._checkpoint_is_due(number) or number == self.phase.end_step
                or self.due(train.validation_every, number) or self.due(train.sample_every, number))

    def _complete(self, step: PendingStep) -> bool:
        """Read and judge the result of the updated step, log it, and save if that is due. Returns whether training
        continues from it; False: it went back to a checkpoint."""
        self.updated = None
        self.watchdog.step_begins()  # for its update, all ranks had their batch
        result = self.engine.result()
        self.watchdog.pulse()  # judging may read documents from a store
        decision = self.guards.judge_step(step.number, result, self.progress, self.has_checkpoint, self.recorder.event)
        if decision.event == "rollback":
            self._roll_back(decision)
            return False
        self._advance(step, result, decision)
        if self._checkpoint_is_due(step.number):
            self._save()
        self._log_step()
        for hook in self.hooks:
            hook.after_step(self)
        self._end_step()
        return True

    def _advance(self, step: PendingStep, result: StepResult, decision: GuardDecision) -> None:
        """Update the progress with the step and its record. `_log_step` writes the record later."""
        before = self.progress
        step_s = time.perf_counter() - self.step_began
        targets, padding = map(int, step.sums.read()[:2])
        after = dataclasses.replace(before, step=step.number, samples=step.end, targets=before.targets + targets,
                                    tokens=before.tokens + self.batch.tokens - padding,
                                    updates=self.engine.updates, plan_sha256=self.data.order.plan_at(step.end))
        record = self.recorder.step(before, after, result, step_s, step.waited_s, step.rate)
        if self.data.packings:
            record["padding_share"] = round(padding / self.batch.tokens, 6)
        record |= self.guards.step_fields(decision, before.samples, step.end)
        record |= {"phase": self.phase.number + 1} if self.plan.declared else {}
        for hook in self.hooks:
            hook.on_step(self, result, record)
        self.progress = dataclasses.replace(after, record=record)
        self.done += 1
        self.watchdog.finished(after.step, step_s)

    def _checkpoint_is_due(self, step: int) -> bool:
        """Whether to save after this step: every so many steps or minutes, before leaving, at the end, and at the steps
        of `convert.average`."""
        due = self.due(self.config.train.checkpoint.every_steps or self.config.train.steps, step)
        return due or step in self.config.convert.average or self.save_requested or self.stop.stop is not None

    def _save(self) -> None:
        """Start to save a checkpoint."""
        with self.paused():
            for hook in self.hooks:
                hook.on_save(self)
            states = {name: state for name, hook in self.own_hooks.items() if (state := hook.state())}
            self.progress = dataclasses.replace(self.progress, guards=self.guards.state(), hooks=states)
            self.saver.save(self.engine.state_shards(), self.progress)
        self.has_checkpoint = True  # even while it is written: decisions must not depend on the disk's speed

    def _log_step(self) -> None:
        """Measure the model, and write the step's line. This comes after the step's checkpoint, which holds the line
        too: a measurement may fail (memory, a bad prompt), and must not cost the steps since the last save."""
        record = self.progress.record or {}
        seen = dict[str, object]()
        for hook in self.hooks:
            seen |= hook.look(self)
        if seen or self.due(self.config.train.log_every):
            self.recorder.write("step", record | seen)

    def _end_step(self) -> None:
        """Finish the step; the next one begins."""
        entered = self.unfinished and self.progress.step == self.phase.end_step
        if entered:
            self._enter_phase()
        self.recorder.flush()
        self.step_began = time.perf_counter()
        self.watchdog.pulse(first=entered)  # a new phase has new shapes

    def begin(self) -> None:
        """Continue from `self.progress`: at the start, and after a rollback."""
        self.guards.go_on(self.progress.guards, len(self.guards.rollbacks))
        for name, state in self.progress.hooks.items():
            if name in self.own_hooks:
                self.own_hooks[name].load(state)
        self._enter_phase()
        self.batches.begin(self.progress, self.guards.excluded)
        self.step_began = time.perf_counter()
        self.watchdog.pulse()

    def _enter_phase(self) -> None:
        """Use the batch and the sequence length of the next step's phase. Log the phase if it begins here."""
        self.phase = self.plan.phase_of(self.progress.step + 1)
        self.batch = self.batches.of_phase[self.phase.number]
        self.guards.batch_sequences = self.batch.sequences
        # By the full-attention formula: 6 x matrix parameters + attention, not halved.
        self.recorder.flops_per_token = self.model_config.flops_per_token(self.batch.sequence_length, causal=False)
        if self.plan.declared and self.progress.step == self.phase.first_step:
            self.guards.forget()
            self.say(f"{self.phase}; batch {self.batch}")
            self.recorder.event("phase", step=self.progress.step, phase=self.phase.number + 1, text=str(self.phase))

    def _roll_back(self, decision: GuardDecision) -> None:
        """Go back to the newest checkpoint, and exclude the samples of the judged step permanently.

        Raises:
            UserError: there is no checkpoint any more.
        """
        self.recorder.flush()
        with self.paused():
            self.saver.wait()
            self.batches.close()
            result = self.saver.checkpoints.newest_valid()
            if result is None:
                raise UserError(f"{decision.text}: training has to go back to a checkpoint, but none is left in "
                                f"{self.saver.checkpoints.folder}. Start again with --force, or with "
                                f"train.guards.spike=skip.")
            path, progress = result
            self.guards.exclude(decision, progress.step)
            self.progress = dataclasses.replace(progress, restarts=self.progress.restarts,
                                                precision=self.progress.precision,
                                                plan_sha256=self.data.order.plan_at(progress.samples))
            load(path, self.engine, self.ranks, self.progress.updates)
        self.recorder.event("rolled_back", step=progress.step, train_s=train_s(progress),
                            lost_s=round(time.perf_counter() - self.step_began, 3))
        self.recorder.flush()  # before the next step's line, from whose time it would be dated
        self.begin()

    # ---- the end

    def _leave(self, stop: Stop) -> None:
        """Log and record why training ends early, once the checkpoint is complete.

        Raises:
            UserError: too many starts in a row had time for one step at most.
        """
        ending = self._settle()
        self.ranks.barrier()  # without an agent, rank 0 holds the store over which the others learn of the save
        step = self.progress.step
        self.say(f"stopped after step {step} ({stop.reason}); saved; the same command continues")
        self.recorder.event("stop", step=step, reason=stop.reason, **ending)
        self.recorder.flush()
        last = self.work.last  # known to rank 0
        brief = self.ranks.by_leader(
            lambda: 1 + (last.idle if last is not None and last.again else 0) if stop.again and self.done < 2 else 0)
        if self.ranks.is_rank_zero:
            write_state(self.work.folder, "preempted", step=step, reason=stop.reason, again=stop.again, idle=brief)
        for hook in self.hooks:
            hook.on_stop(self)
        if brief > MOST_BRIEF:
            raise UserError(f"After step {step}, {brief} starts in a row had time for one step at most "
                            f"({stop.reason}). The checkpoint is saved. Give training more time (launch.train.time or "
                            f"train.stop_after_minutes), or lower launch.signal_s, the time left to end in order.")

    def _finish(self) -> None:
        """Verify the last checkpoint once more, and write the manifest."""
        if self.guards.skipped_total >= self.progress.step:
            raise UserError(f"All {self.progress.step} updates were skipped, so nothing was learned. The reasons are "
                            f"in {self.work.folder / 'events.jsonl'}. Fix the cause, and start again with --force.")
        ending = self._settle()
        for hook in self.hooks:
            hook.on_finish(self)
        self.saver.prune()  # checkpoints that waited for their upload were kept until now
        result = self.saver.checkpoints.newest_valid()
        if result is None or result[1].step != self.config.train.steps:
            raise UserError(f"The checkpoint of the last step does not read back from "
                            f"{self.saver.checkpoints.folder}. Check the disk and run the stage again; it continues "
                            f"from the last valid checkpoint.")
        self.recorder.event("finish", step=self.progress.step, **ending)
        self.recorder.close()
        if self.ranks.is_rank_zero:
            self._commit(result[0])
        self.ranks.barrier()

    def _settle(self) -> dict[str, float]:
        """Wait until the last checkpoint is on disk. Returns fields for the event that ends this start."""
        self.watchdog.pause()
        began = time.perf_counter()
        self.saver.wait()
        self.recorder.flush()
        return {"stall_s": round(time.perf_counter() - began, 4), "look_s": round(self.recorder.look_s, 3)}

    def _commit(self, checkpoint: Path) -> None:
        """Write the manifest. Called on rank 0."""
        folder = self.work.folder
        name = f"{CHECKPOINTS}/{checkpoint.name}"
        progress = self.progress
        # Lines beyond the last step were logged before train.steps was lowered: they are of no existing model.
        facts = RunFacts(self.work.run.folder)
        metrics = [record for record in facts.steps if record["step"] <= progress.step]
        # All ranks together have just compared the marker's hashes with the files.
        outputs = [{**record, "path": f"{name}/{record['path']}"} for record in read_marker(checkpoint).files]
        paths = [checkpoint / MARKER, *(folder / f"{log}.jsonl" for log in ("metrics", "samples", "events")),
                 *(path for path in (folder / ROLLBACKS, folder / FILE) if path.is_file())]
        outputs += [output_record(folder, path) for path in paths]
        self.work.commit(outputs, {
            "checkpoint": name, "steps": progress.step, "tokens": progress.tokens, "samples": progress.samples,
            "targets": progress.targets, "restarts": progress.restarts, "precision": progress.precision,
            "parameters": self.model_config.parameter_count, "vocab_size": self.model_config.vocab_size,
            **self._consumed(metrics), "plan_sha256": self.data.order.plan_sha256, "ranks": self.ranks.world,
            "accumulation": self.batch.accumulation, "engine": self.config.parallel.engine,
            **packing_facts(self.data), **self.guards.counters(), "device_name": self.ranks.device_name,
            "loss": metrics[-1]["loss"] if metrics else None,
            "validation_sample_bpb": metrics[-1].get("validation_sample_bpb") if metrics else None,
            "run_s": round(run_s(facts), 3),
            "step_seconds": round(sum(record["step_s"] for record in metrics), 3)}, verified=True,
            scratch=[folder / PLACES])

    def _consumed(self, metrics: list[Line]) -> dict[str, object]:
        """Epochs of each source, and for each phase the tokens by source, trained on and excluded by rollbacks. With
        packed documents these are estimates by the mean of a source's sequences; `learned` is the counted sum, if
        the log has it."""
        data = self.data
        samples = self.progress.samples
        phases = [{"steps": phase.steps, "tokens": taken.consumed, "left_out": taken.left_out} for phase, taken in
                  zip(data.order.plan.phases, data.order.taken(samples), strict=True)]
        if data.packings:
            done = {0: 0, **{record["step"]: record["tokens"] for record in metrics}}
            for phase, counted in zip(data.order.plan.phases, phases, strict=True):
                if phase.first_step in done and phase.end_step in done:
                    counted["learned"] = done[phase.end_step] - done[phase.first_step]
        return {"epochs": data.order.epochs(samples), "phases": phases}

    def _end(self, _: object, error: BaseException | None, *__: object) -> None:
        with ExitStack() as ends:  # in reverse order, each of them, even if a hook's raises
            if error is None:  # after a failure the other ranks are not here, so no barrier
                ends.callback(stop_ranks)
            ends.callback(self.recorder.close)
            if self.token_check is not None:
                if isinstance(error, DamagedTokensError):
                    ends.callback(self.token_check.note_damage)
                ends.callback(self.token_check.close)
            if isinstance(error, (UserError, OSError)):
                # The save in flight is valid, and all ranks are still there. On a full disk an unfinished save is
                # removed, which makes room for the error message.
                ends.callback(self.saver.settle)
            ends.callback(self.batches.close)
            for hook in reversed(self.hooks):
                ends.callback(hook.on_end, self)
            ends.callback(self.watchdog.pause)

    # ---- messages and records

    def say(self, text: str) -> None:
        """Print a line, on rank 0 only."""
        if self.ranks.is_rank_zero:
            self.work.say(text)

    def _start_facts(self) -> dict[str, object]:
        """Fields of the event that records this start."""
        ranks = self.ranks
        train = self.config.train
        return {"samples": self.progress.samples, "startup": self.facts.seconds, "accepted": self.work.accepted,
                "parallel": self.config.parallel.model_dump(),
                "micro_batch": [batch.micro_batch for batch in self.batches.of_phase] if self.plan.declared else
                self.batch.micro_batch, "device": ranks.device_name or ranks.device.type,
                "deterministic": ranks.device.type == "cpu" or train.deterministic,
                "precision": self.progress.precision, "attention": self.engine.attention.backend.name,
                "flash": self.engine.flash, "compile": train.compile, **packing_facts(self.data),
                "torch": torch.__version__, "job": os.environ.get("SLURM_JOB_ID", "")}
