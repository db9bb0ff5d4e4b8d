"""Set up one start of training: ranks, data, the checkpoint to continue from, the engine, and the hooks.

`set_up` reads from top to bottom in the order in which things happen. What it returns is ready for the first step.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from drover.model.attention.backend import Where
from drover.model.config import ModelConfig
from drover.model.llama import ModelPart
from drover.pipeline.config.checks import rank_problems
from drover.pipeline.config.shipped import HOOKS
from drover.pipeline.config.tree import Config, changed
from drover.pipeline.contract.run import code_hashes
from drover.pipeline.contract.stage_work import Work, git_state, software_versions
from drover.pipeline.contract.stages import STAGES
from drover.pipeline.core.errors import UserError, listed
from drover.pipeline.data.sampling.consumption import as_if
from drover.pipeline.parallel.blocks import choose_attention, choose_flash, compiles, refuse_without_compiler
from drover.pipeline.parallel.fp8 import fp8_lines, refuse_without_fp8
from drover.pipeline.parallel.fsdp import InitialValues, drawn, parallelize
from drover.pipeline.parallel.grid import Grid
from drover.pipeline.parallel.pipeline_parallel import PipelinedModel
from drover.pipeline.parallel.ranks import Ranks, start_ranks
from drover.pipeline.parallel.stages import stage_layers
from drover.pipeline.records.checkpoints import CHECKPOINTS, TrainingProgress, refuse_shorter
from drover.pipeline.records.hangs import write_places
from drover.pipeline.records.metrics import OTHER_ORDER, TrainingRecords, no_longer_left_out, reordered
from drover.pipeline.records.weight_files import keep_settings
from drover.pipeline.training.checkpoints import (
    AsyncSaver,
    Checkpoints,
    agreed_precision,
    changed_code,
    changed_future,
    continued,
    load,
)
from drover.pipeline.training.data import StepBatches, TokenCheck, refuse_beyond
from drover.pipeline.training.device import DTYPES, make_deterministic, memory_explained
from drover.pipeline.training.engine import Engine, FsdpEngine, PipelineEngine
from drover.pipeline.training.guards import GuardRunner
from drover.pipeline.training.hooks import Garbage, Hook, Saving, Scores, StopAgreement
from drover.pipeline.training.loop import Loop, StartFacts
from drover.pipeline.training.monitor import Samples, Validation
from drover.pipeline.training.mup import scaled
from drover.pipeline.training.optimizers import build_elementwise, build_optimizer
from drover.pipeline.training.profiling import Profiling
from drover.pipeline.training.rank_agreement import RankAgreement
from drover.pipeline.training.recorder import Recorder, kernel_lines, summary_lines
from drover.pipeline.training.replicas import ReplicaCheck
from drover.pipeline.training.uploads import Uploads
from drover.pipeline.training.watchdog import COMPILED_STEP_S, Watchdog, longest_wait


class StartupTimes(dict[str, float]):
    """Seconds of each part of a start, for its record. Compiling is part of the first step."""

    def __init__(self) -> None:
        super().__init__(imports=round(time.time() - psutil.Process().create_time(), 3))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time within to a part."""
        began = time.perf_counter()
        yield
        self[name] = round(self.get(name, 0.0) + time.perf_counter() - began, 3)


