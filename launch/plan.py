"""What would be started for a request: pure, from the configuration and the run folder's state to a list of jobs."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pipeline.config.checks import problems, rank_problems
from pipeline.config.tree import Config
from pipeline.errors import UserError, listed
from pipeline.run import Run, State
from pipeline.stages import REPOSITORY, STAGES, before

WORKER_STAGES = ("shard", "tokenizer", "encode")
"""Stages that spread their units over worker processes; the others without ranks are one process."""


@dataclass(frozen=True)
class Machine:
    """What this box has: cores this process may use, GPUs it can see."""

    cores: int
    gpus: int = 0


@dataclass(frozen=True)
class Options:
    """The request, apart from the stages.

    config_path, overrides: what each stage is given on its command line.
    machine: only a local run is fitted to it.
    """

    cluster: Literal["local", "slurm"]
    config_path: str
    overrides: tuple[str, ...] = ()
    force: bool = False
    accept_drift: bool = False
    machine: Machine = Machine(1)
    python: str = sys.executable


@dataclass(frozen=True)
class Job:
    """One stage to be run, or found done.

    command: what does it by hand, in the user's folder with `environment` set.
    arguments: what the stage's own command line gets.
    ranks: processes under torch.distributed over all nodes; 0 for a stage that has none.
    tasks_per_node, cpus_per_task, gpus_per_node, memory_gb (per node), time_minutes: asked of Slurm.
    dependencies: the planned stages that must end well before; those implied by others are left out.
    state: the state of the stage's folder now. `forced`: it is rebuilt whatever its state.
    """

    name: str
    stage: str
    state: State
    forced: bool
    command: tuple[str, ...]
    arguments: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    ranks: int = 0
    processes: int = 1
    nodes: int = 1
    tasks_per_node: int = 1
    cpus_per_task: int = 1
    gpus_per_node: int = 0
    memory_gb: int | None = None
    time_minutes: int = 0
    dependencies: tuple[str, ...] = ()

    @property
    def to_run(self) -> bool:
        """Whether there is anything to do."""
        return self.forced or self.state.kind != "done"


def plan(config: Config, run: Run, stages: list[str], options: Options) -> list[Job]:
    """The jobs for `stages`, in their order. Reads the run folder, starts and writes nothing."""
    states = {stage: run.state(stage) for stage in stages}
    for stage in stages:
        stale = [name for name in before([stage]) if name in states and states[name].kind == "stale"]
        if states[stage].kind == "done" and stale:  # done, but of something that is not to be trusted
            states[stage] = State("waiting", reasons=[f"for {', '.join(stale)}"])
    running = [stage for stage in stages if options.force or states[stage].kind != "done"]
    for stage in stages:
        if states[stage].kind == "waiting" and (nearest := _dependencies(stage, running)):
            states[stage] = State("waiting", reasons=[f"for {', '.join(nearest)}"])
    return [_job(config, stage, states[stage], running, options) for stage in stages]


def configuration_problems(config: Config, jobs: list[Job], path: str) -> None:
    """Refuse what cannot work, all at once: the configuration itself, and its fit to the planned ranks."""
    found = problems(config)
    for job in jobs:
        if job.stage == "train" and job.to_run:
            found += rank_problems(config, job.ranks)
            if config.parallel.engine == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
                found.append("parallel.engine is 'deepspeed', but the package deepspeed is not installed here; install "
                             "it, or take parallel.engine=fsdp2.")
    if found:
        count = "1 problem" if len(found) == 1 else f"{len(found)} problems"
        raise UserError(f"{count} in the configuration {path}:\n{listed(found)}")


def refuse_unsound(run: Run, jobs: list[Job], options: Options, *, showing: bool = False) -> None:
    """Refuse, before anything starts, what a stage would refuse later: absent inputs and stale stages.

    Where jobs are only shown, inputs may still be absent.
    """
    asked = [job.stage for job in jobs]
    running = [job.stage for job in jobs if job.to_run]
    if not showing and (absent := _absent(run, running, asked)):
        wanted = [stage for stage in STAGES if stage in asked or stage in absent]
        raise UserError(f"{', '.join(running)} cannot start: {', '.join(absent)} of {run.folder} "
                        f"{'is' if len(absent) == 1 else 'are'} not done, and not asked for. Ask for "
                        f"{'it' if len(absent) == 1 else 'them'} too (--stage {','.join(wanted)}, or --stage all), "
                        f"or take finished stages from another run with reuse=<folder>.")
    _refuse_absent_files(run.config, jobs)
    for job in jobs:
        refuse_stale(run, job, options)
    for stage in before(asked):
        if stage not in asked and (changed := run.changed_settings(stage)):
            refusal, wanted = run.refusal(stage, State("stale", changed)), [stage, *asked]
            raise UserError(f"{refusal}\n{stage} was not asked for, but what was asked for is made of it: name it as "
                            f"well (--stage {','.join(name for name in STAGES if name in wanted)}).")


def _refuse_absent_files(config: Config, jobs: list[Job]) -> None:
    """A corpus or tokenizer file that is not there is found before the stages ahead of it have run."""
    found = []
    for job in jobs:
        if not job.to_run:
            continue
        try:
            found += [f"{job.stage}: the input file {path} is not there." for _, path in
                      STAGES[job.stage].input_files(config) if not path.is_file()]
        except UserError as error:
            found.append(f"{job.stage}: {error}")
    if found:
        raise UserError(f"What the stages read is not there:\n{listed(found)}" if len(found) > 1 else found[0])


def refuse_stale(run: Run, job: Job, options: Options) -> None:
    """Refuse a stage that was made of something else, unless the request says what to do about it."""
    if job.forced or job.state.kind != "stale":
        return
    mixed = job.state.begun_only and job.stage != "train"  # two settings must not meet in one stage's outputs
    if options.accept_drift and not run.is_reused(job.stage) and not mixed:
        return
    refusal = run.refusal(job.stage, job.state)
    if options.accept_drift and mixed:
        raise UserError(f"{refusal}\n--accept-drift does not help here: {job.stage} was only begun, and outputs of "
                        f"two settings must not be mixed in one stage.")
    later = [stage for stage in STAGES if stage == job.stage or job.stage in before([stage])]
    raise UserError(f"{refusal}\n--force rebuilds every stage that is asked for; --stage {','.join(later)} --force "
                    f"rebuilds {job.stage} and what is made of it.") if len(later) > 1 else refusal


def local_ranks(config: Config, machine: Machine) -> int:
    """Ranks of train and evaluate on this box: one per GPU, or `launch.processes` of them where there is none."""
    wanted = config.launch.processes
    return min(wanted or machine.gpus, machine.gpus) if machine.gpus else wanted or 1


def _job(config: Config, stage: str, state: State, running: list[str], options: Options) -> Job:
    launch, spec = config.launch, STAGES[stage]
    flags = [flag for flag, on in (("--force", options.force), ("--accept-drift", options.accept_drift)) if on]
    arguments = ("--config", options.config_path, *flags, *options.overrides)
    nodes, tasks, threads = 1, 1, launch.cpus_per_task
    environment = {"PYTHONPATH": str(REPOSITORY)}
    if spec.ranks and options.cluster == "local":
        tasks = local_ranks(config, options.machine)
        threads = max(1, options.machine.cores // tasks)
    elif spec.ranks:
        nodes = launch.nodes if stage == "train" else 1
        tasks = launch.gpus_per_node or launch.processes or 1
    elif stage in WORKER_STAGES:
        threads = max(threads, launch.processes or 0)
    if spec.ranks:
        environment["OMP_NUM_THREADS"] = str(threads)
    agent = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(tasks)) \
        if spec.ranks and options.cluster == "local" else ()
    workers = launch.processes or (threads if options.cluster == "slurm" else options.machine.cores)
    return Job(
        name=f"{config.name}-{stage}", stage=stage, state=state, forced=options.force,
        command=(options.python, *agent, "-m", spec.module, *arguments), arguments=arguments, environment=environment,
        ranks=nodes * tasks if spec.ranks else 0, processes=workers if stage in WORKER_STAGES else 1,
        nodes=nodes, tasks_per_node=tasks, cpus_per_task=threads,
        gpus_per_node=launch.gpus_per_node if spec.ranks else 0, memory_gb=launch.memory_gb,
        time_minutes=launch.time_minutes, dependencies=_dependencies(stage, running))


def _dependencies(stage: str, running: list[str]) -> tuple[str, ...]:
    """The needed stages that run too, without those that another of them waits for anyway."""
    needed = [need for need in STAGES[stage].needs if need in running]
    implied = before(needed, through=running)
    return tuple(need for need in needed if need not in implied)


def _absent(run: Run, running: list[str], asked: list[str]) -> list[str]:
    needed = {need for stage in running for need in STAGES[stage].needs}
    return [stage for stage in STAGES if stage in needed and stage not in asked and run.manifest(stage) is None]


def log_path(run_folder: Path, stage: str) -> Path:
    """Where a stage's output is kept, of all its attempts."""
    return run_folder / "logs" / f"{stage}.log"
