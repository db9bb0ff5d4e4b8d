"""What would be started for a request: pure, from the configuration and the run folder's state to a list of jobs."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field, replace
from typing import Literal

from launch.resources import Asked, asked_of
from pipeline.config.plugins import plugin_folders
from pipeline.config.tree import Config
from pipeline.contract.run import Run, State, done_parts
from pipeline.contract.stages import REPOSITORY, STAGES, before

MOST_PARTS = 64
"""Parts of a stage that are planned where nothing is said; more are a matter of the site."""
Kind = Literal["job", "array", "finalise", "link"]


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
    chain: id of a submission to Slurm; what is forced is forced once for it.
    code: where the jobs' code is.
    """

    cluster: Literal["local", "slurm"]
    config_path: str
    overrides: tuple[str, ...] = ()
    force: bool = False
    accept_drift: bool = False
    machine: Machine = Machine(1)
    python: str = sys.executable
    chain: str = ""
    code: str = str(REPOSITORY)


@dataclass(frozen=True)
class Work:
    """What a job does, as it is planned and as the job itself knows it.

    name: Slurm's name of the job.
    ranks: processes under torch.distributed over all nodes; 0 for a stage that has none.
    parts: elements into which an array cuts the `phase` of the stage, whose units they share; 0: the job is no array.
    link, links: which of how many jobs that go on with the same stage, from 1.
    """

    name: str
    stage: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    ranks: int = 0
    nodes: int = 1
    tasks_per_node: int = 1
    cpus_per_task: int = 1
    gpus_per_node: int = 0
    parts: int = 0
    phase: str = ""
    link: int = 1
    links: int = 1


@dataclass(frozen=True, kw_only=True)
class Job(Work):
    """One stage to be run, or found done, or on Slurm a part of the work on one.

    key: what other jobs depend on it by: the stage, or what precedes the job that ends it (`encode-parts`,
        `shard-read`, `train-1`).
    command: what does it by hand, in the user's folder with `environment` set.
    arguments: what the stage's own command line gets.
    asked: partition, time and the like, for Slurm. cpus_per_task, tasks_per_node, gpus_per_node as well.
    elements: of an array, those that are still to do.
    dependencies: keys of the planned jobs that must end well before; those implied by others are left out.
    state: the state of the stage's folder now. `forced`: it is rebuilt whatever its state.
    """

    key: str
    state: State
    forced: bool
    arguments: tuple[str, ...]
    kind: Kind = "job"
    processes: int = 1
    asked: Asked = field(default_factory=Asked)
    elements: tuple[int, ...] = ()
    dependencies: tuple[str, ...] = ()

    @property
    def to_run(self) -> bool:
        """Whether there is anything to do."""
        return self.forced or self.state.kind != "done"


def plan(config: Config, run: Run, stages: list[str], options: Options) -> list[Job]:
    """The jobs for `stages`, in their order. Reads the run folder, starts and writes nothing."""
    states = {stage: run.state(stage) for stage in stages}
    for stage in stages:
        changed = [name for name in before([stage]) if name in states and states[name].kind in ("stale", "partial")]
        if states[stage].kind == "done" and changed:  # done, but of something that is not to be trusted, or renewed
            states[stage] = State("waiting", reasons=[f"for {', '.join(changed)}"])
    running = [stage for stage in stages if options.force or states[stage].kind != "done"]
    for stage in stages:
        if states[stage].kind == "waiting" and (nearest := _dependencies(stage, running)):
            states[stage] = State("waiting", reasons=[f"for {', '.join(nearest)}"])
    return [job for stage in stages for job in _jobs(config, run, stage, states[stage], running, options)]


def local_ranks(config: Config, machine: Machine) -> int:
    """Ranks of train and evaluate on this box: one per GPU, or `launch.processes` of them where there is none."""
    wanted = config.launch.processes
    return min(wanted or machine.gpus, machine.gpus) if machine.gpus else wanted or 1


def _jobs(config: Config, run: Run, stage: str, state: State, running: list[str], options: Options) -> list[Job]:
    """One job; on Slurm also arrays and the job that ends them, or links that follow each other."""
    job = _job(config, stage, state, running, options)
    if options.cluster == "local" or not job.to_run:
        return [job]
    if STAGES[stage].phases and (parts := _parts(config, stage)) > 1:
        return _in_parts(run, job, parts)
    links = config.launch.train.links if stage == "train" else 1
    # The last one carries the stage's own key: what comes after training waits for it.
    return [replace(job, key=stage if link == links else f"{stage}-{link}", kind="link" if links > 1 else "job",
                    link=link, links=links) for link in range(1, links + 1)]


def _in_parts(run: Run, job: Job, parts: int) -> list[Job]:
    """An array for each phase that is not done, an element a part, one after the other, and the job that brings all
    together and commits."""
    phases, arrays, after = STAGES[job.stage].phases, list[Job](), job.dependencies
    for phase in phases:
        done = set() if job.forced or job.state.kind != "partial" else done_parts(run, job.stage, parts, phase)
        if elements := tuple(index for index in range(parts) if index not in done):
            word = phase if len(phases) > 1 else "parts"
            arrays.append(replace(job, key=f"{job.stage}-{word}", name=f"{job.name}-{word}", kind="array", parts=parts,
                                  phase=phase, elements=elements, dependencies=after))
            after = (arrays[-1].key,)
    return [*arrays, replace(job, kind="finalise", dependencies=after)]


def _parts(config: Config, stage: str) -> int:
    asked = getattr(config.launch.of(stage), "array", None)
    return int(asked or min(config.launch.train.nodes, MOST_PARTS))


def _job(config: Config, stage: str, state: State, running: list[str], options: Options) -> Job:
    launch, spec, asked = config.launch, STAGES[stage], asked_of(config.launch, stage)
    force = () if not options.force else ("--force-id", options.chain) if options.chain else ("--force",)
    arguments = ("--config", options.config_path, *force,
                 *(("--accept-drift",) if options.accept_drift else ()), *options.overrides)
    nodes, tasks, threads, gpus = 1, 1, asked.cpus, 0
    environment = {**launch.environment} if options.cluster == "slurm" else {}
    environment["PYTHONPATH"] = os.pathsep.join([options.code, *plugin_folders()])
    if spec.ranks and options.cluster == "local":
        tasks = local_ranks(config, options.machine)
        threads = max(1, options.machine.cores // tasks)
    elif spec.ranks:
        nodes, gpus = getattr(launch.of(stage), "nodes", 1), asked.gpus_per_node
        tasks = gpus or launch.processes or 1
    elif spec.workers:
        threads = max(threads, launch.processes or 0)
    if spec.ranks:
        environment.setdefault("OMP_NUM_THREADS", str(threads))
    agent = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(tasks)) \
        if spec.ranks and options.cluster == "local" else ()
    workers = launch.processes or (threads if options.cluster == "slurm" else options.machine.cores)
    return Job(
        key=stage, name=f"{config.name}-{stage}", stage=stage, state=state, forced=options.force,
        command=(options.python, *agent, "-m", spec.module, *arguments), arguments=arguments, environment=environment,
        ranks=nodes * tasks if spec.ranks else 0, processes=workers if spec.workers else 1,
        nodes=nodes, tasks_per_node=tasks, cpus_per_task=threads, gpus_per_node=gpus, asked=asked,
        dependencies=_dependencies(stage, running))


def _dependencies(stage: str, running: list[str]) -> tuple[str, ...]:
    """The needed stages that run too, without those that another of them waits for anyway."""
    needed = [need for need in STAGES[stage].needs if need in running]
    implied = before(needed, through=running)
    return tuple(need for need in needed if need not in implied)
