"""The planned jobs to Slurm, through submitit: scripts to show, chains to submit, evaluations beside training."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.plan import Job
from launch.resources import Asked, asked_of
from launch.slurm import trust
from launch.slurm.chain import Chain, ChainJob, add_job, read_chain
from launch.slurm.job.rank import RunJob
from launch.slurm.jobspec import JobSpec
from launch.slurm.submit.options import lay_over, long_options
from pipeline.config.loading import config_hash, load_config, save_config
from pipeline.config.tree import Config
from pipeline.contract.stages import SNAPSHOT, STAGES
from pipeline.errors import UserError
from pipeline.files import read_json, sha256_file
from pipeline.records.pending_evaluations import evaluation_folder

if TYPE_CHECKING:
    from submitit.slurm.slurm import SlurmExecutor

LOGS = Path("logs") / "slurm"
SPECS = Path("launch") / "jobs"
KILLED = 128 + 9


@dataclass(frozen=True)
class Submission:
    """What all jobs of a chain have in common.

    code: folder of the snapshot. content: its hash. exclude: nodes that failed twice.
    """

    config: Config
    chain: str
    code: str
    exclude: tuple[str, ...] = ()
    content: str = ""

    @property
    def run(self) -> Path:
        """The run's folder."""
        return self.config.folder.absolute()


def frozen_config(config: Config) -> Path:
    """Where the jobs find the configuration as it was at submission: its file may be edited before they start."""
    return config.folder.absolute() / "launch" / f"config-{config_hash(config)[:12]}.yaml"


def scripts(submission: Submission, jobs: list[Job]) -> list[tuple[Job, str]]:
    """The text that sbatch would get for each job that has something to do. Needs no Slurm, writes nothing."""
    ids = {job.key: f"ID_OF_{job.key}" for job in jobs}
    rendered = []
    for job in jobs:
        if job.to_run:
            executor = _executor(submission, job, ids)
            text = executor._make_submission_file_text(executor._submitit_command_str, "dry-run")
            rendered.append((job, text))
    return rendered


def submit(submission: Submission, jobs: list[Job], before: Chain) -> list[ChainJob]:
    """Submit what has something to do, each job after those it depends on, and record the chain as it grows.

    before: the chain without jobs.

    Raises:
        UserError: sbatch refused a job; says which jobs are queued already.
    """
    save_config(submission.config, frozen_config(submission.config))
    before.write(submission.run)
    ids: dict[str, str] = {}
    submitted: list[ChainJob] = []
    for job in jobs:
        if not job.to_run:
            continue
        try:
            with _uninterrupted():  # a job that Slurm has is one that the chain knows
                entry = _submit(submission, job, ids)
                add_job(submission.run, submission.chain, entry)
        except (UserError, OSError, KeyboardInterrupt) as error:
            queued = " ".join(entry.id for entry in submitted)
            why = "Interrupted." if isinstance(error, KeyboardInterrupt) else str(error)
            raise UserError(f"{why} " + (
                f"The jobs before it are queued; `python launch/submit.py --cancel {submission.run}` removes them "
                f"({queued})." if queued else "Nothing is queued.")) from None
        ids[job.key] = entry.id
        submitted.append(entry)
    return submitted


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until this is over."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def submit_evaluation(run: Path, python: str, environment: dict[str, str], step: int) -> ChainJob:
    """Submit the job that converts and evaluates the checkpoint after `step`: called by a train job, beside training,
    or by a submission for what is still owed.

    Raises:
        UserError: Slurm did not take it.
    """
    chain = read_chain(run)
    assert chain is not None, f"nothing was submitted for {run}"
    config = load_config(chain.config, check=False)
    if config_hash(config) != chain.config_sha256:  # commands of its section `launch` go into the job's script
        raise UserError(f"{chain.config} is not the configuration that was submitted.")
    asked = asked_of(config.launch, "evaluate")
    tasks = asked.gpus_per_node or config.launch.processes or 1
    name = evaluation_name(config.name, step)
    job = Job(key=name, name=name, stage="evaluate", state=None, forced=True,  # type: ignore[arg-type]
              command=(python, "-m", "launch.slurm.evaluations", "--run", str(run), "--step", str(step)), arguments=(),
              environment=environment, processes=tasks, cpus_per_task=tasks * asked.cpus,
              gpus_per_node=asked.gpus_per_node, asked=asked)
    # In a run folder of its own: it neither waits for the chain's own evaluation nor is taken for it.
    content = read_json(Path(chain.code) / SNAPSHOT)["content"]
    entry = _submit(Submission(config, chain.id, chain.code, content=content), job, {}, kind="evaluation",
                    of=evaluation_folder(run.absolute(), step))
    add_job(run, chain.id, entry)
    return entry


