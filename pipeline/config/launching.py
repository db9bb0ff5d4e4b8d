"""Settings of the machines that stages run on. None of them changes what is computed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt

from drover.pipeline.config.section import LocalPath, Location, Section, in_form, nested
from drover.pipeline.core.console import minutes


def _joined(value: Any) -> Any:
    """A list as Slurm writes it: n1,n2. Names may be numbers."""
    return ",".join(map(str, value)) if isinstance(value, list) and {*map(type, value)} <= {str, int} else value


Time = Annotated[int, BeforeValidator(minutes)]
"""A time limit in minutes, written in any of Slurm's notations."""
Names = Annotated[str, BeforeValidator(_joined)]
"""Names with commas between them, or a list of names."""
Memory = Annotated[str, BeforeValidator(str), in_form(
    "[0-9]+([KMGTkmgt][Bb]?)?", "a number of megabytes, or a number with K, M, G or T, as in 64G")]
"""An amount of memory in Slurm's notation."""
VariableName = Annotated[str, in_form("[A-Za-z_][A-Za-z0-9_]*", "letters, digits and _, and begin with no digit")]
"""Name of an environment variable that every shell can export."""


class Resources(Section):
    """What jobs request from Slurm. null in a stage's section means the value of `launch`; null in `launch` means the
    site's default."""

    partition: Names | None = None
    """Slurm partition, or several: the job runs in the one that starts it first."""
    cpus: PositiveInt | None = None
    """CPU cores per rank; for a stage without ranks, per job."""
    mem: Memory | None = None
    """Memory per node: megabytes, or a number with K, M, G or T: `64G`; `0` requests all memory of the node."""
    time: Time | None = None
    """Time limit of a job: minutes, or Slurm's HH:MM:SS and D-HH:MM:SS."""
    extra: dict[str, Names | int | bool] | None = None
    """More sbatch options, without the dashes: `{licenses: scratch, exclusive: true}`. Give a stage's own account, qos
    or constraint here, and options that have no setting. `{gres: "gpu:h100:8"}` names the GPU type. false removes an
    option."""


class GpuResources(Resources):
    """What the jobs of a stage with ranks request from Slurm."""

    gpus_per_node: NonNegativeInt | None = None
    """GPUs per node, with one rank each."""


class ArrayResources(Resources):
    """What the jobs of a stage that can be divided request from Slurm."""

    array: PositiveInt | None = None
    """Elements of the Slurm array that share the stage's work, each on its own node if there are enough. null: as many
    as train has nodes, at most 64. 1: no array."""
    at_once: PositiveInt | None = None
    """Elements that may run at the same time; null: all."""


class TrainResources(GpuResources):
    """What the jobs of train request from Slurm."""

    nodes: PositiveInt = 1
    """Number of nodes."""
    spare_nodes: NonNegativeInt = 0
    """Nodes that the Slurm job requests beyond `nodes`. They replace nodes that fail the preflight or hang twice,
    without the queue."""


class EvaluateResources(GpuResources):
    """What the jobs of evaluate request from Slurm."""

    nodes: PositiveInt = 1
    """Number of nodes. Every rank evaluates its share of the text and tasks, and holds all weights, unless
    they are sharded (`evaluate.dp_shard`)."""


class ReportResources(Resources):
    """What the job of report requests from Slurm: little, whatever the others need."""

    cpus: PositiveInt | None = 1
    """CPU cores."""
    time: Time | None = 30
    """Time limit of the job: minutes, or Slurm's HH:MM:SS and D-HH:MM:SS."""


class Container(Section):
    """A container in which Slurm jobs run every stage. The batch script, the runner and srun run outside of it."""

    image: Location | None = None
    """Image: a file, or for podman and pyxis also a name in a registry; null: no container. `launch.python` is then the
    Python inside."""
    runtime: Literal["apptainer", "podman", "pyxis"] = "apptainer"
    """Program that starts the container. pyxis is an option of srun."""
    mounts: list[LocalPath] = []
    """Folders to mount, as FOLDER or FOLDER:INSIDE. The run folder and the working directory are always mounted."""
    options: list[str] = []
    """More options of `apptainer exec`, of `podman run` or, with pyxis, of srun."""


