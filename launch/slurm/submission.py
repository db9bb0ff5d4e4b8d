"""The planned stages as a chain of Slurm jobs, through submitit."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.plan import Job
from launch.worker import RunStage
from pipeline.config.loading import config_hash, save_config
from pipeline.config.tree import Config
from pipeline.errors import UserError
from pipeline.files import write_json
from pipeline.stages import REPOSITORY

if TYPE_CHECKING:
    from submitit.slurm.slurm import SlurmExecutor

SIGNAL = "TERM@120"
"""Two minutes before the time limit the stage is told to save and end."""
CHAIN = Path("launch") / "chain.json"
LOGS = Path("logs") / "slurm"


@dataclass(frozen=True)
class Submitted:
    """A job that Slurm accepted."""

    name: str
    stage: str
    id: str
    dependencies: tuple[str, ...]
    script: str
    stdout: str
    stderr: str


def frozen_config(config: Config) -> Path:
    """Where the jobs find the configuration as it was at submission: its file may be edited before they start."""
    return config.folder.absolute() / "launch" / f"config-{config_hash(config)[:12]}.yaml"


def scripts(config: Config, jobs: list[Job]) -> list[tuple[Job, str]]:
    """The text that sbatch would get for each job that has something to do. Needs no Slurm."""
    ids = {job.stage: f"ID_OF_{job.stage}" for job in jobs}
    rendered = []
    for job in jobs:
        if job.to_run:
            executor = _executor(config, job, ids)
            rendered.append((job, executor._make_submission_file_text(executor._submitit_command_str, "dry-run")))
    return rendered


def submit(config: Config, jobs: list[Job]) -> list[Submitted]:
    """Submit what has something to do, each job after those it depends on, and record the chain.

    Raises:
        UserError: no sbatch here, or it refused a job; says which jobs are queued already.
    """
    if shutil.which("sbatch") is None:
        raise UserError("There is no sbatch on PATH, so nothing was submitted. Log in where Slurm is, use --cluster "
                        "local, or --dry-run to see what Slurm would get.")
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    save_config(config, frozen_config(config))
    ids: dict[str, str] = {}
    submitted: list[Submitted] = []
    for job in jobs:
        if not job.to_run:
            continue
        executor = _executor(config, job, ids)
        try:
            ticket = executor.submit(RunStage(job.command, job.environment, ranks=job.ranks > 0))
        except (FailedJobError, FailedSubmissionError, OSError) as error:
            queued = " ".join(entry.id for entry in submitted)
            raise UserError(f"Slurm did not take the job {job.name}: {str(error).strip()}. " + (
                f"The jobs before it are queued; `scancel {queued}` removes them." if queued else
                "Nothing is queued.")) from None
        ids[job.stage] = ticket.job_id
        submitted.append(Submitted(
            job.name, job.stage, ticket.job_id, tuple(ids[need] for need in job.dependencies),
            str(ticket.paths.submission_file), str(ticket.paths.stdout), str(ticket.paths.stderr)))
        _record(config, submitted)
    return submitted


def _record(config: Config, submitted: list[Submitted]) -> None:
    write_json(config.folder / CHAIN, {
        "submitted": datetime.now(UTC).isoformat(timespec="seconds"), "config": str(frozen_config(config)),
        "jobs": [asdict(entry) for entry in submitted]})


def _executor(config: Config, job: Job, ids: Mapping[str, str]) -> SlurmExecutor:
    """submitit's executor with everything that the job asks for."""
    from submitit.slurm.slurm import SlurmExecutor

    class Executor(SlurmExecutor):
        """Also made where there is no srun, to show what Slurm would get."""

        @classmethod
        def affinity(cls) -> int:
            return 2

    launch = config.launch
    executor = Executor(folder=config.folder.absolute() / LOGS)
    parameters: dict[str, Any] = {
        "job_name": job.name, "nodes": job.nodes, "ntasks_per_node": job.tasks_per_node,
        "cpus_per_task": job.cpus_per_task, "time": job.time_minutes, "partition": launch.partition,
        "account": launch.account, "gpus_per_node": job.gpus_per_node or None,
        "mem": f"{job.memory_gb}GB" if job.memory_gb else None,
        "setup": [*launch.setup, f"export PYTHONPATH={shlex.quote(str(REPOSITORY))}${{PYTHONPATH:+:$PYTHONPATH}}",
                  "export PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1"],
        # srun does not inherit cpus-per-task since Slurm 22.05, and leaves the others running when a rank fails.
        "srun_args": [f"--cpus-per-task={job.cpus_per_task}", "--kill-on-bad-exit=1"],
        "additional_parameters": {"chdir": str(Path.cwd()), "signal": SIGNAL},
    }
    if job.dependencies:
        parameters["dependency"] = "afterok:" + ":".join(ids[need] for need in job.dependencies)
        parameters["additional_parameters"]["kill-on-invalid-dep"] = "yes"
    executor.update_parameters(**{key: value for key, value in parameters.items() if value is not None})
    return executor