def evaluation_name(run: str, step: int) -> str:
    """Slurm's name of the job that evaluates a checkpoint: one that is queued already is known by it."""
    return f"{run}-evaluate-step-{step:08d}"


def _submit(submission: Submission, job: Job, ids: Mapping[str, str], kind: str | None = None,
            of: Path | None = None) -> ChainJob:
    """of: the run folder that the job works in, if it is not the submission's."""
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    spec = _spec_path(submission, job)
    _spec(submission, job, of).save(spec)
    executor = _executor(submission, job, ids, of)
    try:
        ticket = executor.submit(RunJob(str(spec), _runner_python(submission)))
    except (FailedJobError, FailedSubmissionError, OSError) as error:
        raise UserError(f"Slurm did not take the job {job.name}: {str(error).strip()}.") from None
    if job.elements:  # an element looks for a pickle under its own name
        written = ticket.paths.submitted_pickle
        prefix = f"{ticket.job_id}_"
        for element in job.elements:
            _copy(written, written.with_name(written.name.replace(prefix, f"{prefix}{element}_", 1)))
    return ChainJob(job.name, job.stage, kind or job.kind, ticket.job_id, job.elements or None,
                    tuple(ids[need] for need in job.dependencies), _log(submission, job, ticket.job_id), str(spec),
                    job.phase)


def _copy(written: Path, target: Path) -> None:
    """A file under another name, there as a whole: a job may be waiting for it."""
    try:
        os.link(written, target)
    except OSError:  # no hard links on this file system
        temporary = target.with_name(f"{target.name}.tmp")
        shutil.copyfile(written, temporary)
        temporary.rename(target)


def _spec_path(submission: Submission, job: Job) -> Path:
    return submission.run / SPECS / f"{submission.chain}-{job.key}.json"


def _spec(submission: Submission, job: Job, of: Path | None = None) -> JobSpec:
    launch = submission.config.launch
    trains = job.stage == "train"
    return JobSpec(
        run=str(of or submission.run), name=job.name, stage=job.stage, command=job.command, chain=submission.chain,
        environment=job.environment, ranks=job.ranks, nodes=job.nodes, tasks_per_node=job.tasks_per_node,
        cpus_per_task=job.cpus_per_task, gpus_per_node=job.gpus_per_node, wrap=tuple(launch.wrap), parts=job.parts,
        phase=job.phase, warned=job.stage in STAGES and STAGES[job.stage].workers,
        link=job.link, links=job.links, requeue=launch.requeue,
        signal_s=launch.signal_s, max_restarts=launch.max_restarts,
        preflight=launch.preflight and trains, preflight_factor=launch.preflight_factor,
        preflight_s=launch.preflight_s, every_checkpoints=(launch.evaluate.every_checkpoints or 0) if trains else 0,
        code=submission.code, code_sha256=submission.content, trusted_group=launch.trusted_group,
        check_owners=launch.check_owners)


def _log(submission: Submission, job: Job, job_id: str) -> str:
    name = f"{job_id}_%a" if job.elements else job_id
    return str(submission.run / LOGS / f"{name}.log")


