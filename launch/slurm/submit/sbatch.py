"""The planned jobs to Slurm, through submitit: scripts to show, chains to submit, evaluations beside training."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.plan import Job
from launch.resources import asked_of
from launch.slurm import trust
from launch.slurm.chain import Chain, ChainJob, add_job, read_chain, token
from launch.slurm.jobspec import JobSpec
from launch.slurm.scheduler import Scheduler
from launch.slurm.submit.options import gpus_asked, options_of
from pipeline.config.loading import config_hash, load_config, save_config
from pipeline.config.plugins import loaded_plugins, plugin_folders
from pipeline.config.tree import Config
from pipeline.console import spelled
from pipeline.contract.stages import SNAPSHOT
from pipeline.errors import UserError
from pipeline.files import read_json, sha256_file
from pipeline.records.pending_evaluations import evaluation_folder

if TYPE_CHECKING:
    from submitit.slurm.slurm import SlurmExecutor

LOGS = Path("logs") / "slurm"
SPECS = Path("launch") / "jobs"
KILLED = 128 + 9
SBATCH_S = 60
"""How long sbatch may take. It may have queued the job all the same: the token in the job's comment tells."""


@dataclass(frozen=True)
class Submission:
    """What all jobs of a chain have in common.

    code: folder of the snapshot. content: its hash. exclude: nodes that failed twice. files: hashes of other files that
    the jobs read, by path. of: the run folder that the jobs work in, if it is not the run's.
    """

    config: Config
    chain: str
    code: str
    exclude: tuple[str, ...] = ()
    content: str = ""
    files: dict[str, str] = field(default_factory=dict)
    of: Path | None = None

    @property
    def run(self) -> Path:
        """The run's folder."""
        return self.config.folder.absolute()


def frozen_config(config: Config) -> Path:
    """Where the jobs find the configuration as it was at submission: its file may be edited before they start."""
    return config.folder.absolute() / "launch" / f"config-{config_hash(config)[:12]}.yaml"


def _files(frozen: Path) -> dict[str, str]:
    """Hashes of what decides, beside the code, what a job does: the configuration and its plugins."""
    return {str(path): sha256_file(path) for path in (frozen, *loaded_plugins().values())}


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
    frozen = frozen_config(submission.config)
    save_config(submission.config, frozen)
    submission = replace(submission, files=_files(frozen))
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
                f"({queued})." if queued else "Nothing else is queued.")) from None
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


def submit_evaluation(run: Path, step: int, python: str, environment: dict[str, str],
                      files: dict[str, str] | None = None, content: str = "") -> ChainJob:
    """Submit the job that converts and evaluates the checkpoint after `step`: called by a train job, beside training,
    or by a submission for what is still owed.

    Args:
        files, content: hashes of the configuration, its plugins and the code, as the train job was submitted with them;
            without them, as they are now.

    Raises:
        UserError: Slurm did not take it, or something is not what was submitted.
    """
    chain = read_chain(run)
    assert chain is not None, f"nothing was submitted for {run}"
    if changed := [path for path, sha256 in (files or {}).items() if sha256_file(Path(path)) != sha256]:
        raise UserError(f"{', '.join(changed)} is not what was submitted.")
    config = load_config(chain.config, check=False)
    if config_hash(config) != chain.config_sha256:  # commands of its section `launch` go into the job's script
        raise UserError(f"{chain.config} is not the configuration that was submitted.")
    asked = asked_of(config.launch, "evaluate")
    tasks = asked.gpus_per_node or config.launch.processes or 1
    name = evaluation_name(config.name, step)
    job = Job(key=name, name=name, stage="evaluate", state=None, forced=True,  # type: ignore[arg-type]
              command=(python, "-m", "launch.slurm.evaluations", "--run", str(run), "--step", str(step),
                       *(word for name in config.plugins for word in ("--plugin", name))), arguments=(),
              environment=environment, processes=tasks, cpus_per_task=tasks * asked.cpus,
              gpus_per_node=asked.gpus_per_node, asked=asked)
    # In a run folder of its own: it neither waits for the chain's own evaluation nor is taken for it.
    content = content or read_json(Path(chain.code) / SNAPSHOT)["content"]
    submission = Submission(config, chain.id, chain.code, content=content, files=files or _files(Path(chain.config)),
                            of=evaluation_folder(run.absolute(), step))
    entry = _submit(submission, job, {}, kind="evaluation")
    add_job(run, chain.id, entry)
    return entry


