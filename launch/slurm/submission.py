"""A submission to Slurm: a copy of the code, and the jobs, which submitit submits as one chain.

Jobs start hours after their submission and restart for weeks. Later edits of the checkout must not reach them: they run
a copy in the run folder. It is named by its content, so that submitting the same code again makes no new one.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path

from drover.launch.credentials import known_form
from drover.launch.job.host import JobSpec
from drover.launch.plan import Job, Options
from drover.launch.slurm.chain import ChainJob, JobChain, in_queue
from drover.launch.slurm.nodes import failing, named
from drover.launch.slurm.options import FOLDER, outer_python, parameters
from drover.launch.slurm.scheduler import OWN, Scheduler, of_another_job, plain
from drover.launch.slurm.trust import refuse_foreign_files
from drover.pipeline.config.kinds import plugin_files
from drover.pipeline.config.loading import config_hash, save_config
from drover.pipeline.config.section import make_folder
from drover.pipeline.config.tree import Config
from drover.pipeline.contract.locks import lock
from drover.pipeline.contract.run import Run
from drover.pipeline.contract.stage_work import git, git_state
from drover.pipeline.contract.stages import REPOSITORY, SNAPSHOT
from drover.pipeline.contract.state import STOP, now
from drover.pipeline.core.console import echo, say
from drover.pipeline.core.errors import UserError, listed
from drover.pipeline.core.files import atomic_file, sha256_file, sha256_json

MOST_TIMEOUTS = 1_000_000
"""Time limits after which submitit still queues a job again: the runner decides that."""
PACKAGE = "drover"
PARTS = (PACKAGE, "__init__.py", "launch", "model", "pipeline", "tools", "configs")
"""What jobs need of the checkout or of an installed package. Tests, docs and everything else are left out."""


def for_slurm(run: Run, options: Options) -> Options:
    """Options with the paths of the jobs' copies of code and configuration. Writes nothing."""
    frozen = run.folder.absolute() / "launch" / f"config-{config_hash(run.config)[:12]}.yaml"
    excluded = failing(run.folder, run.config.launch.train.nodes)
    if excluded:
        echo(f"excluded  {', '.join(excluded)}: failed twice within a day (launch/nodes.jsonl)\n")
    id = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"  # ids sort by time
    code, files = snapshot_of(run.folder)
    return replace(options, frozen=str(frozen), chain=id, code=str(code), code_files=files, exclude=tuple(excluded))


def submit_chain(run: Run, jobs: list[Job], options: Options) -> int:
    """Submit the jobs that have something to do as one chain; the exit status.

    Raises:
        UserError: something cannot work. Nothing was submitted, or the error names the jobs that were.
    """
    config = run.config
    jobs = [job for job in jobs if job.to_run]
    if not jobs:
        echo("nothing to submit: all requested stages are done")
        return 0
    if config.launch.check_owners:
        os.umask(os.umask(0o077) | 0o022)  # for all files written from here on; Slurm passes it on to the jobs
        refuse_foreign_files(run.folder, plugin_files())
    if foreign := of_another_job(os.environ):
        say("note", f"{named(foreign)} of your shell are not passed on to sbatch and the jobs. Set what jobs request "
                    f"in the section `launch` (`drover explain launch`)")
    make_folder(run.folder)
    # From here until everything is recorded, or this process ends, no other process can submit this run.
    held = lock(run.folder, "submission", "The submission")
    if not refuse_queued(run):
        echo("squeue does not answer whether jobs of this run are already queued; if so, the new ones wait for them")
    take_snapshot(Path(options.code), options.code_files)
    if config.launch.check_owners:  # an access control list of the folder may override the umask
        refuse_foreign_files(run.folder)
    (run.folder / STOP).unlink(missing_ok=True)  # it was for earlier jobs
    submitted = submit(config, jobs, JobChain(
        id=options.chain, submitted=now(), command=tuple(sys.argv), git=git_state(), config=options.frozen,
        code=options.code, planned=len(jobs)))
    held.close()
    for entry in submitted:
        after = f" after {', '.join(entry.dependencies)}" if entry.dependencies else ""
        elements = f" ({len(entry.elements)} elements)" if entry.elements else ""
        echo(f"{entry.stage:<9} job {entry.id}{elements}{after}")
    echo(f"\nlogs in {run.folder / FOLDER}\n"
         f"`drover status {run.folder} --watch` shows the progress; the same command"
         f"{' without --force' * options.force} submits what is left")
    return 0


def submit(config: Config, jobs: list[Job], chain: JobChain) -> tuple[ChainJob, ...]:
    """Submit the jobs, each after its dependencies, and record each in the chain.

    Raises:
        UserError: sbatch refused a job. The error names the jobs that are queued already.
    """
    frozen = Path(chain.config)
    run = config.folder.absolute()
    save_config(config, frozen)
    # Besides the code these decide what a job does: configuration, plugins, and the modules in the plugins' folders.
    files = {str(path): sha256_file(path) for path in (frozen, *plugin_files())}
    chain.write(run)
    ids = dict[str, str]()
    for job in jobs:
        try:
            entry = submit_job(config, replace(job, files=files), ids)
            ids[job.stage] = entry.id
            chain = replace(chain, jobs=(*chain.jobs, entry))
            chain.write(run)
        except (UserError, OSError, KeyboardInterrupt) as error:
            why = "Interrupted." if isinstance(error, KeyboardInterrupt) else str(error)
            with suppress(OSError, UserError):  # the refusal itself is what the user must see
                replace(chain, refused=why).write(run)
            # Slurm may have a job whose number sbatch could not print. `drover cancel` finds it by its token.
            raise UserError(f"{why} Queued before it: {' '.join(ids.values()) or 'nothing'}; `drover cancel {run}` "
                            f"removes all jobs of the run.") from None
    return chain.jobs


