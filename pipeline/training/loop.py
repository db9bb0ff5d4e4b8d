"""The training loop: its parts, set up in order, its steps, and its end."""

from __future__ import annotations

import dataclasses
import itertools
import os
import shlex
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import psutil
import torch

from drover.pipeline.config.batch import BatchPlan
from drover.pipeline.config.checks import rank_problems
from drover.pipeline.config.phases import PhasePlan
from drover.pipeline.config.shipped import HOOKS
from drover.pipeline.config.tree import changed
from drover.pipeline.contract.run import code_hashes
from drover.pipeline.contract.stage_work import Work, git_state, software_versions
from drover.pipeline.contract.stages import STAGES
from drover.pipeline.contract.state import write_state
from drover.pipeline.core.errors import UserError, listed
from drover.pipeline.core.files import Record, output_record
from drover.pipeline.data.sampling.batch import Batch
from drover.pipeline.parallel.compiling import compiles
from drover.pipeline.parallel.fp8 import fp8_lines
from drover.pipeline.parallel.grid import Grid
from drover.pipeline.parallel.ranks import start_ranks, stop_ranks
from drover.pipeline.records.checkpoints import CHECKPOINTS, MARKER, TrainingProgress, read_marker
from drover.pipeline.records.generation_settings import FILE
from drover.pipeline.records.hangs import write_places
from drover.pipeline.records.metrics import OTHER_ORDER, new_drift, read_metrics
from drover.pipeline.records.rollbacks import ROLLBACKS, no_longer_left_out
from drover.pipeline.training.async_saver import AsyncSaver
from drover.pipeline.training.checkpoint import Checkpoints
from drover.pipeline.training.data.opening import refuse_beyond
from drover.pipeline.training.data.step_batches import StepBatches
from drover.pipeline.training.data.token_check import DamagedTokensError, TokenCheck
from drover.pipeline.training.determinism import is_deterministic, make_deterministic
from drover.pipeline.training.device_facts import memory_explained
from drover.pipeline.training.engines.build import build_engine
from drover.pipeline.training.engines.engine import StepResult
from drover.pipeline.training.guard_runner import GuardRunner
from drover.pipeline.training.guards import Verdict
from drover.pipeline.training.hooks import Hook
from drover.pipeline.training.housekeeping import Garbage, Saving
from drover.pipeline.training.initial_weights import initial_values
from drover.pipeline.training.monitor import Fp8Watch, Norms, Samples, Validation
from drover.pipeline.training.optimizers.schedule import planned_rate
from drover.pipeline.training.precision import DTYPES
from drover.pipeline.training.profiling import Profiling
from drover.pipeline.training.rank_agreement import RankAgreement
from drover.pipeline.training.recorder import Recorder, train_s
from drover.pipeline.training.replicas import ReplicaCheck
from drover.pipeline.training.resume import agreed_precision, changed_code, changed_future, continued, load
from drover.pipeline.training.stop_agreement import Stop, StopAgreement
from drover.pipeline.training.summary import kernel_lines, packing_facts, summary_lines
from drover.pipeline.training.uploads import Uploads
from drover.pipeline.training.watchdog import COMPILED_STEP_S, Watchdog, longest_wait

STARTUP = {"_meet": "rendezvous", "_open_data": "data", "_find_checkpoint": "checkpoint", "_check_plan": "data",
           "_build_engine": "model", "_prepare_saving": "checkpoint"}
"""What the parts of a start are called in its record. Compiling is part of the first step."""