def evaluation_name(run: str, step: int) -> str:
    """Slurm's name of the job that evaluates a checkpoint: one that is queued already is known by it."""
    return f"{run}-evaluate-step-{step:08d}"


def _submit(submission: Submission, job: Job, ids: Mapping[str, str], kind: str | None = None) -> ChainJob:
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    spec = _spec_path(submission, job)
    _spec(submission, job).save(spec)
    (submission.run / LOGS).mkdir(parents=True, exist_ok=True)
    executor = _executor(submission, job, ids)
    try:
        # Not `submit`, which would pickle a function: the job's script names its program.
        number = executor._submit_command(executor._submitit_command_str).job_id
    except (FailedJobError, FailedSubmissionError, OSError) as error:
        mine = Scheduler().mine()
        queued = [found.id for found in mine or () if found.comment.split(" ")[0] == token(submission.chain, job.key)]
        if not queued:
            why = str(error).strip() or f"sbatch did not answer within {SBATCH_S} s"
            why += "" if mine is not None else "; nor does squeue, so it may be queued: --cancel would find it"
            raise UserError(f"Slurm did not take the job {job.name}: {why}.") from None
        number = queued[0]  # its answer was lost
    log = submission.run / LOGS / f"{number}{'_%a' if job.elements else ''}.log"
    return ChainJob(job.name, job.stage, kind or job.kind, number, job.elements or None,
                    tuple(ids[need] for need in job.dependencies), str(log), str(spec), job.phase)


def _spec_path(submission: Submission, job: Job) -> Path:
    return submission.run / SPECS / f"{submission.chain}-{job.key}.json"


def _spec(submission: Submission, job: Job) -> JobSpec:
    launch, trains = submission.config.launch, job.stage == "train"
    values: dict[str, Any] = {**vars(launch), **vars(submission), **vars(job)}  # equal names mean the same thing
    same = {field.name: values[field.name] for field in fields(JobSpec) if field.name in values}
    environment = dict(job.environment)
    if not launch.wrap:  # the job's script says where its node has the code
        environment.pop("PYTHONPATH", None)
    return JobSpec(**{**same, "run": str(submission.of or submission.run), "environment": environment,
                      "wrap": tuple(launch.wrap),
                      "preflight": launch.preflight and trains, "code_sha256": submission.content,
                      "every_checkpoints": (launch.evaluate.every_checkpoints or 0) if trains else 0})


