"""A submission to Slurm: what its jobs get, and how they are submitted through submitit as one chain."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from drover.launch.plan import Job, Options
from drover.launch.rehearsing import rehearse_training, worth_rehearsing
from drover.launch.slurm.chain import CHAIN, ChainJob, JobChain, in_queue
from drover.launch.slurm.nodes import failing, few, named
from drover.launch.slurm.options import FOLDER, outer_python, parameters, spec_path
from drover.launch.slurm.scheduler import OWN, Scheduler, of_another_job
from drover.launch.slurm.snapshot import planned_snapshot, take_snapshot
from drover.launch.slurm.trust import refuse_foreign_files
from drover.launch.slurm.wait_reasons import refusal
from drover.pipeline.config.kinds import plugin_files
from drover.pipeline.config.loading import config_hash, save_config
from drover.pipeline.config.section import make_folder
from drover.pipeline.config.tree import Config
from drover.pipeline.contract.locks import lock
from drover.pipeline.contract.run import Run
from drover.pipeline.contract.stage_work import git_state
from drover.pipeline.contract.state import STOP, now
from drover.pipeline.core.console import echo, say
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import sha256_file

MOST_TIMEOUTS = 1_000_000
"""Time limits after which submitit still queues a job again: the runner decides that."""


def for_slurm(run: Run, options: Options) -> Options:
    """Options with the paths of the jobs' copies of code and configuration. Writes nothing."""
    frozen = run.folder.absolute() / "launch" / f"config-{config_hash(run.config)[:12]}.yaml"
    wanted = run.config.launch.train.nodes
    bad, kept = failing(run.folder, wanted)
    if bad:
        echo(f"excluded  {', '.join(sorted(bad))}: failed twice within a day (launch/nodes.jsonl)\n")
    if kept:
        echo(f"not excluded  {named(kept)}: failed twice within a day too, but of {wanted} nodes at most "
             f"{few(wanted)} is excluded by itself (launch.exclude excludes others)\n")
    return replace(options, frozen=str(frozen), chain=_new_id(),
                   code=str(planned_snapshot(run.folder)), exclude=tuple(sorted(bad)))


def submit_chain(run: Run, jobs: list[Job], options: Options, *, rehearse: bool | None) -> int:
    """Submit the jobs that have something to do as one chain; the exit status.

    rehearse: whether to rehearse a training step first; None: if it is worth it.

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
    held = lock(run.folder, "submission", f"the submission of {run.folder}")
    _refuse_queued(run)
    if rehearse or (rehearse is None and worth_rehearsing(config, jobs)):
        rehearse_training(run, jobs, options)  # last, because it may take some minutes
    take_snapshot(Path(options.code))
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
    echo(f"\nlogs in {run.folder / FOLDER}; the chain is recorded in {run.folder / CHAIN}\n"
         f"`drover status {run.folder} --watch` shows the progress; the same command"
         f"{' without --force' * options.force} submits what is left")
    return 0


def submit(config: Config, jobs: list[Job], chain: JobChain) -> list[ChainJob]:
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
            ids[job.key] = entry.id
            chain = replace(chain, jobs=(*chain.jobs, entry))
            chain.write(run)
        except (UserError, OSError, KeyboardInterrupt) as error:
            why = "Interrupted." if isinstance(error, KeyboardInterrupt) else str(error)
            with suppress(OSError, UserError):  # the refusal itself is what the user must see
                replace(chain, refused=why).write(run)
            # Slurm may have a job whose number sbatch could not print. `drover cancel` finds it by its token.
            raise UserError(f"{why} Queued before it: {' '.join(ids.values()) or 'nothing'}; `drover cancel {run}` "
                            f"removes all jobs of the run.") from None
    return [*chain.jobs]


def submit_job(config: Config, job: Job, ids: Mapping[str, str]) -> ChainJob:
    """Submit one job: `submit` of submitit's executor, or for an array its `map_array`.

    ids: of the jobs that it depends on, by their keys.

    Raises:
        UserError: Slurm did not accept it.
    """
    from submitit import SlurmExecutor
    from submitit.helpers import clean_env, environment_variables

    from drover.launch.job.task import StageTask

    folder = config.folder.absolute() / FOLDER
    spec = spec_path(config, job)
    job.save(spec)
    # Who can write a pickle decides what the job does.
    folder.mkdir(mode=0o700 if config.launch.check_owners else 0o777, exist_ok=True)
    task = StageTask(str(spec))
    own = {name: os.environ[name] for name in OWN if name in os.environ}
    try:
        executor = SlurmExecutor(folder, MOST_TIMEOUTS, python=outer_python(config.launch, job.contained))
        executor.update_parameters(**parameters(config, job, ids))
        with clean_env(of_another_job(os.environ)), environment_variables(**own):
            first = executor.map_array(task, job.elements)[0] if job.elements else executor.submit(task)
    except (RuntimeError, OSError) as error:
        why, advice = refusal(str(error), "to run without Slurm, on this machine, use --cluster local")
        raise UserError(f"Slurm did not accept the job {job.name}: {why}. What to do: {advice}.") from None
    return ChainJob(job.name, job.stage, first.job_id.partition("_")[0], job.elements or None,
                    tuple(ids[need] for need in job.dependencies))


def _new_id() -> str:
    """The id of a submission; ids sort by time."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def _refuse_queued(run: Run) -> None:
    """Refuse to queue a run twice. If Slurm does not answer, singleton and the job lock keep a second job from
    training."""
    queued, mine = in_queue(run.folder, Scheduler())
    if mine is None:
        echo("squeue does not answer whether jobs of this run are already queued; if so, the new ones wait for them")
        return
    if queued:
        listing = ", ".join(f"{job.id} ({job.name})" for job in queued)
        raise UserError(f"Jobs of {run.folder} are in the queue already: {listing}. Watch them with `drover "
                        f"status {run.folder}`, remove them with `drover cancel {run.folder}`, or start another run "
                        f"with name=<another>.")