class LaunchConfig(Resources):
    """Processes on one machine, and what all stages and each of them request from Slurm."""

    processes: PositiveInt | None = None
    """Processes on one machine: ranks of train and evaluate, workers of shard, tokenizer and encode. On GPUs there are
    never more ranks than GPUs. null: one rank per GPU (1 without GPUs), one worker per core."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of train and evaluate. `auto`: CUDA GPUs if there are any, else the CPU."""
    cluster: str | None = None
    """Profile of a Slurm cluster: `mine` for configs/clusters/mine.yaml, or a file. Settings of this section override
    it. A run's saved configuration holds the profile's settings instead of its name."""
    gpus_per_node: NonNegativeInt = 0
    """GPUs per Slurm node, with one rank each; 0: CPU ranks, `processes` of them per node."""
    request_gpus: bool = True
    """Request the GPUs of `gpus_per_node` from Slurm. false: for sites that give whole nodes and do not count GPUs
    (`sinfo -o %G` shows `(null)`)."""
    gpu_type: str | None = None
    """Type of GPU that stages with ranks request, in the site's spelling, for example `h100`; null: any."""
    account: str | None = None
    """Slurm account; null: your default account."""
    qos: str | None = None
    """Slurm's quality of service; null: the site's default."""
    constraint: str | None = None
    """Features that the nodes must have. For one stage's account, qos or constraint use its `extra`."""
    exclude: Names | None = None
    """Nodes to exclude, as a list or in Slurm's notation (`n[3-5]`), in addition to those that failed twice."""
    cpus: PositiveInt = 4
    """CPU cores per rank, and of a stage without ranks. Such a stage gets more if `processes` is larger."""
    time: Time = 240
    """Time limit of a job: minutes, or Slurm's HH:MM:SS and D-HH:MM:SS."""
    extra: dict[str, Names | int | bool] = {}
    """More sbatch options that have no setting, without the dashes. Write `true` for one without a value (`exclusive:
    true`)."""
    setup: list[str] = []
    """Shell lines that a job runs first, for example to load modules or activate the virtual environment. If one fails,
    the job ends and its log names the line. End a line that may fail with `|| true`."""
    environment: dict[VariableName, str] = {}
    """Environment variables of the jobs, for example NCCL's. They are written to files, so put no secrets here."""
    secrets: list[str] = []
    """Names of environment variables that the jobs need from your shell (`[HF_TOKEN]`). Slurm passes their values on;
    Drover writes them nowhere. A missing one is refused."""
    not_secrets: list[str] = []
    """Names of variables in `environment` that look like secrets and are none."""
    python: LocalPath | None = None
    """Python of the jobs; null: the one that submits. If `wrap` starts a container, give the Python inside."""
    runner_python: LocalPath | None = None
    """Python outside of a container, with submitit. It runs the runner, which starts the stages, and the program that
    makes each process a rank. null: `python`; with `container` or `wrap`, the one that submits."""
    container: Container = nested()
    """Container of the Slurm jobs."""
    wrap: list[str] = []
    """Command that starts every stage, such as a site's own container program. See also `container`."""
    srun_args: list[str] = []
    """More options of srun, which starts the ranks: `[--mpi=none, --gpu-bind=none]`."""
    requeue: bool = True
    """Requeue a job under its own id after its time limit, a preemption or a lost node. false: for sites that forbid
    it; the same command then continues the run."""
    signal_s: int = Field(120, ge=60)
    """Seconds before the time limit at which training receives the signal to save and exit. Allow for three
    steps and a save. Slurm may send it a minute early."""
    max_restarts: NonNegativeInt = 3
    """Most restarts in a row without a new checkpoint. The stage then stops for good."""
    check_owners: bool = True
    """Refuse to submit and to start a job if another user owns or may write what it executes (the run folder, plugins)
    or a folder above. false: for a file system without true owners and modes, or if you trust all who may write there.
    """
    preflight: bool = True
    """Test every node (devices, memory, disk, network) before training. It takes at most 180 s, one more for
    every two nodes, and half an hour in all."""
    health_check: list[str] = []
    """A site's own test of a node: a command that the preflight runs on each. If it fails, the node has failed the
    preflight, and its last line of output is the reason."""
    shard: ArrayResources = nested()
    """Jobs of shard."""
    tokenizer: Resources = nested()
    """The job of tokenizer."""
    encode: ArrayResources = nested()
    """Jobs of encode."""
    train: TrainResources = nested()
    """Jobs of train."""
    convert: Resources = nested()
    """The job of convert."""
    evaluate: EvaluateResources = nested()
    """Jobs of evaluate."""
    report: ReportResources = nested()
    """The job of report."""

    def of(self, stage: str) -> Resources:
        """What the jobs of a stage ask for; nothing of its own for one that a plugin adds."""
        return getattr(self, stage, None) or Resources()
