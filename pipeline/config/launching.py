"""Settings of the machines that stages run on. None of them changes what is computed."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from drover.pipeline.config.section import Section


def minutes(time: int | str) -> int:
    """A time limit in minutes, rounded up, from any of Slurm's notations: minutes, minutes:seconds,
    hours:minutes:seconds, days-hours, days-hours:minutes, days-hours:minutes:seconds.

    Raises:
        ValueError: it is none of them.
    """
    text = str(time).strip()
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", text):
        raise ValueError(f"{time!r} is no time limit: write minutes, HH:MM:SS or D-HH:MM:SS")
    days, dash, rest = text.rpartition("-")
    units = (3600, 60, 1) if dash or rest.count(":") == 2 else (60, 1)
    seconds = int(days or 0) * 86400 + sum(int(part) * unit for part, unit in zip(rest.split(":"), units, strict=False))
    if not seconds:
        raise ValueError(f"{time!r} is no time at all")
    return math.ceil(seconds / 60)


def _time(value: int | str) -> int | str:
    minutes(value)
    return value


Time = Annotated[int | str, AfterValidator(_time)]
"""A time limit in any of Slurm's notations."""


class Resources(Section):
    """What jobs ask of Slurm. Of a stage, null means what `launch` says for all; there, the site's default."""

    partition: str | None = None
    """Slurm partition."""
    cpus: PositiveInt | None = None
    """CPU cores per rank; of a stage without ranks, per job."""
    mem: str | None = Field(None, pattern=r"^[0-9]+[KMGT]?$")
    """Memory per node as Slurm writes it: `64G`; `0` is all that the node has."""
    time: Time | None = None
    """Time limit of a job: minutes, or Slurm's HH:MM:SS and D-HH:MM:SS."""
    extra: dict[str, str | int | bool] | None = None
    """More sbatch options, without the dashes: `{licenses: scratch, exclusive: true}`; account, qos and constraint of
    this stage, and those that no setting decides. `{gres: "gpu:h100:8"}` names the type of the GPUs. false: without the
    option."""


class GpuResources(Resources):
    """What the jobs of a stage with ranks ask of Slurm."""

    gpus_per_node: NonNegativeInt | None = None
    """GPUs, and so ranks, per node."""


class ArrayResources(Resources):
    """What the jobs of a stage that can be cut into parts ask of Slurm."""

    array: PositiveInt | None = None
    """Parts to do as elements of a Slurm array, each on a node of its own if there are enough; one more job then
    finishes the stage. null: as many as train has nodes, at most 64; 1: no array."""
    at_once: PositiveInt | None = None
    """Elements that may run at the same time; null: all."""


class TrainResources(GpuResources):
    """What the jobs of train ask of Slurm."""

    nodes: PositiveInt = 1
    """Nodes."""
    links: PositiveInt = 1
    """Jobs to queue one after the other, for sites that let no job requeue itself: each goes on where the one before
    was stopped, and those that find training done end at once."""


class EvaluateResources(GpuResources):
    """What the jobs of evaluate ask of Slurm."""

    nodes: PositiveInt = 1
    """Nodes; every rank holds the whole model and does its share of the text and tasks."""
    every_checkpoints: PositiveInt | None = None
    """Convert and evaluate every so many checkpoints (of `train.checkpoint.every_steps`) beside training, in jobs of
    their own; a checkpoint that is owed a result is kept until it has one. null: the last one only."""


class Container(Section):
    """A container in which Slurm jobs run every stage. The batch script, the runner and srun stay outside."""

    image: str | None = None
    """Image: a file, or for podman and pyxis also a name in a registry. `python` is then the Python inside. null: no
    container."""
    runtime: Literal["apptainer", "podman", "pyxis"] = "apptainer"
    """What starts it; pyxis is an option of srun."""
    mounts: list[str] = []
    """Folders to mount, FOLDER or FOLDER:INSIDE. The run folder and the working directory are always mounted."""
    options: list[str] = []
    """More options of `apptainer exec`, `podman run`, or with pyxis of srun."""


class SiteLimits(Section):
    """What the site allows; null: not known here, Slurm will say. For cluster profiles."""

    nodes: PositiveInt | None = None
    """Nodes of one job."""
    time: Time | None = None
    """Longest time limit."""
    array: PositiveInt | None = None
    """Elements of one array (MaxArraySize)."""
    jobs: PositiveInt | None = None
    """Jobs of one user in the queue."""
    gpu_memory_gb: PositiveFloat | None = None
    """Memory of one GPU in GB: weights, gradients and moments of a rank must fit (`check_fit`)."""


HostName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:@%-]*$")]


