"""Submits jobs through submitit: the parameters of its executor, and the task that a job runs."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from drover.launch.plan import OPTIONS, Job
from drover.launch.slurm.chain import Chain, ChainJob, token
from drover.launch.slurm.options import gpus_asked, options_of, outer_python, preamble
from drover.launch.slurm.scheduler import OWN, Scheduler, literal, of_another_job
from drover.launch.slurm.wait_reasons import refusal
from drover.pipeline.config.loading import save_config
from drover.pipeline.config.plugins import plugin_files, plugin_folders
from drover.pipeline.config.tree import Config
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import sha256_file, sha256_json

if TYPE_CHECKING:
    from drover.launch.job.task import StageTask

FOLDER = Path("launch") / "submitit"
"""Submitit's folder in the run: scripts, pickles, results, and the logs of the jobs themselves."""
SPECS = Path("launch") / "jobs"
SBATCH_S = 60
"""Time limit of sbatch. It may have queued the job even so, which the token in the job's comment shows."""
MOST_TIMEOUTS = 1_000_000
"""Time limits after which submitit still queues a job again: the runner decides that."""


def submit(config: Config, jobs: list[Job], chain: Chain) -> list[ChainJob]:
    """Submit the jobs that have something to do, each after its dependencies, and record each in the chain.

    Raises:
        UserError: sbatch refused a job. The error names the jobs that are queued already.
    """
    frozen = Path(chain.config)
    run = config.folder.absolute()
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


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in the block once the time is up."""
    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"sbatch did not answer within {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def submit_job(config: Config, job: Job, ids: Mapping[str, str]) -> ChainJob:
    """Submit one job: `submit` of submitit's executor, or for an array its `map_array`.

    ids: of the jobs that it depends on, by their keys.

    Raises:
        UserError: Slurm did not accept it.
    """
    from submitit import SlurmExecutor
    from submitit.core.utils import JobPaths
    from submitit.helpers import clean_env, environment_variables

    from drover.launch.job.task import StageTask

    folder = config.folder.absolute() / FOLDER
    spec = _spec_path(config, job)
    job.save(spec)
    # Who can write a pickle decides what the job does.
    folder.mkdir(mode=0o700 if config.launch.check_owners else 0o777, exist_ok=True)
    task = StageTask(str(spec))
    own = {name: os.environ[name] for name in OWN if name in os.environ}
    try:
        executor = SlurmExecutor(folder, MOST_TIMEOUTS, python=outer_python(config.launch, job.contained))
        executor.update_parameters(**parameters(config, job, ids))
        with clean_env(of_another_job(os.environ)), environment_variables(**own), time_limit(SBATCH_S):
            first = executor.map_array(task, job.elements)[0] if job.elements else executor.submit(task)
        number = first.job_id.partition("_")[0]
    except (RuntimeError, OSError) as error:
        mine = Scheduler().mine()
        queued = [known.id for known in mine or () if known.comment.split(" ")[0] == token(job.chain, job.key)]
        if not queued:
            said = str(error.__cause__ if isinstance(error.__cause__, TimeoutError) else error)
            why, advice = refusal(said, "to run without Slurm, on this machine, use --cluster local")
            if mine is None:
                why += f"; squeue does not answer, so the job may be queued: `drover cancel {config.folder}` finds it"
            raise UserError(f"Slurm did not accept the job {job.name}: {why}. What to do: {advice}.") from None
        number = queued[0]  # sbatch's answer was lost: its pickles have no names yet
        _store(task, job, folder, number)
    log = JobPaths(folder, f"{number}_%a" if job.elements else number).stdout
    return ChainJob(job.name, job.stage, job.kind, number, job.elements or None,
                    tuple(ids[need] for need in job.dependencies), str(log), str(spec))


def _store(task: StageTask, job: Job, folder: Path, number: str) -> None:
    """Store the task where a job looks for it, for each element of an array."""
    from submitit.core.utils import JobPaths
    from submitit.helpers import DelayedSubmission

    for element in job.elements or (None,):
        submission = DelayedSubmission(task, element)
        submission.set_timeout(job.minutes, MOST_TIMEOUTS)
        name = number if element is None else f"{number}_{element}"
        submission.dump(JobPaths(folder, name).submitted_pickle)


def _spec_path(config: Config, job: Job) -> Path:
    return config.folder.absolute() / SPECS / f"{job.chain}-{job.key}.json"


def parameters(config: Config, job: Job, ids: Mapping[str, str]) -> dict[str, Any]:
    """The parameters of submitit's SlurmExecutor for a job (docs/slurm.md has the table). Those without a value are
    left out, except `wckey`: submitit would set one.

    ids: of the jobs that it depends on, by their keys.
    """
    launch = config.launch
    extra = options_of(job)
    waits = [f"afterok:{':'.join(ids[need] for need in job.dependencies)}"] if job.dependencies else []
    waits += [f"afterany:{ids[job.follows]}"] if job.follows else []
    waits += ["singleton"] if job.stage == "train" else []  # two jobs of one run never train at once
    waits += [str(extra.pop("dependency"))] if "dependency" in extra else []
    # Singleton goes by the name of the job alone: a run of this name in another folder must not be waited for.
    own = f"-{sha256_json(str(config.folder.resolve()))[:6]}" if job.stage == "train" else ""
    kind = f"{launch.gpu_type}:" if launch.gpu_type else ""
    gpus = f"{kind}{job.gpus_per_node}" if job.gpus_per_node and launch.request_gpus and not gpus_asked(job) else None
    log = "%A_%a_0_log.out" if job.elements else "%j_0_log.out"
    # The runner starts the ranks itself, by srun, again and again in one job: submitit starts it without srun.
    named = {
        "job_name": job.name + own, "time": job.minutes, "nodes": job.all_nodes,
        "ntasks_per_node": job.tasks_per_node, "cpus_per_task": job.cpus_per_task, "gpus_per_node": gpus,
        "mem": job.asked.mem, "partition": job.asked.partition, "dependency": ",".join(waits),
        **{name: extra.pop(name, None) for name in (*OPTIONS, "exclude")},
        "comment": f"{token(job.chain, job.key)} {extra.pop('comment', '')}".rstrip(),
        "signal_delay_s": launch.signal_s,
        "array_parallelism": (getattr(job.asked, "at_once", None) or len(job.elements)) if job.elements else None,
        "use_srun": False, "stderr_to_stdout": True, "setup": _setup(config, job), "teardown": _teardown(config, job)}
    additional = {
        "chdir": str(Path.cwd()), "kill-on-invalid-dep": "yes" if job.dependencies else None,
        "output": f"{literal(config.folder.absolute() / FOLDER)}/{log}",
        # The limits of the shell that submits are the login node's (CPU seconds, locked memory). Jobs get their node's.
        "propagate": "NONE", "requeue" if launch.requeue else "no-requeue": True, **extra}
    return {**{name: value for name, value in named.items() if value not in (None, "")}, "wckey": None,
            "additional_parameters": {name: value for name, value in sorted(additional.items()) if value is not None}}


def _setup(config: Config, job: Job) -> list[str]:
    """Lines of the job's script before the runner."""
    path = ":".join(shlex.quote(folder) for folder in (job.code, *plugin_folders()))
    return [*preamble(config.launch),
            f"export PYTHONPATH={path}${{PYTHONPATH:+:$PYTHONPATH}} PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1",
            # On scancel the shell waits for the runner to clean up.
            "trap stopped=yes TERM INT; trap : USR1 USR2"]


def _teardown(config: Config, job: Job) -> list[str]:
    """Lines of the job's script after the runner: if something killed it, the job is queued again."""
    killed = (f"{outer_python(config.launch, job.contained)} -m drover.launch.job "
              f"{shlex.quote(str(_spec_path(config, job)))}")
    this = "${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}"
    again = (f"[ $status != 137 ] || [ ${{stopped:-}} ] || {{ {killed}; "
             f"for pause in 1 5 20 60 0; do scontrol requeue {this} && break; sleep $pause; done; }}")
    return ["status=$?", *[again] * config.launch.requeue, "exit $status"]
