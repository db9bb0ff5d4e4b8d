"""What would be started for a request: pure, from the configuration and the run folder's state to a list of jobs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from drover.launch.job.host import JobSpec
from drover.pipeline.config.kinds import plugin_folders
from drover.pipeline.config.launching import ArrayResources, Container, LaunchConfig, Resources
from drover.pipeline.config.tree import Config
from drover.pipeline.contract.manifest import State
from drover.pipeline.contract.run import Run
from drover.pipeline.contract.stages import IMPORTED_FROM, STAGES, WATCH, before
from drover.pipeline.records.checkpoint_scores import unscored

MOST_ELEMENTS = 64
"""The most elements of a stage's array by default."""


@dataclass(frozen=True)
class Machine:
    """What this machine has: cores this process may use, GPUs it can see."""

    cores: int
    gpus: int = 0


@dataclass(frozen=True)
class Options:
    """The request, apart from the stages.

    config_path, overrides: as the user gave them.
    machine: only a local run is fitted to it.
    frozen: the configuration that jobs on Slurm are given in place of the user's file and overrides.
    chain: id of the submission, or of the command on this machine; what is forced is forced once for it.
    code: where the jobs' code is. code_files: the files to write there, with their content.
    exclude: nodes that failed, which jobs on Slurm leave out besides those that the configuration names.
    """

    cluster: Literal["local", "slurm"]
    config_path: str
    overrides: tuple[str, ...] = ()
    force: bool = False
    accept_changes: bool = False
    machine: Machine = Machine(1)
    frozen: str = ""
    chain: str = ""
    code: str = str(IMPORTED_FROM)
    code_files: Mapping[str, bytes] = field(default_factory=dict)
    exclude: tuple[str, ...] = ()


OPTIONS = ("account", "qos", "constraint")
"""Settings that are options of sbatch under the same names. A single stage sets them in its `extra`."""


def resources_of(launch: LaunchConfig, stage: str) -> Resources:
    """What the jobs of one stage request from Slurm: its own settings over those for all stages. None: the site's
    default."""
    own = launch.of(stage)
    general = {name: value for name, value in vars(launch).items() if getattr(own, name, "") is None}
    options = {name: value for name in OPTIONS if (value := getattr(launch, name)) is not None}
    return own.model_copy(update={**general, "extra": {**options, **launch.extra, **(own.extra or {})}})


@dataclass(frozen=True, kw_only=True)
class Job(JobSpec):
    """One stage to be run, or found done.

    state: the state of the stage's folder now. `forced`: it is rebuilt whatever its state.
    resources: partition, memory and the like, for Slurm; minutes: the time limit.
    elements: indices of an array's elements, which share the stage's tasks.
    dependencies: stages whose planned jobs must end well before; those implied by others are left out.
    contained: a container starts the stage.
    """

    state: State
    forced: bool = False
    processes: int = 1
    resources: Resources = field(default_factory=Resources)
    minutes: int = 0
    elements: tuple[int, ...] = ()
    dependencies: tuple[str, ...] = ()
    contained: bool = False

    @property
    def own_python(self) -> bool:
        """Whether the stage runs with this process's Python, and so finds the packages that this one sees."""
        return Path(self.command[0]).absolute().parent == Path(sys.executable).parent and not self.contained

    @property
    def all_nodes(self) -> int:
        """Nodes that the job requests, the spare ones included."""
        return self.nodes + self.spare_nodes

    @property
    def to_run(self) -> bool:
        """Whether there is anything to do."""
        return self.forced or self.state.kind != "done"


def plan(config: Config, run: Run, stages: list[str], options: Options) -> list[Job]:
    """The jobs for `stages`, in their order. Reads the run folder, starts and writes nothing."""
    slurm = options.cluster == "slurm"
    force = ("--force-id", options.chain) if options.force else ()
    file, *words = (options.frozen,) if options.frozen else (options.config_path, *options.overrides)
    jobs = list[Job]()
    running = list[str]()
    for stage in stages:
        state = run.state(stage)
        needed = [need for need in STAGES[stage].needs if need in running]
        nearest = [need for need in needed if need not in before(needed, through=running)]
        if state.kind in ("done", "absent") and nearest and not options.force:
            state = State("absent")
        job = Job(
            state=state, forced=options.force, dependencies=tuple(nearest),
            chain=options.chain, run=str(config.folder.absolute()), code=options.code, name=f"{config.name}-{stage}",
            stage=stage,
            command=((slurm and config.launch.python) or sys.executable, "-m", STAGES[stage].module, "--config", file,
                     *force, *["--accept-changes"] * options.accept_changes, *words))
        if job.to_run:
            running.append(stage)
        jobs.append(_on_slurm(job, config, options) if slurm else _on_this_machine(job, config, options.machine))
        if stage == "train" and slurm and config.evaluate.every and (job.to_run or unscored(run)):
            # It scores checkpoints, with what the stage evaluate requests.
            watch = replace(job, state=State("absent"), stage="evaluate", name=f"{config.name}-{WATCH}",
                            dependencies=("train",) * job.to_run, command=(
                                job.command[0], "-m", "drover.pipeline.watch", job.run, "--watch", "--config", file))
            jobs.append(replace(_on_slurm(watch, config, options), stage=WATCH))
    return jobs