def submit_job(config: Config, job: Job, ids: Mapping[str, str]) -> ChainJob:
    """Submit one job: `submit` of submitit's executor, or for an array its `map_array`.

    ids: of the jobs that it depends on, by their stages.

    Raises:
        UserError: Slurm did not accept it.
    """
    from submitit import SlurmExecutor
    from submitit.helpers import clean_env, environment_variables

    from drover.launch.job.task import StageTask

    folder = config.folder.absolute() / FOLDER
    # Who can write a pickle decides what the job does.
    folder.mkdir(mode=0o700 if config.launch.check_owners else 0o777, exist_ok=True)
    task = StageTask(JobSpec(**{field.name: getattr(job, field.name) for field in fields(JobSpec)}))
    own = {name: os.environ[name] for name in OWN if name in os.environ}
    try:
        executor = SlurmExecutor(folder, MOST_TIMEOUTS, python=outer_python(config.launch, job.contained))
        executor.update_parameters(**parameters(config, job, ids))
        with clean_env(of_another_job(os.environ)), environment_variables(**own):
            first = executor.map_array(task, job.elements)[0] if job.elements else executor.submit(task)
    except (RuntimeError, OSError) as error:
        answer = plain(str(error))
        advice = ("The queue is full or its controller is busy: try again later" if "temporarily unable" in answer else
                  "Change what it requests (`drover explain launch`), or run on this machine with --cluster local")
        raise UserError(f"Slurm did not accept the job {job.name}: {answer}. {advice}.") from None
    return ChainJob(job.name, job.stage, first.job_id.partition("_")[0], job.elements or None,
                    tuple(ids[need] for need in job.dependencies))


def refuse_queued(run: Run) -> bool:
    """Refuse to queue a run twice. False if Slurm does not answer: singleton and the stage's lock then keep a second
    job from training."""
    queued, answered = in_queue(run.folder, Scheduler())
    if answered and queued:
        listing = ", ".join(f"{job.id} ({job.name})" for job in queued)
        raise UserError(f"Jobs of {run.folder} are in the queue already: {listing}. Watch them with `drover "
                        f"status {run.folder}`, remove them with `drover cancel {run.folder}`, or start another run "
                        f"with name=<another>.")
    return answered


# ---- the copy of the code


def snapshot_of(run_folder: Path) -> tuple[Path, dict[str, bytes]]:
    """The copy of the code to make: its path, `code/<commit>-<content>/` in the run folder, and the content of its
    files. Writes nothing."""
    files = _contents(REPOSITORY)
    return run_folder.absolute() / "code" / _name(files), files


def take_snapshot(code: Path, contents: Mapping[str, bytes]) -> None:
    """Make a copy of the code.

    `drover/` in it holds the files, as in an installed package; `snapshot.json` the commit, and whether the checkout
    had changes. UserError if a file contains a secret.
    """
    # Everyone who can read the run folder can read the copy.
    if leaks := [f"{name.removeprefix(f'{PACKAGE}/')} has {what}" for name, content in contents.items()
                 if (what := known_form(content.decode(errors="replace")))]:
        raise UserError(f"Jobs get a copy of the code, and it would contain secrets:\n{listed(leaks)}\nNothing was "
                        f"submitted. Move them elsewhere or into a file that git ignores. To pass variables "
                        f"to the jobs, use launch.secrets.")
    for name, content in contents.items():
        with atomic_file(code / name, keep_equal=True, durable=False) as file:
            file.write(content)


def _contents(repository: Path) -> dict[str, bytes]:
    """The content of each file of the copy, by its path there: what git tracks or does not ignore; outside of git, all
    but caches."""
    listing = git(repository, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *PARTS)
    paths = [repository / name for name in listing.split("\0")] if listing else [
        path for part in PARTS for path in [repository / part, *(repository / part).rglob("*")]]
    contents = {(name if name.parts[0] == PACKAGE else PACKAGE / name).as_posix(): (repository / name).read_bytes()
                for name in sorted({path.relative_to(repository) for path in paths if path.is_file()})
                if "__pycache__" not in name.parts}
    commit = (git(repository, "rev-parse", "HEAD") or "").strip()
    changed = bool(commit) and git(repository, "status", "--porcelain", "--", *PARTS) != ""  # also if git fails
    return {**contents, SNAPSHOT: json.dumps({"commit": commit, "changed": changed}).encode()}


def _name(contents: dict[str, bytes]) -> str:
    commit = json.loads(contents[SNAPSHOT])["commit"][:10] or "unversioned"
    return f"{commit}-{sha256_json({name: hashlib.sha256(text).hexdigest() for name, text in contents.items()})[:10]}"
