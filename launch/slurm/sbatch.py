"""Writes the jobs' scripts, and submits them through submitit."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from drover.launch.plan import Job
from drover.launch.slurm.chain import Chain, ChainJob, token
from drover.launch.slurm.options import directives, gpus_asked, options_of, outer_python, preamble
from drover.launch.slurm.scheduler import Scheduler, literal, of_another_job
from drover.launch.slurm.wait_reasons import refusal
from drover.pipeline.config.loading import save_config
from drover.pipeline.config.plugins import plugin_files, plugin_folders
from drover.pipeline.config.tree import Config
from drover.pipeline.core.console import spelled
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import sha256_file, sha256_json

LOGS = Path("logs") / "slurm"
SPECS = Path("launch") / "jobs"
SBATCH_S = 60
"""Time limit of sbatch. It may have queued the job even so, which the token in the job's comment shows."""


def scripts(config: Config, jobs: list[Job]) -> list[tuple[Job, str]]:
    """The script of each job that has something to do. Needs no Slurm, writes nothing."""
    ids = {job.key: f"ID_OF_{job.key}" for job in jobs}
    return [(job, _script(config, job, ids)) for job in jobs if job.to_run]


def submit(config: Config, jobs: list[Job], chain: Chain) -> list[ChainJob]:
    """Submit the jobs that have something to do, each after its dependencies, and record each in the chain.

    Raises:
        UserError: sbatch refused a job. The error names the jobs that are queued already.
    """
    frozen, run = Path(chain.config), config.folder.absolute()
    save_config(config, frozen)
    # Besides the code these decide what a job does: configuration, plugins, and the modules in the plugins' folders.
    files = {str(path): sha256_file(path) for path in (frozen, *plugin_files())}
    chain.write(run)
    submitted: dict[str, ChainJob] = {}
    for job in jobs:
        if not job.to_run:
            continue
        try:
            with uninterrupted():  # so that every job that Slurm has is recorded
                submitted[job.key] = submit_job(config, replace(job, files=files),
                                                {key: entry.id for key, entry in submitted.items()})
                chain = replace(chain, jobs=tuple(submitted.values()))
                chain.write(run)
        except (UserError, OSError, KeyboardInterrupt) as error:
            queued = " ".join(entry.id for entry in submitted.values())
            why = "Interrupted." if isinstance(error, KeyboardInterrupt) else str(error)
            with suppress(OSError, UserError):  # the refusal itself is what the user must see
                replace(chain, refused=why).write(run)
            raise UserError(f"{why} " + (
                f"The jobs before it are queued; `drover cancel {run}` removes them "
                f"({queued})." if queued else "Nothing else is queued.")) from None
    return [*submitted.values()]


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def submit_job(config: Config, job: Job, ids: Mapping[str, str]) -> ChainJob:
    """Submit one job.

    ids: of the jobs that it depends on, by their keys.

    Raises:
        UserError: Slurm did not accept it.
    """
    from submitit.core.utils import FailedJobError, FailedSubmissionError
    from submitit.slurm.slurm import SlurmExecutor

    class Executor(SlurmExecutor):
        """Submits the job's script instead of a pickled function, and limits the time of sbatch."""

        @classmethod
        def affinity(cls) -> int:
            return 2  # without it, submitit asks for srun here, on the login node

        def _make_submission_file_text(self, command: str, uid: str) -> str:
            return _script(config, job, ids)

        def _make_submission_command(self, submission_file_path: Path) -> list[str]:
            # sbatch would read options from SBATCH_*, and jobs the variables of an allocation or another job.
            return ["env", *(f"--unset={name}" for name in of_another_job(os.environ)), "timeout", "--kill-after=5",
                    str(SBATCH_S), *super()._make_submission_command(submission_file_path)]

    run, spec = config.folder.absolute(), _spec_path(config, job)
    job.save(spec)
    (run / LOGS).mkdir(parents=True, exist_ok=True)
    try:
        # Not `submit`, which would pickle a function: the job's script names its program.
        number = Executor(run / LOGS)._submit_command("").job_id
    except (FailedJobError, FailedSubmissionError, OSError) as error:
        mine = Scheduler().mine()
        queued = [found.id for found in mine or () if found.comment.split(" ")[0] == token(job.chain, job.key)]
        if not queued:
            why, advice = refusal(str(error).strip() or f"sbatch did not answer within {SBATCH_S} s",
                                  "to run without Slurm, on this machine, use --cluster local")
            if mine is None:
                why += f"; squeue does not answer, so the job may be queued: `drover cancel {config.folder}` finds it"
            raise UserError(f"Slurm did not accept the job {job.name}: {why}. What to do: {advice}.") from None
        number = queued[0]  # its answer was lost
    log = run / LOGS / f"{number}{'_%a' if job.elements else ''}.log"
    return ChainJob(job.name, job.stage, job.kind, number, job.elements or None,
                    tuple(ids[need] for need in job.dependencies), str(log), str(spec), job.phase, job.parts)


