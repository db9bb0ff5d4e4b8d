"""Checks before anything starts or queues. Everything that would fail later and can be known now is refused."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from drover.launch.credentials import credential_problems
from drover.launch.describe import newest_checkpoint, planned_consumption
from drover.launch.plan import Job, Options
from drover.launch.slurm.options import option_problems
from drover.launch.slurm.scheduler import Scheduler
from drover.pipeline.config.checks import absent_attention, absent_packages, problems, rank_problems
from drover.pipeline.config.phases import PhasePlan
from drover.pipeline.config.section import blocked
from drover.pipeline.config.tree import Config
from drover.pipeline.contract.run import Run, acceptable
from drover.pipeline.contract.stages import STAGES, before
from drover.pipeline.core.console import say
from drover.pipeline.core.errors import UserError, all_problems, listed, refusals
from drover.pipeline.records.checkpoints import refuse_shorter
from drover.pipeline.storage.model_hub import hub_folder, names_the_hub


def configuration_problems(config: Config, jobs: list[Job], *, local: bool = True) -> list[str]:
    """All problems of the configuration itself, and of its fit to the planned ranks.

    local: the jobs see the file systems of this machine.
    """
    reasons = problems(config)
    running = {job.stage: job for job in jobs if job.to_run}
    if local and running and (obstacle := blocked(config.folder, write=True)) is not None:
        reasons.append(obstacle)
    reasons += [f"stages.{name}: there is no stage {name}; {', '.join(STAGES)} are there, and those that `plugins` "
              f"register." for name in config.stages if name not in STAGES]
    for stage, job in running.items():
        if job.own_python:
            reasons += absent_packages(config, stage)
    if train := running.get("train"):
        reasons += [*rank_problems(config, train.ranks), *absent_attention(config)]
    return reasons


def start_problems(run: Run, jobs: list[Job], options: Options) -> list[str]:
    """All that this machine or the cluster would refuse or fail at later, of a valid configuration."""
    config = run.config
    running = [job for job in jobs if job.to_run]
    slurm = options.cluster == "slurm"
    reasons = credential_problems(config)  # the configuration will be in the run folder
    if slurm:
        reasons += [f"launch.secrets names {name}, but your shell has no such variable. Set it, or remove the name."
                    for name in config.launch.secrets if not os.environ.get(name)]
        if "PYTHONPATH" in config.launch.environment:
            reasons.append("launch.environment has PYTHONPATH, which the jobs set to their copy of the code. Add "
                           "folders to it in launch.setup (export PYTHONPATH=...), or name the modules in plugins.")
        reasons += option_problems(config.launch)
        if short := [job.stage for job in running if 60 * job.minutes <= job.signal_s]:
            reasons.append(f"launch.time of {', '.join(short)} is not longer than launch.signal_s="
                           f"{config.launch.signal_s} s, the time before the limit at which Slurm signals the end. "
                           f"Raise the one, or lower the other.")
        reasons += _too_many_nodes(running)
    return reasons + refusals(partial(refuse_unusable_inputs, run, jobs, options))


def _too_many_nodes(jobs: Sequence[Job]) -> Iterator[str]:
    """Jobs that request more nodes than their partition has, if sinfo answers."""
    kinds = Scheduler().node_kinds()
    for job in jobs:
        there = sum(kind.nodes for kind in kinds if kind.partition in (
            job.resources.partition or kind.partition * kind.usual).split(","))
        if 0 < there < job.all_nodes:
            yield (f"{job.stage} requests {job.all_nodes} nodes, and its partition has {there} (sinfo). Lower --nodes "
                   f"or launch.train.spare_nodes, or set another launch.partition.")


def refuse_unusable_inputs(run: Run, jobs: list[Job], options: Options) -> None:
    """Refuse what a stage would refuse later: missing files and changed stages."""
    requested = STAGES.keys() & {job.stage for job in jobs}
    running = _running(jobs)
    _refuse_absent_files(run.config, running)
    if "train" in running:
        if run.config.train.init_from is not None:
            _refuse_other_weights(run, run.config.train.init_from)
        _refuse_plan(run, forced=options.force)
    for job in jobs:
        refuse_changed(run, job, options)
    for stage in before([*requested]):
        if stage not in requested and (changed := run.changed(stage)):
            raise UserError(f"{run.refusal(stage, changed)}\n{stage} was not requested, but the "
                            f"requested stages depend on it: name it too ({_named(requested | {stage})}).")


def _running(jobs: Sequence[Job]) -> list[str]:
    """The stages of jobs that have something to do."""
    return [stage for stage in STAGES if any(job.stage == stage and job.to_run for job in jobs)]


def absence(run: Run, jobs: Sequence[Job]) -> list[str]:
    """A sentence, if the jobs need stages that are neither done nor among them."""
    running, requested = _running(jobs), {job.stage for job in jobs}
    absent = [stage for stage in before(running) if stage not in requested and run.manifest(stage) is None]
    return [f"{', '.join(running)} cannot start: {', '.join(absent)} of {run.folder} are not done and not requested. "
            f"Request them too ({_named(requested.union(absent))}), or use finished stages of another run "
            f"(reuse=<folder>)."] * bool(absent)


def _named(stages: set[str]) -> str:
    return f"--stage {','.join(stage for stage in STAGES if stage in stages)}"


def say_absent(run: Run, jobs: list[Job]) -> None:
    """Print, once, which input files of finished stages no longer exist. That is not refused."""
    requested = [job.stage for job in jobs if job.stage in STAGES]
    for text in run.absences([stage for stage in STAGES if stage in {*requested, *before(requested)}]):
        say("note", text)


def refuse_changed(run: Run, job: Job, options: Options) -> None:
    """Refuse a stage with changed inputs or settings, unless the request says what to do about it."""
    changes = job.state.differences
    if job.forced or job.state.kind != "changed" or (options.accept_changes and acceptable(job.stage, changes)):
        return
    raise run.refusal(job.stage, changes)


def _refuse_absent_files(config: Config, stages: list[str]) -> None:
    """Refuse missing corpus and tokenizer files, and a tokenizer that cannot be used, before the earlier stages have
    run."""
    reasons = []
    for stage in stages:
        try:
            _download(config, stage)
            files = STAGES[stage].input_files(config)
        except UserError as error:
            reasons.append(f"{stage}: {error}")
            continue
        reasons += [f"{stage}: the input file {path} does not exist." for _, path in files if not path.is_file()]
        reasons += [f"{stage}: {problem}" for problem in STAGES[stage].call("problems", config, otherwise=())]
    if reasons:
        raise UserError(all_problems(reasons, "Inputs of the stages are missing or cannot be used", len(reasons)))


def _download(config: Config, stage: str) -> None:
    """Download the files of a name on the Hub that a stage reads from the cache. UserError if that fails."""
    path, start = config.tokenizer.path, config.train.init_from
    if stage == "tokenizer" and path is not None and names_the_hub(path):
        hub_folder(path, download=True)
    if stage == "train" and start is not None and names_the_hub(start):
        hub_folder(start, weights=True, download=True)


def _refuse_other_weights(run: Run, path: str) -> None:
    """Refuse initial weights of another shape, or for another tokenizer if that is known, before the job waits in a
    queue."""
    from drover.pipeline.training.initial_weights import refuse_other_shape, refuse_other_tokenizer  # imports torch
    model, made = run.config.model, run.manifest("tokenizer")
    refuse_other_shape(Path(path), model.with_vocabulary(made.counts["vocab_size"] if made else None))
    if made is not None:
        refuse_other_tokenizer(Path(path), run.stage_folder("tokenizer") / "hf")


def _refuse_plan(run: Run, *, forced: bool) -> None:
    """Refuse, before the job waits in a queue, phases that change what is already trained, an end before the newest
    checkpoint, and sources that would be read too often. The latter are known once encode has counted the tokens."""
    train = run.config.train
    if (consumption := planned_consumption(run)) is not None and train.packing == "concatenate":
        from drover.pipeline.data.sampling.consumption import excesses
        if beyond := excesses(train, consumption):
            raise UserError(listed(beyond))
    if not forced and (newest := newest_checkpoint(run)) is not None:  # training renames a corrupted one
        path, marker = newest
        if train.phases or marker.config.get("train", {}).get("phases"):
            from drover.pipeline.training.checkpoints import changed_future  # imports torch
            for text in changed_future(path, marker.progress, PhasePlan.of(train)):
                say("note", f"plan changed after step {marker.progress.step}: {text}")
        refuse_shorter(marker.progress.step, train.steps)