def set_up(work: Work, watchdog: Watchdog, ends: ExitStack) -> Loop:
    """Everything that the first step needs. Called on all ranks alike.

    ends: closes at the end of the process what would keep it alive.

    Raises:
        UserError: this configuration, its data or its newest checkpoint cannot be trained on; the same on every rank.
    """
    config = work.config
    train = work.config.train
    times = StartupTimes()

    with times.part("rendezvous"):
        if train.deterministic:
            make_deterministic()
        ranks = start_ranks(longest_wait(config), work.store, config.launch.device)
        agreement = RankAgreement.gather(ranks, work)

    def say(text: str) -> None:
        if ranks.is_rank_zero:
            work.say(text)
    paused = partial(watchdog.paused, ranks.barrier)
    for line in filter(None, (str(agreement), agreement.warning())):
        say(line)
    if ranks.is_rank_zero:
        write_places(work.folder, agreement.nodes)

    if problems := rank_problems(config, ranks.world):
        raise UserError(f"This run does not fit {ranks.world} ranks: {listed(problems)}")
    with times.part("data"), paused():
        batches = StepBatches(work, Grid(ranks, config.parallel), say)
    plan = batches.plan
    grid = batches.grid
    data = batches.data
    model_config = config.model.with_vocabulary(work.input("tokenizer")[1].counts["vocab_size"])

    hooks = list[Hook]()  # filled at the end; what is built before may ask them when training runs
    recorder = Recorder(work, ranks, plan)
    with times.part("checkpoint"), paused():
        checkpoints = Checkpoints(work.folder / CHECKPOINTS, ranks, say, needed=lambda step: (
            step in config.convert.average or any(hook.needs(step) for hook in hooks)))
        uploads = None
        if train.checkpoint.copy_to is not None:
            uploads = Uploads(work, checkpoints, train.checkpoint.copy_to, recorder.event)
            ends.callback(uploads.close)  # its thread would keep this process
        newest = (uploads or checkpoints).newest_valid()

    with times.part("data"):
        records = TrainingRecords(work.folder)
        plan_changes = ranks.by_leader(
            lambda: (newest and changed_future(*newest, plan)) or records.newly_accepted(work.accepted))
        with paused():  # the rest of an epoch may have to be packed
            guards = GuardRunner(work, ranks, data, say)
        refuse_shorter(newest[1].step if newest else 0, train.steps)
        progress = replace(_continued(newest, work, guards, plan_changes),
                           restarts=ranks.by_leader(lambda: len(records.training_starts)))
        if newest is not None:
            say(f"continuing after step {progress.step} ({progress.tokens:,} tokens, {progress.samples:,} samples) "
                f"from {newest[0].name}")
            if ranks.is_rank_zero and (warning := changed_code(newest[0], code_hashes(STAGES["train"], config))):
                say(warning)
        for text in plan_changes:
            say(f"plan changed: {text}")
        if many := refuse_beyond(train, data, say):
            recorder.event("many_epochs", step=progress.step, planned_epochs=many)
        changed_after = ranks.by_leader(lambda: reordered(records.events))
        for text in as_if(changed_after + [progress.step] * (OTHER_ORDER in plan_changes)):
            say(f"warning: {text}")
        token_check = TokenCheck(work, ranks, agreement.nodes, batches, recorder) if train.shard_checks else None
        if token_check is None:
            say("token shards are not compared with the encode stage's manifest: train.shard_checks is false")

    with times.part("model"):
        precision, precision_reason = agreed_precision(train.precision, progress.precision, ranks)
        dtype = DTYPES[precision]
        progress = replace(progress, precision=precision)
        decided = changed(config, {"train.precision": precision})
        # Nothing uses this generator yet. Later uses must not differ between starts, nor may checkpoints' bytes.
        torch.manual_seed(config.seed + ranks.rank)
        rehearsal = (f"{shlex.quote(str(work.run.folder.absolute() / 'config.yaml'))} "
                     f"model.vocab_size={model_config.vocab_size}")
        with ExitStack() as opened, memory_explained(None, ranks, progress.step, rehearsal, first=True):
            initial = None if newest is not None else _initial_values(work, model_config, ranks, opened)
            engine = build_engine(decided, model_config, grid, dtype, batches.of_phase[0].accumulation, initial)
        if compiles(train, ranks.device, config.parallel):
            watchdog.step_s = COMPILED_STEP_S

    def saved(step: int) -> None:
        for hook in hooks:
            hook.on_saved(step)
    with times.part("checkpoint"):
        saver = AsyncSaver(checkpoints, train.checkpoint, _about(config) if ranks.is_rank_zero else {}, recorder.event,
                           saved, (lambda: None) if token_check is None else token_check.refuse_damaged)
        with paused():
            if newest is not None:
                load(newest[0], engine, ranks, progress.updates)
            saver.prepare(engine.state_shards())

    with times.part("other"):
        # Peak FLOP/s are known for bf16. fp8 is measured against them too, so that its MFU compares with that of bf16.
        recorder.open(progress, dtype == torch.bfloat16)
        for text in [*summary_lines(config, model_config, batches, precision_reason),
                     *kernel_lines(config, engine, ranks.device, dtype),
                     *(fp8_lines(decided, model_config, grid.tensor, ranks.device) if precision == "fp8" else ())]:
            say(text)
        loop = Loop(work=work, watchdog=watchdog, batches=batches, model_config=model_config, engine=engine,
                    saver=saver, recorder=recorder, guards=guards, token_check=token_check, hooks=hooks,
                    stop=StopAgreement(ranks, work.run.folder, train.stop_after_minutes, work.began),
                    progress=progress, facts=StartFacts(agreement.nodes, plan_changes, times, rehearsal))
        with paused():  # validation text and the vocabulary are read
            hooks += _hooks(loop, uploads)
        work.run.forget_manifests()  # with very many shards they are large
        loop.begin()
    return loop