class Loop:
    """One start of training, from the newest valid checkpoint to the end or to a request to stop.

    Attributes:
        progress: steps, samples and tokens done so far.
        hooks: all hooks, in the order in which they are called.
        save_asked: whether a hook requested a checkpoint after the current step.
        done: steps of this start.
        current: this rank's batch of the current or last step, and the target tokens of the global batch.
        startup: seconds of each part of the start.
    """

    def __init__(self, work: Work, watchdog: Watchdog) -> None:
        self.work, self.config, self.watchdog = work, work.config, watchdog
        self.save_asked, self.done = False, 0

    def run(self) -> None:
        """Train to the configured number of steps and commit, or save and leave on a request to stop."""
        with ExitStack() as self.ends:
            self.startup = {"imports": round(time.time() - psutil.Process().create_time(), 3)}
            for part in (self._meet, self._lay_out, self._open_data, self._find_checkpoint, self._check_plan,
                         self._build_engine, self._prepare_saving, self._open_log, self._make_hooks, self._begin):
                began, name = time.perf_counter(), STARTUP.get(part.__name__, "other")
                part()
                self.startup[name] = round(self.startup.get(name, 0.0) + time.perf_counter() - began, 3)
            self.ends.push(self._end)
            self.ends.enter_context(self.stop)
            self._train()

    # ---- set-up, in this order

    def _meet(self) -> None:
        """Connect to the other ranks, and check that all run the same code and configuration."""
        if self.config.train.deterministic:
            make_deterministic()
        self.ranks = start_ranks(longest_wait(self.config), self.work.store, self.config.launch.device)
        self.paused = partial(self.watchdog.paused, self.ranks.barrier)
        agreement = RankAgreement.gather(self.ranks, self.work)
        self.nodes = agreement.nodes
        self.say(str(agreement))
        if warning := agreement.warning():
            self.say(warning)
        if self.ranks.leads:
            write_places(self.work.folder, self.nodes)

    def _lay_out(self) -> None:
        """Give each rank its place and its part of the batch; UserError if the batch does not divide evenly."""
        if problems := rank_problems(self.config, self.ranks.world):
            raise UserError(f"This run does not fit {self.ranks.world} ranks: {listed(problems)}")
        self.grid = Grid(self.ranks, self.config.parallel)
        self.plan = PhasePlan.of(self.config.train)
        self.batch_of_phase = [BatchPlan.of(phase.train, self.config.parallel, self.ranks.world)
                               for phase in self.plan.phases]
        self.batch = self.batch_of_phase[0]

    def _open_data(self) -> None:
        with self.paused():
            self.batches = StepBatches(self.work, self.grid, self.plan, self.batch_of_phase, self.say)
        self.data = self.batches.data
        self.model_config = self.config.model.with_vocabulary(self.work.input("tokenizer")[1].counts["vocab_size"])

    def _find_checkpoint(self) -> None:
        self.checkpoints = Checkpoints(
            self.work.folder / CHECKPOINTS, self.ranks, self.say, needed=lambda step:
            step in self.config.convert.average or any(hook.needs(step) for hook in self.hooks))
        self.recorder = Recorder(self.work, self.ranks, self.plan)
        self.uploads: Uploads | None = None
        with self.paused():
            if (url := self.config.train.checkpoint.copy_to) is not None:
                self.uploads = Uploads(self.work, self.ranks, self.checkpoints, url, self.say, self.recorder.event)
                self.ends.callback(self.uploads.close)  # its thread would keep this process
            self.found = (self.uploads or self.checkpoints).newest_valid()
        self.has_checkpoint = self.found is not None

    def _check_plan(self) -> None:
        """Check that the checkpoint can be continued along the configured plan."""
        found = self.found
        self.plan_changes = self.ranks.by_leader(
            lambda: (found and changed_future(*found, self.plan)) or new_drift(self.work.folder, self.work.drift))
        with self.paused():  # the rest of an epoch may have to be packed
            self.guards = GuardRunner(self.work, self.ranks, self.data, self.say)
        if self.plan_changes:
            self.plan_changes += no_longer_left_out(self.guards.rollbacks, self.data.order.links)
        plan = self.data.order.plan_at(found[1].samples if found else 0)
        self.progress = continued(*found, plan, bool(self.work.drift)) if found else TrainingProgress(plan_sha256=plan)
        if found:
            self.say(f"continuing after step {self.progress.step} ({self.progress.samples:,} samples used) from "
                     f"{found[0].name}")
            if self.ranks.leads and (warning := changed_code(found[0], self._about()["code"])):
                self.say(warning)
        if self.plan_changes and found and found[1].plan_sha256 != plan:
            self.plan_changes.append(OTHER_ORDER)
        for text in self.plan_changes:
            self.say(f"plan changed: {text}")
        if many := refuse_beyond(self.config.train, self.data, self.say):
            self.recorder.event("many_epochs", step=self.progress.step, planned_epochs=many)
        self.tokens = TokenCheck(self) if self.config.train.shard_checks else None
        if self.tokens is None:
            self.say("token shards are not compared with the encode stage's manifest: train.shard_checks is false")

    def _build_engine(self) -> None:
        train = self.config.train
        chosen, self.precision_reason = agreed_precision(train.precision, self.progress.precision, self.ranks)
        self.progress, precision = dataclasses.replace(self.progress, precision=chosen), DTYPES[chosen]
        self.decided = changed(self.config, {"train.precision": chosen})
        # Nothing uses this generator yet. Later uses must not differ between starts, nor may checkpoints' bytes.
        torch.manual_seed(self.config.seed + self.ranks.rank)
        self.as_rehearsed = (f"--config {shlex.quote(str(self.work.run.folder.absolute() / 'config.yaml'))} "
                             f"model.vocab_size={self.model_config.vocab_size}")
        with (initial_values(self.work, self.model_config, self.ranks, begun=self.has_checkpoint) as initial,
              memory_explained(None, self.ranks, self.progress.step, self.as_rehearsed, first=True)):
            self.engine = build_engine(self.decided, self.model_config, self.grid, precision, self.batch.accumulation,
                                       initial)
        if compiles(train, self.ranks.device, self.config.parallel):
            self.watchdog.step_s = COMPILED_STEP_S

    def _prepare_saving(self) -> None:
        self.saver = AsyncSaver(self.checkpoints, self.ranks, self.config.train.checkpoint, self._about(), self.say,
                                self.recorder.event, self._saved,
                                (lambda: None) if self.tokens is None else self.tokens.refuse_damaged)
        with self.paused():
            if self.found:
                load(self.found[0], self.engine, self.ranks, self.progress.updates)
            self.saver.prepare(self.engine.state_shards())

    def _open_log(self) -> None:
        precision = DTYPES[self.progress.precision]
        # Peak FLOP/s are known for bf16. fp8 is measured against them too, so that its MFU compares with that of bf16.
        self.recorder.open(self.progress, precision == torch.bfloat16)
        for text in [*summary_lines(self.config, self.model_config, self.grid, self.data, self.precision_reason),
                     *kernel_lines(self.config, self.engine, self.ranks.device, precision),
                     *fp8_lines(self.decided, self.model_config, self.grid.tensor, self.ranks.device)]:
            self.say(text)

    def _make_hooks(self) -> None:
        train = self.config.train
        self.stop = StopAgreement(self.ranks, self.work.run.folder, train.stop_after_minutes, self.work.began)
        compared_every = train.guards.replica_hash_every if self.ranks.world > 1 else None
        with self.paused():  # validation text and the vocabulary are read
            self.hooks: list[Hook] = [
                Saving(train.checkpoint.every_minutes),
                *([] if self.tokens is None else [self.tokens]),
                *([] if self.uploads is None else [self.uploads]),
                self.stop,
                *([] if compared_every is None else [ReplicaCheck(self.ranks, self.nodes, compared_every)]),
                *(settings.open(self) for settings in HOOKS.made(train.hooks)),
                *([] if train.norms_every is None else [Norms()]),
                Validation(self),
                *([Fp8Watch(self.engine, self.ranks.device)] if self.progress.precision == "fp8" else []),
                Samples(self),
                *([] if train.profile.start is None else [Profiling(train.profile, train.profile.start)]),
                Garbage()]
        self.engine.before_update = self._before_update
        self.work.run.forget_manifests()  # with very many shards they are large

    # ---- the loop

    def _train(self) -> None:
        self._start()
        while self.unfinished:
            batch = self.batches.next()
            targets, padding = self._agree(batch)
            result = self._update(batch, targets)
            verdict = self.guards.judge_step(self.progress.step + 1, result, self.progress, self.has_checkpoint,
                                             self.recorder.event)
            if verdict.event == "rollback":
                self._roll_back(verdict)
                continue
            self._advance(result, verdict, padding)
            if self._checkpoint_is_due():
                self._save()
            self._log_step()
            for hook in self.hooks:
                hook.after_step(self)
            self._end_step()
            if self.stop.stop is not None and self.unfinished:
                return self._leave(self.stop.stop)
        self._finish()

    @property
    def unfinished(self) -> bool:
        """Whether steps remain."""
        return self.progress.step < self.config.train.steps

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
        if self.plan_changes:
            self.recorder.plan_changed(self.progress.step, self.plan_changes)
        self.recorder.flush()
        for hook in self.hooks:
            hook.on_start(self)
        self.step_began = time.perf_counter()

    def _agree(self, batch: Batch) -> tuple[int, int]:
        """All-reduce the hooks' votes, so that all ranks save, leave or fail after the same step, and the target tokens
        and padding of the batch. Returns the two of the global batch."""
        self.save_asked = False
        votes = [hook.votes(self) for hook in self.hooks]
        counted = (batch.targets, sum(batch.padding)) if self.grid.speaks else (0, 0)
        sums = iter(self.ranks.sum(*counted, *itertools.chain(*votes)))
        targets, padding = int(next(sums)), int(next(sums))
        for hook, mine in zip(self.hooks, votes, strict=True):
            if mine:
                hook.on_votes(self, list(itertools.islice(sums, len(mine))))
        return targets, padding

    def _update(self, batch: Batch, targets: int) -> StepResult:
        """Forward and backward passes and the update. Raises as `memory_explained` does."""
        step = self.progress.step + 1
        self.current, self.rate = (batch, targets), planned_rate(step - 1, self.plan)
        self.watchdog.step_begins()
        with memory_explained(self.engine, self.ranks, step, self.as_rehearsed, first=not self.done):
            result = self.engine.step(batch.split(self.batch.micro_batch), self.batch.accumulation, targets, self.rate,
                                      self.guards.limits())
        self.watchdog.pulse()  # judging may read documents from a store
        return result

    def _before_update(self) -> None:
        for hook in self.hooks:
            hook.before_update(self)

    def _advance(self, result: StepResult, verdict: Verdict, padding: int) -> None:
        """Update the progress with the step and its record. `_log_step` writes the record later."""
        before, step_s = self.progress, time.perf_counter() - self.step_began
        end = self.guards.excluded.take(before.samples, self.batch.sequences).end
        after = dataclasses.replace(before, step=before.step + 1, samples=end, targets=before.targets + self.current[1],
                                    tokens=before.tokens + self.batch.tokens - padding,
                                    updates=self.engine.updates, plan_sha256=self.data.order.plan_at(end))
        record = self.recorder.step(before, after, result, step_s, self.batches.waited_s, self.rate)
        if self.data.packings:
            record["padding_share"] = round(padding / self.batch.tokens, 6)
        record |= self.guards.step_fields(verdict, before.samples, end)
        record |= {"phase": self.phase.number + 1} if self.plan.declared else {}
        for hook in self.hooks:
            hook.on_step(self, result, record)
        self.progress = dataclasses.replace(after, record=record)
        self.done += 1
        self.watchdog.finished(after.step, step_s)

    def _checkpoint_is_due(self) -> bool:
        """Whether to save now: every so many steps or minutes, before leaving, at the end, and at the steps of
        `convert.average`."""
        due = self.due(self.config.train.checkpoint.every_steps)
        return due or self.progress.step in self.config.convert.average or self.save_asked or self.stop.stop is not None

    def _save(self) -> None:
        """Start to save a checkpoint."""
        with self.paused():
            for hook in self.hooks:
                hook.on_save(self)
            self.progress = dataclasses.replace(self.progress, guards=self.guards.state())
            self.saver.save(self.engine.state_shards(), self.progress)
        self.has_checkpoint = True  # even while it is written: decisions must not depend on the disk's speed

    def _log_step(self) -> None:
        """Measure the model, and write the step's line. This comes after the step's checkpoint, which holds the line
        too: a measurement may fail (memory, a bad prompt), and must not cost the steps since the last save."""
        record, seen = self.progress.record or {}, Record()
        for hook in self.hooks:
            seen |= hook.look(self)
        if seen or "weight_norms" in record or self.due(self.config.train.log_every):
            self.recorder.tell("step", record | seen)

    def _saved(self, step: int) -> None:
        for hook in self.hooks:
            hook.on_saved(step)

    def _end_step(self) -> None:
        """Finish the step; the next one begins."""
        entered = self.unfinished and self.progress.step == self.phase.end_step
        if entered:
            self._enter_phase()
        self.recorder.flush()
        self.step_began = time.perf_counter()
        self.watchdog.pulse(first=entered)  # a new phase has new shapes

    def _begin(self) -> None:
        """Continue from `self.progress`: at the start, and after a rollback."""
        self.guards.go_on(self.progress.guards, len(self.guards.rollbacks))
        self._enter_phase()
        self.batches.begin(self.progress, self.guards.excluded)
        self.step_began = time.perf_counter()
        self.watchdog.pulse()

    def _enter_phase(self) -> None:
        """Use the batch and the sequence length of the next step's phase. Log the phase if it begins here."""
        self.phase = self.plan.phase_of(self.progress.step + 1)
        self.batch = self.batch_of_phase[self.phase.number]
        self.guards.batch_sequences = self.batch.sequences
        # By the full-attention formula: 6 x matrix parameters + attention, not halved.
        self.recorder.flops_per_token = self.model_config.flops_per_token(self.batch.sequence_length, causal=False)
        if self.plan.declared and self.progress.step == self.phase.first_step:
            self.guards.forget()
            self.say(f"{self.phase}; batch {self.batch}")
            self.recorder.event("phase", step=self.progress.step, phase=self.phase.number + 1, text=str(self.phase))

    def _roll_back(self, verdict: Verdict) -> None:
        """Go back to the newest checkpoint, and exclude the samples of the judged step permanently.

        Raises:
            UserError: there is no checkpoint any more.
        """
        self.recorder.flush()
        with self.paused():
            self.saver.wait()
            self.batches.close()
            found = self.checkpoints.newest_valid()
            if found is None:
                raise UserError(f"{verdict.text}: training has to go back to a checkpoint, but none is left in "
                                f"{self.checkpoints.folder}. Start again with --force, or with "
                                f"train.guards.spike=skip.")
            path, progress = found
            self.guards.exclude(verdict, progress.step)
            self.progress = dataclasses.replace(progress, restarts=self.progress.restarts,
                                                precision=self.progress.precision,
                                                plan_sha256=self.data.order.plan_at(progress.samples))
            load(path, self.engine, self.ranks, self.progress.updates)
        self.recorder.event("rolled_back", step=progress.step, train_s=train_s(progress),
                            lost_s=round(time.perf_counter() - self.step_began, 3))
        self.recorder.flush()  # before the next step's line, from whose time it would be dated
        self._begin()

    # ---- the end

    def _leave(self, stop: Stop) -> None:
        """Log and record why training ends early, once the checkpoint is complete."""
        self.recorder.interrupt()
        ending = self._settle()
        self.ranks.barrier()  # without an agent, rank 0 holds the store over which the others learn of the save
        step = self.progress.step
        self.say(f"stopped after step {step} ({stop.reason}); saved; the same command continues")
        self.recorder.event("stop", step=step, reason=stop.reason, **ending)
        self.recorder.flush()
        if self.ranks.leads:
            write_state(self.work.folder, "preempted", step=step, reason=stop.reason, again=stop.again)
        for hook in self.hooks:
            hook.on_stop(self)

    def _finish(self) -> None:
        """Verify the last checkpoint once more, and write the manifest."""
        if self.progress.step > self.config.train.steps:
            raise UserError(f"This run is at step {self.progress.step} already, beyond train.steps "
                            f"{self.config.train.steps}. Set train.steps to at least {self.progress.step}, or use "
                            f"name=<another>.")
        if self.guards.skipped_total >= self.progress.step:
            raise UserError(f"All {self.progress.step} updates were skipped, so nothing was learned. The reasons are "
                            f"in {self.work.folder / 'events.jsonl'}. Fix the cause, and start again with --force.")
        ending = self._settle()
        for hook in self.hooks:
            hook.on_finish(self)
        self.saver.prune()  # checkpoints that waited for their upload were kept until now
        found = self.checkpoints.newest_valid()
        if found is None or found[1].step != self.config.train.steps:
            raise UserError(f"The checkpoint of the last step does not read back from {self.checkpoints.folder}. "
                            f"Check the disk and run the stage again; it continues from the last valid checkpoint.")
        self.recorder.event("finish", step=self.progress.step, **ending)
        self.recorder.close()
        if self.ranks.leads:
            self._commit(found[0])
        self.ranks.barrier()

    def _settle(self) -> Record:
        """Wait until the last checkpoint is on disk. Returns fields for the event that ends this start."""
        self.watchdog.pause()
        began = time.perf_counter()
        self.saver.wait()
        self.recorder.flush()
        return {"stall_s": round(time.perf_counter() - began, 4), "look_s": round(self.recorder.look_s, 3)}

    def _commit(self, checkpoint: Path) -> None:
        """Write the manifest. Called on rank 0."""
        folder, name, progress = self.work.folder, f"{CHECKPOINTS}/{checkpoint.name}", self.progress
        # Lines beyond the last step were logged before train.steps was lowered: they are of no existing model.
        metrics = [record for record in read_metrics(folder / "metrics.jsonl") if record["step"] <= progress.step]
        # All ranks together have just compared the marker's hashes with the files.
        outputs = [{**record, "path": f"{name}/{record['path']}"} for record in read_marker(checkpoint)["files"]]
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
            "validation_bpb": metrics[-1].get("validation_bpb") if metrics else None,
            "step_seconds": round(sum(record["step_s"] for record in metrics), 3)}, verified=True)

    def _consumed(self, metrics: list[Record]) -> Record:
        """Epochs of each source, and for each phase the tokens by source, trained on and excluded by rollbacks. With
        packed documents these are estimates by the mean of a source's sequences; `learned` is the counted sum, if
        the log has it."""
        data, samples = self.data, self.progress.samples
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
            if self.tokens is not None:
                if isinstance(error, DamagedTokensError):
                    ends.callback(self.tokens.note_damage)
                ends.callback(self.tokens.close)
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
        if self.ranks.leads:
            self.work.say(text)

    def _start_facts(self) -> Record:
        """Fields of the event that records this start."""
        ranks, train = self.ranks, self.config.train
        return {"samples": self.progress.samples, "startup": self.startup, "drift": self.work.drift,
                "parallel": self.config.parallel.model_dump(),
                "micro_batch": [batch.micro_batch for batch in self.batch_of_phase] if self.plan.declared else
                self.batch.micro_batch, "device": ranks.device_name or ranks.device.type,
                "deterministic": is_deterministic(ranks.device, train.deterministic),
                "precision": self.progress.precision, "attention": self.engine.attention.backend.name,
                "flash": self.engine.flash, "compile": train.compile, **packing_facts(self.data),
                "torch": torch.__version__, "job": os.environ.get("SLURM_JOB_ID", "")}

    def _about(self) -> Record:
        """Fields of a checkpoint's marker on how it was made. Rank 0 writes the marker; {} on the others."""
        if not self.ranks.leads:
            return {}
        return {"config": self.config.model_dump(mode="json"), "software": software_versions(), "git": git_state(),
                "code": code_hashes(STAGES["train"], self.config)}
