"""Everything the training loop holds: set up in one place, in order, and taken down whatever happens."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from pipeline.config.checks import rank_problems
from pipeline.data.loader import Batch, Prefetcher, TrainingData
from pipeline.data.token_shards import open_shards
from pipeline.errors import UserError, listed
from pipeline.files import output_record
from pipeline.formats.checkpoint import CheckpointReader
from pipeline.parallel.grid import Grid
from pipeline.parallel.ranks import start_ranks, stop_ranks
from pipeline.parallel.topology import Topology
from pipeline.run import code_hashes
from pipeline.stages import STAGES
from pipeline.state import write_state
from pipeline.training.checkpoint import MARKER, Checkpoints, Progress, read_marker
from pipeline.training.engine import StepResult
from pipeline.training.engines import build_engine
from pipeline.training.guards import Limits, Verdict
from pipeline.training.hangs import write_places
from pipeline.training.interruption import Stop, StopRequest
from pipeline.training.metrics import read_metrics
from pipeline.training.observing import HeldOut, Samples
from pipeline.training.outline import outline
from pipeline.training.owed import OwedEvaluations
from pipeline.training.precision import DTYPES, choose_precision
from pipeline.training.recording import Recorder, train_s
from pipeline.training.rollbacks import ROLLBACKS
from pipeline.training.saving import Saver
from pipeline.training.schedule import learning_rate
from pipeline.training.supervision import Supervision
from pipeline.training.watchdog import Watchdog
from pipeline.work import Work, git_state, software_versions


@dataclass(frozen=True)
class Agreement:
    """What all ranks know before a step: target tokens of the global batch, whether to save after it, and why to
    stop after it, if somebody was asked to."""

    targets: int
    save: bool
    stop: Stop | None


class Session:
    """One attempt at training, from the newest valid checkpoint to the end or to a request to stop."""

    def __init__(self, work: Work, watchdog: Watchdog) -> None:
        self.work, self.config, self.watchdog = work, work.config, watchdog
        self.ranks = start_ranks()
        nodes = self._meet()
        train = self.config.train
        if problems := rank_problems(self.config, self.ranks.world):
            raise UserError(f"This run does not fit {self.ranks.world} ranks: {listed(problems)}")
        self.grid = Grid(self.ranks, self.config.parallel)
        self.micro_batch = train.micro_batch
        self.batch_sequences = train.batch_tokens // train.sequence_length
        self.rank_sequences = self.batch_sequences // self.grid.data_ranks
        self.accumulation = self.rank_sequences // self.micro_batch
        self.data = open_training_data(work)
        vocabulary_size = int(work.input("tokenizer")[1].counts["vocab_size"])
        self.model_config = self.config.model.model_copy(
            update={"vocab_size": self.config.model.vocab_size or vocabulary_size})
        self.checkpoints = Checkpoints(work.folder / "checkpoints", self.ranks, self.say,
                                       needed=OwedEvaluations(work.run.folder, self.config))
        found = self.checkpoints.newest_valid()
        watchdog.pulse()
        self.has_checkpoint = found is not None
        self.progress = self._continue_from(*found) if found else Progress(plan_sha256=self.data.order.plan_sha256)
        self.precision, why = self._agree_on_precision()
        # So far nothing draws from it; what will must not differ from one start to the next, nor checkpoints' bytes.
        torch.manual_seed(self.config.seed + self.ranks.rank)
        self.engine = build_engine(self.config, self.model_config, self.grid, self.precision, self.accumulation,
                                   None if found else self.config.seed)
        self.supervision = Supervision(work, self.ranks, nodes, self.data, train.guards, self.batch_sequences,
                                       self.say)
        if found:
            self._load(found[0])
        watchdog.pulse()
        self.saver = Saver(self.checkpoints, self.ranks, train.checkpoint, self._about(), self.say)
        self.saver.prepare(self.engine.pieces())
        self.heldout = HeldOut(work, self.grid)
        self.samples = Samples(work, self.grid)
        # By the full-attention formula: 6 x matrix parameters + attention, not halved. Peaks are known for bf16.
        flops = self.model_config.flops_per_token(train.sequence_length, causal=False)
        self.recorder = Recorder(work, self.ranks, self.progress, flops if self.precision == torch.bfloat16 else None)
        for text in outline(self.config, self.model_config, self.grid, self.data, why):
            self.say(text)
        self.stop = StopRequest(self.ranks, work.run.folder, train.stop_after_minutes, work.began)
        self._begin()

    def _meet(self) -> list[str]:
        """See that all ranks run the same thing, and say where they are; the node of each."""
        topology = Topology.gather(self.ranks, self.work)
        self.say(str(topology))
        if warning := topology.warning():
            self.say(warning)
        if self.ranks.leads:
            write_places(self.work.folder, topology.nodes)
        return topology.nodes

    def _begin(self) -> None:
        """Go on from `self.progress`: at the start, and after a rollback."""
        self.supervision.begin(self.progress)
        self.started_from = self.progress
        self.loader = Prefetcher(self._make_batch, range(self.progress.step, self.config.train.steps),
                                 self.config.train.loader_threads)
        self.step_began = time.perf_counter()
        self.watchdog.pulse()

    def __enter__(self) -> Session:
        self.stop.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.watchdog.pause()
        self.stop.__exit__()
        self.loader.close()
        if isinstance(error, UserError):  # what is being written is sound, and all ranks are still there
            self.saver.settle()
        self.recorder.saves(self.saver.ended())
        self.recorder.close()
        if error is None:  # after a failure the other ranks are not here to take leave of
            stop_ranks()

    def say(self, text: str) -> None:
        """One line of the stage's story, from rank 0."""
        if self.ranks.leads:
            self.work.say(text)

    def steps(self) -> Iterator[int]:
        """The optimizer steps that are still to be done, counted from 0; a rollback goes back among them."""
        self._look_again()
        self.recorder.begin(self.progress, samples=self.progress.samples, drift=self.work.drift,
                            parallel=self.config.parallel.model_dump(), micro_batch=self.micro_batch,
                            device=self.ranks.device_name or self.ranks.device.type,
                            compile=self.config.train.compile, torch=torch.__version__,
                            job=os.environ.get("SLURM_JOB_ID", ""))
        self.step_began = time.perf_counter()
        while self.unfinished:
            yield self.progress.step

    @property
    def unfinished(self) -> bool:
        """Whether there are steps to be done."""
        return self.progress.step < self.config.train.steps

    def due(self, step: int, every: int) -> bool:
        """Whether something done every so many steps is due after step number `step`; always after the last."""
        return (step + 1) % every == 0 or step + 1 == self.config.train.steps

    def lr(self, step: int) -> float:
        """Learning rate of a step."""
        return learning_rate(step, self.config.train)

    def agree(self, batch: Batch) -> Agreement:
        """Over all ranks, in one sum: so all save, leave or fail after the same step."""
        minutes = self.config.train.checkpoint.every_minutes
        late = self.ranks.leads and minutes is not None and time.monotonic() - self.saver.last_save > 60 * minutes
        targets, saves, failures, *votes = self.ranks.sum(
            batch.targets if self.grid.tensor_rank == 0 else 0, late, self.saver.failed, *self.stop.votes())
        if failures:
            self.saver.wait()  # raises, on every rank
        return Agreement(int(targets), bool(saves), self.stop.agreed(votes))

    def limits(self, step: int) -> Limits:
        """Above which the update of this step is left out."""
        self.supervision.before(step + 1, self.engine)
        return self.supervision.guards.limits()

    def judge(self, step: int, result: StepResult) -> Verdict:
        """What came of a step; where something did, it is said and logged."""
        return self.supervision.judge(step + 1, result, self.progress, self.has_checkpoint, self.recorder.event)

    def roll_back(self, verdict: Verdict) -> None:
        """Go back to the newest checkpoint, and leave the samples of the judged step out for good."""
        self.watchdog.pause()
        self.saver.wait()
        self.loader.close()
        found = self.checkpoints.newest_valid()
        if found is None:
            raise UserError(f"{verdict.text}: training was to go back to a checkpoint, but there is none any more in "
                            f"{self.checkpoints.folder}. Start again with --force, or with train.guards.spike=skip.")
        path, progress = found
        self.supervision.exclude(verdict, progress.step)
        now = self.progress
        self.progress = dataclasses.replace(progress, restarts=now.restarts, precision=now.precision,
                                            plan_sha256=now.plan_sha256)
        self._load(path)
        self.recorder.event("rolled_back", step=progress.step, train_s=train_s(progress),
                            lost_s=round(time.perf_counter() - self.step_began, 3))
        self._begin()

    def advance(self, step: int, result: StepResult, verdict: Verdict, targets: int) -> None:
        """Note that the step has happened, and what it was.

        The record goes to the log after the checkpoint, which holds it as well: looking at the model may fail
        (memory, a bad prompt), and must not cost the steps since the last save.
        """
        before, step_s = self.progress, time.perf_counter() - self.step_began
        end = self.supervision.excluded.take(before.samples, self.batch_sequences).end
        after = dataclasses.replace(before, step=step + 1, samples=end, targets=before.targets + targets,
                                    tokens=before.tokens + self.config.train.batch_tokens, updates=self.engine.updates)
        record = self.recorder.step(before, after, result, step_s, self.loader.waited_s, self.lr(step))
        record |= self.supervision.step_fields(verdict, before.samples, end)
        self.progress = dataclasses.replace(after, record=record)
        self.watchdog.finished(step + 1, step_s)

    def look(self) -> None:
        """Write the last step to the log and TensorBoard, with held-out loss and sample texts when they are due."""
        train, record = self.config.train, dict(self.progress.record or {})
        step = record["step"] - 1
        if self.due(step, train.heldout_every):
            with self.recorder.looking():
                found = self.heldout.measure(self.engine, self.watchdog.pulse)
            record["heldout_bpb"] = {source: bits for source, bits in found.items() if math.isfinite(bits)}
            if missing := [source for source in found if source not in record["heldout_bpb"]]:
                self.say(f"after step {step + 1} the loss on held-out text of {', '.join(missing)} is no number")
        log = self.recorder.log
        if log is not None and (self.due(step, train.log_every) or "heldout_bpb" in record):
            log.step(record)
        if self.due(step, train.sample_every):
            with self.recorder.looking():
                self._draw_samples(step)
        self.recorder.saves(self.saver.ended())
        self.step_began = time.perf_counter()
        self.watchdog.pulse()

    def _draw_samples(self, step: int) -> None:
        try:
            for prompt, text in self.samples.draw(self.engine):
                if self.recorder.log is not None:
                    self.recorder.log.sample(step + 1, prompt, text)
        except FloatingPointError as error:  # the guards deal with it: the next loss is no number either
            self.say(f"no sample texts after step {step + 1}: {error}")

    def _look_again(self) -> None:
        """After a kill between a checkpoint and its step's line in the log: write that line now."""
        if self.progress.record is None:
            return
        logged = None
        if self.ranks.leads:
            metrics = read_metrics(self.work.folder / "metrics.jsonl")
            logged = bool(metrics) and metrics[-1]["step"] >= self.progress.step
        if not self.ranks.same(logged):
            self.look()

    def save(self) -> None:
        """Begin to save a checkpoint. Replicas are compared first: one of them is what is saved."""
        if self.config.train.guards.replica_hash_every is not None:
            self.supervision.compare_replicas(self.engine, self.progress.step)
        self.progress = dataclasses.replace(self.progress, guards=self.supervision.guards.state())
        self.watchdog.pause()
        self.saver.save(self.engine.pieces(), self.progress)
        self.watchdog.pulse()
        self.has_checkpoint = True  # also while it is written: what comes of a step must not depend on the disk's speed

    def leave(self, stop: Stop) -> None:
        """Say and record why training ends early, once the checkpoint is there."""
        self.recorder.line.interrupt()
        ending = self._settle()
        step = self.progress.step
        self.say(f"stopped after step {step} ({stop.reason}); saved; the same command continues")
        self.recorder.event("stop", step=step, reason=stop.reason, **ending)
        if self.ranks.leads:
            write_state(self.work.folder, "preempted", step=step, reason=stop.reason, again=stop.again)

    def _settle(self) -> dict[str, float]:
        """Wait until what was saved is on the disk; what to record of the end."""
        self.watchdog.pause()
        began = time.perf_counter()
        self.saver.wait()
        self.recorder.saves(self.saver.ended())
        return {"stall_s": round(time.perf_counter() - began, 4), "look_s": round(self.recorder.look_s, 3)}

    def finish(self) -> None:
        """Commit: the last checkpoint is proven once more and the manifest written."""
        if self.progress.step > self.config.train.steps:
            raise UserError(f"This run is at step {self.progress.step} already, beyond train.steps "
                            f"{self.config.train.steps}. Ask for at least {self.progress.step}, or use name=<another>.")
        ending = self._settle()
        found = self.checkpoints.newest_valid()
        if found is None or found[1].step != self.config.train.steps:
            raise UserError(f"The checkpoint of the last step does not read back from {self.checkpoints.folder}. "
                            f"Check the disk and run the stage again; it continues from the last good one.")
        self.recorder.event("finish", step=self.progress.step, **ending)
        self.recorder.close()
        if self.ranks.leads:
            self._commit(found[0])
        self.ranks.barrier()

    def _commit(self, checkpoint: Path) -> None:
        folder, name = self.work.folder, f"checkpoints/{checkpoint.name}"
        metrics = read_metrics(folder / "metrics.jsonl")
        # The marker's hashes were compared with the files a moment ago, by all ranks together.
        outputs = [{**record, "path": f"{name}/{record['path']}"} for record in read_marker(checkpoint)["files"]]
        outputs += [output_record(folder, path) for path in
                    (checkpoint / MARKER, folder / "metrics.jsonl", folder / "samples.jsonl", folder / "events.jsonl",
                     *([folder / ROLLBACKS] if self.supervision.rollbacks else []))]
        self.work.commit(outputs, {
            "checkpoint": name, "steps": self.progress.step, "tokens": self.progress.tokens,
            "samples": self.progress.samples, "targets": self.progress.targets, "restarts": self.progress.restarts,
            "parameters": self.model_config.parameter_count, "vocab_size": self.model_config.vocab_size,
            "epochs": self.data.order.epochs(self.progress.samples), "plan_sha256": self.data.order.plan_sha256,
            "precision": self.progress.precision, "ranks": self.ranks.world,
            "accumulation": self.accumulation, "engine": self.config.parallel.engine,
            **self.supervision.guards.counters(),
            "device_name": self.ranks.device_name, "loss": metrics[-1]["loss"] if metrics else None,
            "heldout_bpb": metrics[-1].get("heldout_bpb") if metrics else None,
            "step_seconds": round(sum(record["step_s"] for record in metrics), 3)}, verified=True)

    def _continue_from(self, path: Path, progress: Progress) -> Progress:
        plan = self.data.order.plan_sha256
        if progress.plan_sha256 != plan and not self.work.drift:
            raise UserError(f"{path} was trained on other token shards, sequence length, mixture or seed than are "
                            f"asked for now (plan {progress.plan_sha256[:12]} -> {plan[:12]}). Use --accept-drift to "
                            f"go on with the new order, or --force to start again.")
        self.say(f"continuing after step {progress.step} ({progress.samples:,} samples used) from {path.name}")
        return dataclasses.replace(progress, restarts=progress.restarts + 1, plan_sha256=plan)

    def _load(self, path: Path) -> None:
        with CheckpointReader(path) as reader:
            self.engine.load(reader, self.progress.updates)
            generators = {"cpu": torch.set_rng_state, "cuda": torch.cuda.set_rng_state}
            for device in {"cpu", self.ranks.device.type}:
                name = f"random.{device}.{self.ranks.rank}"
                if name in reader.names("random."):  # another number of ranks may have been there
                    generators[device](reader.read(name))

    def _agree_on_precision(self) -> tuple[torch.dtype, str]:
        """The same on all ranks, and the one that the run was begun in: `auto` must not change with the machine."""
        wanted, begun = self.config.train.precision, self.progress.precision
        if wanted == "auto" and begun:
            chosen, why = begun, f"{begun}, as the run was begun"
        else:
            found = self.ranks.gather(choose_precision(wanted, self.ranks.device))
            chosen, why = found[0] if len({name for name, _ in found}) == 1 else \
                ("fp32", "fp32: not every rank has fast bf16")
        self.progress = dataclasses.replace(self.progress, precision=chosen)
        return DTYPES[chosen], why

    def _make_batch(self, step: int) -> Batch:
        done = step - self.started_from.step
        ahead = done * self.batch_sequences + self.grid.data_rank * self.rank_sequences
        return self.data.batch_of(self.supervision.excluded.numbers(self.started_from.samples, ahead,
                                                                    self.rank_sequences))

    def _about(self) -> dict[str, Any]:
        """What a checkpoint's marker says of how it was made."""
        return {"config": self.config.model_dump(mode="json"), "software": software_versions(), "git": git_state(),
                "code": code_hashes(STAGES["train"])}


def open_training_data(work: Work) -> TrainingData:
    """The training split of the encode stage, in the order of the configuration's sources."""
    folder, manifest = work.input("encode")
    records = [record for record in manifest.outputs if record.get("split") == "train"]
    sources = [source.name for source in work.config.shard.sources]
    shards = {source: open_shards(folder, records, "train", source) for source in sources}
    train = work.config.train
    return TrainingData(shards, train.sequence_length, work.config.seed, train.mixture,
                        content=[[record["path"], record["sha256"]] for record in records])