def _continued(newest: tuple[Path, TrainingProgress] | None, work: Work, guards: GuardRunner,
               plan_changes: list[str]) -> TrainingProgress:
    """The progress to continue from, with the configured order of samples. Adds to `plan_changes` what follows from
    it."""
    order = guards.data.order
    if plan_changes:
        plan_changes += no_longer_left_out(guards.rollbacks, order.links)
    if newest is None:
        return TrainingProgress(plan_sha256=order.plan_at(0))
    path, before = newest
    now = order.plan_at(before.samples)
    same = {now, order.without_phases} if now == order.links[0] else {now}  # phases may have been added since
    if plan_changes and before.plan_sha256 not in same:
        plan_changes.append(OTHER_ORDER)
    return continued(path, before, now, bool(work.accepted))


def build_engine(config: Config, model: ModelConfig, grid: Grid, precision: torch.dtype, accumulation: int,
                 initial: InitialValues | None) -> Engine:
    """The configured engine with a model and its initial weights; None leaves them to a checkpoint.

    precision: the element type of `config.train.precision`, which must be decided (not `auto`).
    """
    train = config.train
    parallel = config.parallel
    device = grid.ranks.device
    assert model.vocab_size is not None
    if model.vocab_size % parallel.tp:
        raise UserError(f"The vocabulary has {model.vocab_size} words, which parallel.tp ({parallel.tp}) does not "
                        f"divide. Set model.vocab_size to a multiple (ids beyond the tokenizer's are never used), or "
                        f"another parallel.tp.")
    refuse_without_compiler(train, device)
    if train.precision == "fp8":
        refuse_without_fp8(config, device)
    where = Where(device, precision, compiles(train, device, parallel), model.head_width,
                  grid.context > 1)
    attention, flash = choose_attention(train.attention, where), choose_flash(train.flash, device)
    backend = attention.backend
    if grid.context > 1:
        from drover.pipeline.parallel.context_parallel import ContextParallel
        backend = ContextParallel(backend, grid.mesh["context"])
    place: Any = partial(parallelize, model, initial, grid, precision, train, parallel, backend)
    engine: Engine
    if parallel.engine == "deepspeed":
        from drover.pipeline.training.zero import ZeroEngine
        engine = ZeroEngine(model, initial, grid.ranks, precision, config, accumulation, backend,
                            lambda placed: build_elementwise(placed, config, grid, model.tied_embeddings))
    elif grid.pipeline > 1:
        layers = stage_layers(model, parallel.stages)
        parts = [place(ModelPart(layers[number], model.layers)) for number in parallel.stages_of(grid.pipeline_rank)]
        stages = PipelinedModel(parts, grid, parallel, precision)
        engine = PipelineEngine(stages, build_optimizer(stages, config, grid, model.tied_embeddings), grid, config)
    else:
        placed = place()
        engine = FsdpEngine(placed, build_optimizer(placed, config, grid, model.tied_embeddings), grid, config)
    # Under context parallelism `part_of` already marks a whole sequence as one document.
    engine.across_documents = train.across_documents and grid.context == 1
    engine.attention = attention
    engine.flash = flash
    return engine


def _initial_values(work: Work, model: ModelConfig, ranks: Ranks, opened: ExitStack) -> InitialValues:
    """Those of a new model, or those in the weights of `train.init_from`, which `opened` closes."""
    own = scaled(drawn(model, work.config.seed), work.config)
    path = None if work.config.train.init_from is None else Path(work.config.train.init_from)
    if path is not None:
        from drover.pipeline.training.initial_weights import given_values
        own = opened.enter_context(given_values(work, path, model, own, ranks))
    ids = work.input("tokenizer")[1].counts
    ranks.by_leader(lambda: keep_settings(path, work.folder, ids["bos_id"], ids["eos_id"]))
    return own


def _hooks(loop: Loop, uploads: Uploads | None) -> list[Hook]:
    """All hooks, in the order in which they are called."""
    train = loop.config.train
    for settings in HOOKS.made(train.hooks):
        alike = sum(name.partition(" ")[0] == settings.kind for name in loop.own_hooks)
        loop.own_hooks[f"{settings.kind} {alike + 1}" if alike else settings.kind] = settings.open(loop)
    every, scored = train.guards.replica_hash_every, loop.config.evaluate.every
    hooks = [
        Saving(train.checkpoint.every_minutes),
        loop.token_check,
        uploads,
        Scores(loop.work.folder, scored) if scored is not None else None,
        loop.stop,
        ReplicaCheck(loop.ranks, loop.facts.nodes, every) if every is not None and loop.ranks.world > 1 else None,
        *loop.own_hooks.values(),
        Validation(loop) if train.validation_every is not None else None,
        Samples(loop) if train.sample_every is not None else None,
        Profiling(train.profile, train.profile.start) if train.profile.start is not None else None,
        Garbage()]
    return [hook for hook in hooks if hook is not None]


def _about(config: Config) -> dict[str, object]:
    """Fields of a checkpoint's marker on how it was made."""
    return {"config": config.model_dump(mode="json"), "software": software_versions(), "git": git_state(),
            "code": code_hashes(STAGES["train"], config)}