def _spec_path(config: Config, job: Job) -> Path:
    return config.folder.absolute() / SPECS / f"{job.chain}-{job.key}.json"


def _script(config: Config, job: Job, ids: Mapping[str, str]) -> str:
    """The job's script. It starts the runner once, on the first node; the runner starts the ranks with srun."""
    launch, extra = config.launch, options_of(job)
    waits = [f"afterok:{':'.join(ids[need] for need in job.dependencies)}"] if job.dependencies else []
    waits += [f"afterany:{ids[job.follows]}"] if job.follows else []
    waits += ["singleton"] if job.stage == "train" else []  # two jobs of one run never train at once
    waits += [str(extra["dependency"])] if "dependency" in extra else []
    at_once = getattr(job.asked, "at_once", None)
    # Singleton goes by the name of the job alone: a run of this name in another folder must not be waited for.
    own = f"-{sha256_json(str(config.folder.resolve()))[:6]}" if job.stage == "train" else ""
    kind = f"{launch.gpu_type}:" if launch.gpu_type else ""
    gpus = f"{kind}{job.gpus_per_node}" if job.gpus_per_node and launch.request_gpus else None
    options = {
        **extra, "mem": job.asked.mem, "partition": job.asked.partition,
        "array": job.elements and spelled(job.elements).replace(" ", "") + (f"%{at_once}" if at_once else ""),
        "chdir": Path.cwd(), "comment": f"{token(job.chain, job.key)} {extra.get('comment', '')}".rstrip(),
        "cpus-per-task": job.cpus_per_task, "dependency": ",".join(waits),
        "gpus-per-node": extra.get("gpus-per-node") if gpus_asked(job) else gpus,
        "job-name": job.name + own,
        "kill-on-invalid-dep": "yes" if job.dependencies else None, "nodes": job.all_nodes,
        "ntasks-per-node": job.tasks_per_node, "open-mode": "append",
        "output": literal(config.folder.absolute() / LOGS) + ("/%A_%a.log" if job.elements else "/%j.log"),
        # The limits of the shell that submits are the login node's (CPU seconds, locked memory). Jobs get their node's.
        "propagate": extra.get("propagate", "NONE"),
        "requeue" if launch.requeue else "no-requeue": True, "signal": f"USR2@{launch.signal_s}", "time": job.minutes}
    path = ":".join(shlex.quote(folder) for folder in (job.code, *plugin_folders()))
    python = outer_python(launch, job.contained)  # of the runner, and of the ranks until each becomes its stage
    return "\n".join([
        "#!/bin/bash", "",
        *directives(dict(sorted(options.items()))), "",
        *preamble(launch),
        f"export PYTHONPATH={path}${{PYTHONPATH:+:$PYTHONPATH}} PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1", "",
        # `exec`: on scancel it gets the signal, and waits for the runner to clean up.
        f"exec {python} -m drover.launch.job {shlex.quote(str(_spec_path(config, job)))}", ""])