class LaunchConfig(Resources):
    """Processes on one box or on hosts, and what is asked of Slurm, for all stages and for each."""

    processes: PositiveInt | None = None
    """Processes on one box: ranks of train and evaluate (never more than GPUs, where there are any), workers of
    shard, tokenizer and encode. null: one rank per GPU (1 without), a worker per core."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """What train and evaluate compute on. auto: CUDA's GPUs where there are any, else the CPU. mps: Apple's GPU, in
    one process and fp32; auto does not take it, since it has not been tried on a Mac."""
    cluster: str | None = None
    """Profile of a Slurm cluster: `lab` for configs/clusters/lab.yaml, or a file. It is laid under this section, and
    what is saved of a run holds its settings in place of its name."""
    hosts: list[HostName] = []
    """Machines without Slurm on which `--cluster hosts` runs the stages over ssh: names, addresses or `user@name`. They
    share a folder. `train.nodes` is then their number, unless it is set. Hosts beyond it replace others that fail."""
    min_hosts: PositiveInt | None = None
    """Training starts, and goes on after a loss, on as few hosts as this. null: it waits until `train.nodes` of them
    answer."""
    ssh: list[str] = Field(["ssh"], min_length=1)
    """The ssh command and its options: `[ssh, -p, "2222"]`."""
    gpus_per_node: NonNegativeInt = 0
    """GPUs (and ranks) per Slurm node or host; 0: CPU ranks, `processes` of them per node."""
    gpu_type: str | None = None
    """Type of the GPUs that stages with ranks ask for, as the site names it: `h100`; null: any."""
    account: str | None = None
    """Slurm account; null: the user's default."""
    qos: str | None = None
    """Quality of service; null: the site's default."""
    constraint: str | None = None
    """Features that the nodes must have. A stage's own account, qos or constraint stands in its `extra`."""
    exclude: str | None = None
    """Nodes to leave out, in Slurm's notation, besides those that failed twice."""
    cpus: PositiveInt = 4
    """CPU cores per rank, and of a stage without ranks (which gets more if `processes` is more)."""
    time: Time = 240
    """Time limit of a job: minutes, or Slurm's HH:MM:SS and D-HH:MM:SS."""
    extra: dict[str, str | int | bool] = {}
    """More sbatch options that no setting decides, without the dashes; `true` for one without a value
    (`exclusive: true`)."""
    setup: list[str] = []
    """Shell lines that a job runs first: modules, the virtual environment."""
    environment: dict[str, str] = {}
    """Environment variables of the jobs, such as NCCL's. Written to files: no secrets here."""
    secrets: list[str] = []
    """Names of environment variables that the jobs need from yours (`[HF_TOKEN]`). Their values go from your shell to
    Slurm and are written nowhere; a missing one is refused."""
    not_secrets: list[str] = []
    """Names of variables in `environment` or in commands that look like those of secrets and are none."""
    python: str | None = None
    """Python of the jobs, as it is called inside a container where `wrap` starts one; null: the one that submits."""
    runner_python: str | None = None
    """Python of what runs outside of a container: the runner, which starts the stages, and what makes each process a
    rank. null: `python`; with `wrap`, the one that submits."""
    container: Container = Field({}, validate_default=True)
    """The container of Slurm jobs."""
    wrap: list[str] = []
    """A command that every stage is started with, such as a site's own container program; see also `container`."""
    srun_args: list[str] = []
    """More options of srun, with which the job starts its ranks: `[--mpi=none, --gpu-bind=none]`."""
    requeue: bool = True
    """Whether a job that ran into its time limit, was preempted or lost a node may be queued again under its own id.
    false where the site forbids it; then `train.links` goes on."""
    signal_s: int = Field(120, ge=60)
    """Seconds before the time limit at which training is told to save and leave: at least a step and a save. Slurm may
    be a minute early."""
    max_restarts: NonNegativeInt = 3
    """Restarts in a row without a new checkpoint after which a stage stops for good."""
    trusted_group: str | None = None
    """A group that may write the run folder, though jobs execute what is there, and whose members may own parts of it.
    null: nobody but you (and a group of your own name with nobody else in it)."""
    check_owners: bool = True
    """Whether jobs look, at every start, at the owners and modes of what they execute from the run folder. false where
    the file system does not show true ones; the content is compared in any case."""
    preflight: bool = True
    """Try every node (devices, memory, disk, network, clock) before training: 180 s at most, one more for every two
    nodes, half an hour in all. A rank four times slower than the median makes its node a bad one."""
    health_check: list[str] = []
    """A site's own test of a node: a command that the preflight runs on each. Where it fails, its last line is the
    reason and the node is left out."""
    limits: SiteLimits = Field({}, validate_default=True)
    """What the site allows."""
    check_fit: bool = True
    """Refuse, before anything starts, training whose weights, gradients and moments alone are more than the memory, and
    a run that may write more than is free on the disk. false: start it all the same."""
    shard: ArrayResources = Field({}, validate_default=True)
    """Jobs of shard."""
    tokenizer: Resources = Field({}, validate_default=True)
    """The job of tokenizer."""
    encode: ArrayResources = Field({}, validate_default=True)
    """Jobs of encode."""
    train: TrainResources = Field({}, validate_default=True)
    """Jobs of train."""
    convert: Resources = Field({}, validate_default=True)
    """The job of convert."""
    evaluate: EvaluateResources = Field({}, validate_default=True)
    """Jobs of evaluate."""
    report: Resources = Field({}, validate_default=True)
    """The job of report."""

    @model_validator(mode="before")
    @classmethod
    def _on_all_hosts(cls, given: Any) -> Any:
        """Training takes all hosts unless a number is given."""
        hosts, train = (given.get(name) for name in ("hosts", "train")) if isinstance(given, dict) else (None, None)
        if isinstance(hosts, list) and hosts and isinstance(train or {}, dict) and "nodes" not in (train or {}):
            return {**given, "train": {**(train or {}), "nodes": len(hosts)}}
        return given

    def of(self, stage: str) -> Resources:
        """What the jobs of a stage ask for; nothing of its own for one that a plugin adds."""
        own: Resources = getattr(self, stage, None) or Resources()
        return own