def _executor(submission: Submission, job: Job, ids: Mapping[str, str], of: Path | None = None) -> SlurmExecutor:
    """submitit's executor with everything that the job asks for."""
    from submitit.slurm.slurm import SlurmExecutor

    class Executor(SlurmExecutor):
        """Also made where there is no srun, to show what Slurm would get."""

        @classmethod
        def affinity(cls) -> int:
            return 2

    executor = Executor(folder=submission.run / LOGS, python=shlex.quote(_runner_python(submission)))
    asked, launch, extra = job.asked, submission.config.launch, long_options(job.asked.extra)
    trace = f"{shlex.quote(str((of or submission.run) / 'launch'))}/killed.$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}"
    parameters: dict[str, Any] = {
        "job_name": job.name, "nodes": job.nodes, "ntasks_per_node": job.tasks_per_node,
        "cpus_per_task": job.cpus_per_task, "time": asked.minutes, "partition": asked.partition,
        "account": asked.account, "qos": asked.qos, "constraint": asked.constraint, "mem": asked.mem,
        "gpus_per_node": job.gpus_per_node or None, "exclude": _exclude(asked, submission, extra),
        # The job's own script starts the runner once, on the first node; the runner starts the ranks with srun.
        "use_srun": False,
        # bash waits for the runner, which is told to end as well (scancel) and has things to put in order.
        "setup": ["trap : TERM INT", *launch.setup, *_checks(submission, job, of),
                  f"export PYTHONPATH={shlex.quote(submission.code)}${{PYTHONPATH:+:$PYTHONPATH}}",
                  "export PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1"],
        # A runner that was killed (not the whole job) has taken the ranks with it: begin again, where that is allowed.
        # The file tells the next start, which counts such ends.
        "teardown": [f"code=$?; [ $code -ne {KILLED} ] || {{ touch {trace}; scontrol requeue $SLURM_JOB_ID; }}; "
                     "exit $code"]
        if launch.requeue else None,
        "additional_parameters": _more(submission, job, ids, extra),
    }
    parameters = {key: value for key, value in parameters.items() if value is not None}
    # wckey: submitit's own one would be refused where a site tracks its users' keys.
    executor.update_parameters(**{**lay_over(parameters, extra), "wckey": None})
    return executor


def _checks(submission: Submission, job: Job, of: Path | None) -> list[str]:
    """Lines that end the job if what it would execute from the run folder is not to be trusted. Slurm keeps them, so
    nobody changes them; the program that looks at all the rest is compared first."""
    program, spec = Path(submission.code) / "launch/slurm/trust.py", _spec_path(submission, job)
    refusal = f"refused: {program} is not what was submitted, or gone; submit the same command again"
    python, sha256 = shlex.quote(_runner_python(submission)), sha256_file(Path(trust.__file__))
    return [f"echo {shlex.quote(f'{sha256}  {program}')} | sha256sum --check --status || "
            f"{{ echo {shlex.quote(refusal)}; exit 1; }}",
            f"{python} -I {shlex.quote(str(program))} {shlex.quote(str(spec))} {_spec(submission, job, of).sha256} || "
            f"exit 1"]


def _runner_python(submission: Submission) -> str:
    """What runs the runner and, with it, the ranks until each becomes its stage: outside of a container."""
    launch = submission.config.launch
    return launch.runner_python or (None if launch.wrap else launch.python) or sys.executable


def _more(submission: Submission, job: Job, ids: Mapping[str, str], extra: Mapping[str, Any]) -> dict[str, Any]:
    """sbatch options that submitit has no parameter for, and those that the user has."""
    launch = submission.config.launch
    log = str(submission.run / LOGS / ("%A_%a.log" if job.elements else "%j.log"))
    more: dict[str, Any] = {**extra, "chdir": str(Path.cwd()), "output": log, "error": log,
                            "signal": f"USR2@{launch.signal_s}"}
    more["requeue" if launch.requeue else "no-requeue"] = True
    waits = [f"afterok:{':'.join(ids[need] for need in job.dependencies)}"] if job.dependencies else []
    if job.dependencies:
        more["kill-on-invalid-dep"] = "yes"
    if job.stage == "train":
        waits.append("singleton")  # two jobs of one run never train at once, however they were submitted
    if waits:
        more["dependency"] = ",".join([*waits, *([extra["dependency"]] if "dependency" in extra else [])])
    if "exclude" in extra:
        more["exclude"] = _exclude(job.asked, submission, extra)
    if job.elements:
        more["array"] = _ranges(job.elements) + (f"%{job.asked.at_once}" if job.asked.at_once else "")
    return more


def _exclude(asked: Asked, submission: Submission, extra: Mapping[str, Any]) -> str | None:
    return ",".join(filter(None, (extra.get("exclude") or asked.exclude, *submission.exclude))) or None


def _ranges(elements: tuple[int, ...]) -> str:
    """Slurm's notation of array indices: 0-3,7."""
    parts: list[list[int]] = []
    for element in elements:
        if parts and parts[-1][1] == element - 1:
            parts[-1][1] = element
        else:
            parts.append([element, element])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