def local_ranks(config: Config, machine: Machine) -> int:
    """Ranks of train and evaluate on this machine: one per GPU; `launch.processes` of them without GPUs."""
    wanted = config.launch.processes
    return min(wanted or machine.gpus, machine.gpus) if machine.gpus else wanted or 1


def _on_this_machine(job: Job, config: Config, machine: Machine) -> Job:
    """The job, fitted to this machine."""
    if STAGES[job.stage].workers:
        job = replace(job, processes=config.launch.processes or machine.cores)
    if not STAGES[job.stage].ranks:
        return job
    ranks = local_ranks(config, machine)
    threads = max(1, machine.cores // ranks)
    return replace(job, ranks=ranks, tasks_per_node=ranks, cpus_per_task=threads,
                   environment={"OMP_NUM_THREADS": str(threads)})


def _on_slurm(job: Job, config: Config, options: Options) -> Job:
    """The job, with what it requests from Slurm; perhaps an array."""
    launch = config.launch
    spec = STAGES[job.stage]
    resources = resources_of(launch, job.stage)
    if exclude := ",".join(filter(None, (launch.exclude, *options.exclude))):
        resources = resources.model_copy(update={"extra": {**(resources.extra or {}), "exclude": exclude}})
    nodes = tasks = 1
    gpus = 0
    threads = resources.cpus or 1
    environment = {**launch.environment}
    if spec.ranks:
        nodes = getattr(resources, "nodes", 1)
        gpus = getattr(resources, "gpus_per_node", launch.gpus_per_node)
        tasks = gpus or launch.processes or 1
        environment.setdefault("OMP_NUM_THREADS", str(threads))
    elif spec.workers:
        threads = max(threads, launch.processes or 0)
    wrap, srun_args = in_container(launch.container, [config.folder.absolute(), Path.cwd()], gpus,
                                   ["PYTHONPATH", *environment])
    contained = bool(wrap or srun_args or launch.wrap)
    if contained:  # else the job's script sets it, and keeps what launch.setup adds
        environment["PYTHONPATH"] = code_path(options.code)
    job = replace(
        job, resources=resources, minutes=resources.time or 0, environment=environment,
        ranks=nodes * tasks if spec.ranks else 0, processes=(launch.processes or threads) if spec.workers else 1,
        nodes=nodes, tasks_per_node=tasks, cpus_per_task=threads, gpus_per_node=gpus,
        wrap=(*wrap, *launch.wrap), srun_args=(*srun_args, *launch.srun_args), contained=contained,
        health_check=tuple(launch.health_check), requeue=launch.requeue, signal_s=launch.signal_s,
        max_restarts=launch.max_restarts, check_owners=launch.check_owners)
    if job.stage == "train":
        job = replace(job, spare_nodes=launch.train.spare_nodes, preflight=launch.preflight)
    if job.to_run and isinstance(resources, ArrayResources):
        count = resources.array or min(launch.train.nodes, MOST_ELEMENTS)
        job = replace(job, elements=tuple(range(count)) if count > 1 else ())
    return job


def in_container(container: Container, folders: list[Path], gpus: int, variables: Iterable[str] = ()
                 ) -> tuple[list[str], list[str]]:
    """How a container starts a stage: a command to put before the stage's, and options of srun.

    variables: of the job, which hold in the container whatever the image says.
    """
    if container.image is None:
        return [], []
    work = str(folders[-1])
    mounts = [place if ":" in place else f"{place}:{place}"
              for place in dict.fromkeys([*map(str, folders), *container.mounts])]
    if container.runtime == "pyxis":
        return [], [f"--container-image={container.image}", f"--container-mounts={','.join(mounts)}",
                    f"--container-workdir={work}", f"--container-env={','.join(variables)}", *container.options]
    if container.runtime == "podman":
        # Without root, the container stays in the step's control group: it ends with the step, and sees only the step's
        # GPUs. GPUs of a node reach each other's memory only with --pid=host. podman refuses that together with
        # --cgroups=disabled.
        command = ["podman", "--cgroup-manager=cgroupfs", "run", "--rm", "--env-host", "--network=host", "--ipc=host",
                   "--pid=host", "--cgroups=no-conmon", *(f"--env={name}" for name in variables),
                   *["--device=nvidia.com/gpu=all"] * bool(gpus), *(f"--volume={mount}" for mount in mounts),
                   f"--workdir={work}"]
    else:
        command = ["apptainer", "exec", *["--nv"] * bool(gpus), *(f"--bind={mount}" for mount in mounts),
                   f"--pwd={work}"]
    return [*command, *container.options, container.image], []


def code_path(code: str) -> str:
    """PYTHONPATH of a stage: the code, and the plugins that this process has imported."""
    return os.pathsep.join([code, *plugin_folders()])


def process_environment() -> dict[str, str]:
    """Environment of a process of this machine that imports what this one has imported, nothing from the folder it runs
    in, and does not buffer its output."""
    path = os.pathsep.join(filter(None, [code_path(str(IMPORTED_FROM)), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
