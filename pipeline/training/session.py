"""Everything the training loop holds: set up in one place, in order, and taken down whatever happens."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from pipeline.config.checks import rank_problems
from pipeline.data.loader import Batch, Prefetcher, TrainingData
from pipeline.data.token_shards import open_shards
from pipeline.errors import UserError, listed
from pipeline.files import output_record
from pipeline.parallel.ranks import start_ranks, stop_ranks
from pipeline.parallel.spreading import spread
from pipeline.training.checkpoint import MARKER, Checkpoints, Progress, read_marker
from pipeline.training.engine import Engine, StepResult
from pipeline.training.interruption import StopRequest
from pipeline.training.metrics import MetricsLog, ProgressLine, memory_mb, peak_flops, read_metrics
from pipeline.training.observing import HeldOut, Samples
from pipeline.training.optimizer import build_optimizer
from pipeline.training.precision import DTYPES, choose_precision
from pipeline.training.schedule import learning_rate
from pipeline.work import Work


class Session:
    """One attempt at training, from the newest valid checkpoint to the end or to a request to stop."""

    def __init__(self, work: Work) -> None:
        self.work, self.config = work, work.config
        self.ranks = start_ranks()
        train = self.config.train
        if problems := rank_problems(self.config, self.ranks.world):
            raise UserError(f"This run does not fit {self.ranks.world} ranks: {listed(problems)}")
        self.micro_batch = train.micro_batch
        self.batch_sequences = train.batch_tokens // train.sequence_length
        self.rank_sequences = self.batch_sequences // self.ranks.world
        self.accumulation = self.rank_sequences // self.micro_batch
        self.data = open_training_data(work)
        vocabulary_size = int(work.input("tokenizer")[1].counts["vocab_size"])
        self.model_config = self.config.model.model_copy(
            update={"vocab_size": self.config.model.vocab_size or vocabulary_size})
        self.checkpoints = Checkpoints(work.folder / "checkpoints", self.ranks, self.say)
        found = self.checkpoints.newest_valid()
        self.progress = self._continue_from(*found) if found else Progress(plan_sha256=self.data.order.plan_sha256)
        self.precision, why = self._agree_on_precision()
        model = spread(self.model_config, None if found else self.config.seed, self.ranks.mesh(self.config.parallel),
                       self.precision, train.activation_checkpointing)
        optimizer = build_optimizer(model, train, self.model_config.tied_embeddings)
        self.engine = Engine(model, optimizer, self.ranks, train.clip_norm)
        if found:
            self._load(found[0])
        self.started_from = self.progress
        self.loader = Prefetcher(self._make_batch, range(self.progress.step, train.steps), train.loader_threads)
        self.heldout = HeldOut(work, self.ranks)
        self.samples = Samples(work)
        self.line = ProgressLine(train.steps, self.say)
        self.metrics = self._open_metrics()
        self._describe(why)
        self.peak = peak_flops(self.ranks.device)
        self.flops_per_token = self.model_config.flops_per_token(train.sequence_length, causal=False)
        self.stop = StopRequest()
        self.began = self.step_began = time.perf_counter()

    def __enter__(self) -> Session:
        self.stop.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.stop.__exit__()
        self.loader.close()
        if self.metrics is not None:
            self.metrics.close()
        if error is None:  # after a failure the other ranks are not here to take leave of
            stop_ranks()

    def say(self, text: str) -> None:
        """One line of the stage's story, from rank 0."""
        if self.ranks.leads:
            self.work.say(text)

    def steps(self) -> Iterator[int]:
        """The optimizer steps that are still to be done."""
        self._look_again()
        self.step_began = time.perf_counter()
        yield from range(self.progress.step, self.config.train.steps)

    def due(self, step: int, every: int) -> bool:
        """Whether something done every so many steps is due after step number `step`; always after the last."""
        return (step + 1) % every == 0 or step + 1 == self.config.train.steps

    def lr(self, step: int) -> float:
        """Learning rate of a step."""
        return learning_rate(step, self.config.train)

    def agree(self, batch: Batch) -> tuple[int, str | None]:
        """Over all ranks: target tokens of the global batch, and whether any rank was asked to stop.

        The stop flag is summed here so that all ranks leave after the same step.
        """
        asked = self.stop.reason
        targets, stops = self.ranks.sum(batch.targets, asked is not None)
        return int(targets), (asked or "another rank was asked") if stops else None

    def check_finite(self, step: int, result: StepResult) -> None:
        """Stop with an explanation where loss or gradients are not numbers; nothing was updated or saved."""
        if result.finite():
            return
        first = self.progress.samples
        raise UserError(
            f"Training stopped at step {step + 1}: loss {result.loss}, gradient norm {result.grad_norm}, on samples "
            f"[{first}, {first + self.batch_sequences}). The weights were not updated and checkpoints before this "
            f"step are sound. Lower train.lr ({self.config.train.lr}) or lengthen train.warmup_steps "
            f"({self.config.train.warmup_steps}), and go on with --accept-drift, or start again with --force.")

    def advance(self, batch: Batch, targets: int) -> None:
        """Note that the update with this batch has happened."""
        progress = self.progress
        self.progress = dataclasses.replace(
            progress, step=progress.step + 1, samples=progress.samples + self.batch_sequences,
            tokens=progress.tokens + self.config.train.batch_tokens, targets=progress.targets + targets)

    def record(self, step: int, result: StepResult, targets: int) -> None:
        """Note what the step was. It goes to the log after the checkpoint, which holds it as well: looking at the
        model may fail (memory, a bad prompt), and must not cost the steps since the last save."""
        train, step_s, tokens = self.config.train, time.perf_counter() - self.step_began, self.config.train.batch_tokens
        record: dict[str, Any] = {
            "step": step + 1, "loss": result.loss, "lr": self.lr(step), "grad_norm": result.grad_norm,
            "samples": [self.progress.samples - self.batch_sequences, self.progress.samples],
            "tokens": self.progress.tokens, "targets": targets, "tokens_per_s": round(tokens / step_s, 1),
            "step_s": round(step_s, 5), "data_wait_s": round(self.loader.waited_s, 5),
            "memory_mb": round(memory_mb(self.ranks.device), 1), "mfu": self._mfu(tokens / step_s)}
        self.progress = dataclasses.replace(self.progress, record=record)
        if self.ranks.leads:
            done = self.progress.step - self.started_from.step
            self.line.show(record, (time.perf_counter() - self.began) / done * (train.steps - self.progress.step))

    def look(self) -> None:
        """Write the last step to the log and TensorBoard, with held-out loss and sample texts when they are due."""
        train, record = self.config.train, dict(self.progress.record or {})
        step = record["step"] - 1
        if self.due(step, train.heldout_every):
            record["heldout_bpb"] = self.heldout.measure(self.engine.model)
        if self.metrics is not None and (self.due(step, train.log_every) or "heldout_bpb" in record):
            self.metrics.step(record)
        if self.due(step, train.sample_every):
            for prompt, text in self.samples.draw(self.engine.model):
                if self.metrics is not None:
                    self.metrics.sample(step + 1, prompt, text)
        self.step_began = time.perf_counter()

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
        """Save a checkpoint, then remove those that are no longer kept."""
        began = time.perf_counter()
        path = self.checkpoints.save(self.engine.model, self.engine.optimizer, self.progress)
        kept = self.config.train.checkpoint
        self.checkpoints.prune(kept.keep, kept.permanent_every)
        if self.metrics is not None:
            self.metrics.event("checkpoint", step=self.progress.step, path=path.name,
                               seconds=round(time.perf_counter() - began, 3))
        self.step_began = time.perf_counter()

    def leave(self, reason: str) -> None:
        """Say why training ends early; the checkpoint is there."""
        self.line.interrupt()
        self.say(f"stopped by {reason} after step {self.progress.step}; saved; the same command continues")
        if self.metrics is not None:
            self.metrics.event("stop", step=self.progress.step, reason=reason)

    def finish(self) -> None:
        """Commit: the last checkpoint is proven once more and the manifest written."""
        if self.progress.step > self.config.train.steps:
            raise UserError(f"This run is at step {self.progress.step} already, beyond train.steps "
                            f"{self.config.train.steps}. Ask for at least {self.progress.step}, or use name=<another>.")
        found = self.checkpoints.newest_valid()
        if found is None or found[1].step != self.config.train.steps:
            raise UserError(f"The checkpoint of the last step does not read back from {self.checkpoints.folder}. "
                            f"Check the disk and run the stage again; it continues from the last good one.")
        metrics, self.metrics = self.metrics, None
        if metrics is not None:
            metrics.event("finish", step=self.progress.step)
            metrics.close()
            self._commit(found[0])
        self.ranks.barrier()

    def _commit(self, checkpoint: Path) -> None:
        folder, name = self.work.folder, f"checkpoints/{checkpoint.name}"
        metrics = read_metrics(folder / "metrics.jsonl")
        # The marker's hashes were compared with the files a moment ago, by all ranks together.
        outputs = [{**record, "path": f"{name}/{record['path']}"} for record in read_marker(checkpoint)["files"]]
        outputs += [output_record(folder, path) for path in
                    (checkpoint / MARKER, folder / "metrics.jsonl", folder / "samples.jsonl", folder / "events.jsonl")]
        self.work.commit(outputs, {
            "checkpoint": name, "steps": self.progress.step, "tokens": self.progress.tokens,
            "samples": self.progress.samples, "targets": self.progress.targets, "restarts": self.progress.restarts,
            "parameters": self.model_config.parameter_count, "vocab_size": self.model_config.vocab_size,
            "epochs": self.data.order.epochs(self.progress.samples), "plan_sha256": self.data.order.plan_sha256,
            "precision": self.progress.precision, "ranks": self.ranks.world,
            "accumulation": self.accumulation,
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
        self.checkpoints.load(path, self.engine.model, self.engine.optimizer)
        # AdamW's groups come back from the checkpoint: what the configuration says now is what holds.
        train = self.config.train
        for group, decay in zip(self.engine.optimizer.param_groups, (train.weight_decay, 0.0), strict=True):
            group.update(betas=(train.beta1, train.beta2), eps=train.eps, weight_decay=decay)

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
        first = self.started_from.samples + done * self.batch_sequences
        return self.data.batch(first + self.ranks.rank * self.rank_sequences, self.rank_sequences)

    def _open_metrics(self) -> MetricsLog | None:
        if not self.ranks.leads:
            return None
        log = MetricsLog(self.work.folder, self.work.run.folder / "tensorboard", self.progress.step, self.say)
        log.event("resume" if self.progress.step else "start", step=self.progress.step, ranks=self.ranks.world,
                  samples=self.progress.samples, drift=self.work.drift)
        return log

    def _describe(self, why: str) -> None:
        train = self.config.train
        self.say(f"{self.model_config.parameter_count:,} parameters; {why}; {self.ranks.world} ranks on "
                 f"{self.ranks.device.type}, {torch.get_num_threads()} threads each")
        self.say(f"batch {train.batch_tokens:,} tokens = {self.batch_sequences} sequences of {train.sequence_length} = "
                 f"{self.ranks.world} ranks x {self.accumulation} micro-batches of {self.micro_batch}; "
                 f"{train.steps} steps, {train.steps * train.batch_tokens:,} tokens, "
                 f"{max(self.data.order.epochs(train.steps * self.batch_sequences).values()):.2f} epochs")

    def _mfu(self, tokens_per_s: float) -> float | None:
        """Model FLOP utilisation, full-attention formula (6 x matrix parameters + attention not halved)."""
        if self.peak is None or self.precision != torch.bfloat16:
            return None
        return round(tokens_per_s * self.flops_per_token / (self.peak * self.ranks.world), 4)


def open_training_data(work: Work) -> TrainingData:
    """The training split of the encode stage, in the order of the configuration's sources."""
    folder, manifest = work.input("encode")
    records = [record for record in manifest.outputs if record.get("split") == "train"]
    sources = [source.name for source in work.config.shard.sources]
    shards = {source: open_shards(folder, records, "train", source) for source in sources}
    train = work.config.train
    return TrainingData(shards, train.sequence_length, work.config.seed, train.mixture,
                        content=[[record["path"], record["sha256"]] for record in records])