def _executor(submission: Submission, job: Job, ids: Mapping[str, str]) -> SlurmExecutor:
    """submitit's executor with everything that the job asks for."""
    from submitit.slurm.slurm import SlurmExecutor

    python = shlex.quote(_runner_python(submission))
    program = f"{python} -m launch.slurm.job.runner {_spec_arguments(submission, job)}"

    class Executor(SlurmExecutor):
        """Starts a program in place of a pickled function, and does not wait for sbatch without end. It is also made
        where there is no srun, to show what Slurm would get."""

        @classmethod
        def affinity(cls) -> int:
            return 2

        @property
        def _submitit_command_str(self) -> str:
            return program

        def _make_submission_command(self, submission_file_path: Path) -> list[str]:
            return ["timeout", "--kill-after=5", str(SBATCH_S), *super()._make_submission_command(submission_file_path)]

    executor = Executor(folder=submission.run / LOGS)
    asked, launch = job.asked, submission.config.launch
    trace = shlex.quote(str((submission.of or submission.run) / "launch")) + \
        "/killed.$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"
    parameters: dict[str, Any] = {
        "job_name": job.name, "nodes": job.nodes, "ntasks_per_node": job.tasks_per_node,
        "cpus_per_task": job.cpus_per_task, "time": asked.minutes,
        **{name: getattr(asked, name) for name in ("partition", "account", "qos", "constraint", "mem")},
        "gpus_per_node": None if gpus_asked(job) else job.gpus_per_node or None,
        "exclude": ",".join(filter(None, (asked.exclude, *submission.exclude))) or None,
        # The job's own script starts the runner once, on the first node; the runner starts the ranks with srun.
        "use_srun": False, "stderr_to_stdout": True,
        # bash waits for the runner, which is told to end as well (scancel) and has things to put in order.
        "setup": ["trap : TERM INT", *launch.setup, *_checks(submission, job)],
        # A runner that was killed (not the whole job) has taken the ranks with it: begin again, where that is allowed.
        # The file tells the next start, which counts such ends.
        "teardown": [f"code=$?; [ $code -ne {KILLED} ] || {{ touch {trace}; scontrol requeue $SLURM_JOB_ID; }}; "
                     "exit $code"]
        if launch.requeue else None,
        "additional_parameters": _more(submission, job, ids),
    }
    # wckey: submitit's own one would be refused where a site tracks its users' keys.
    executor.update_parameters(**{key: value for key, value in parameters.items() if value is not None}, wckey=None)
    return executor


def _checks(submission: Submission, job: Job) -> list[str]:
    """Lines that end the job if what it would execute from the run folder is not to be trusted, and find its code.

    Slurm keeps these lines, so nobody changes them. They compare the program that looks at all the rest, and run what
    they compared.
    """
    program = Path(submission.code) / "launch/slurm/trust.py"
    refusal = f"refused: {program} is not what was submitted, or gone; submit the same command again"
    python, sha256 = shlex.quote(_runner_python(submission)), sha256_file(Path(trust.__file__))
    plugins = "".join(f":{shlex.quote(folder)}" for folder in plugin_folders())
    return [f"check=$(cat {shlex.quote(str(program))})",
            f'echo "$check" | sha256sum | grep -q "^{sha256} " || {{ echo {shlex.quote(refusal)}; exit 1; }}',
            f'code=$({python} -I -c "$check" check {_spec_arguments(submission, job)}) || exit 1',
            f"export PYTHONPATH=$code{plugins}${{PYTHONPATH:+:$PYTHONPATH}} PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1"]


def _spec_arguments(submission: Submission, job: Job) -> str:
    """The job's spec and the hash of its content, as arguments of the programs that read it."""
    return f"{shlex.quote(str(_spec_path(submission, job)))} {_spec(submission, job).sha256}"


def _runner_python(submission: Submission) -> str:
    """What runs the runner and, with it, the ranks until each becomes its stage: outside of a container."""
    launch = submission.config.launch
    return launch.runner_python or (None if launch.wrap else launch.python) or sys.executable


def _more(submission: Submission, job: Job, ids: Mapping[str, str]) -> dict[str, Any]:
    """sbatch options that submitit has no parameter for, and those that the user has."""
    launch, extra = submission.config.launch, options_of(job)
    more: dict[str, Any] = {**extra, "chdir": str(Path.cwd()), "signal": f"USR2@{launch.signal_s}",
                            "output": str(submission.run / LOGS / ("%A_%a.log" if job.elements else "%j.log")),
                            "comment": " ".join(filter(None, [token(submission.chain, job.key),
                                                              str(extra.get("comment", ""))]))}
    more["requeue" if launch.requeue else "no-requeue"] = True
    waits = [f"afterok:{':'.join(ids[need] for need in job.dependencies)}"] if job.dependencies else []
    if job.dependencies:
        more["kill-on-invalid-dep"] = "yes"
    if job.stage == "train":
        waits.append("singleton")  # two jobs of one run never train at once, however they were submitted
    if waits:
        more["dependency"] = ",".join([*waits, *([str(extra["dependency"])] if "dependency" in extra else [])])
    if job.elements:
        more["array"] = spelled(job.elements).replace(" ", "") + (f"%{job.asked.at_once}" if job.asked.at_once else "")
    return more
