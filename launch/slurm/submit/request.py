"""A request for Slurm: what its jobs are given, and their submission as one chain."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from drover.launch.checks import refuse_wrong_packages
from drover.launch.plan import Job, Options
from drover.launch.rehearsing import rehearse_training, worth_rehearsing
from drover.launch.slurm.chain import CHAIN, Chain, in_queue
from drover.launch.slurm.evaluations import pending
from drover.launch.slurm.nodes import failing, few, named
from drover.launch.slurm.scheduler import Scheduler, of_another_job
from drover.launch.slurm.submit.sbatch import LOGS, submit
from drover.launch.slurm.submit.snapshot import planned_snapshot, take_snapshot
from drover.launch.slurm.trust import folders_of, group_exists, owner_problems
from drover.pipeline.config.loading import config_hash
from drover.pipeline.config.outside import needed_modules
from drover.pipeline.config.places import make_folder
from drover.pipeline.config.plugins import plugin_files
from drover.pipeline.contract.locks import lock
from drover.pipeline.contract.run import Run
from drover.pipeline.contract.stage_work import git_state
from drover.pipeline.contract.state import STOP, now
from drover.pipeline.core.console import say
from drover.pipeline.core.errors import EXTRAS, UserError, listed, require


def for_slurm(run: Run, options: Options, *, dry_run: bool) -> Options:
    """What the jobs of a submission are given: a copy of the code and of the configuration. Nothing is written."""
    require("Slurm", "submitit", "take --cluster local")
    if not dry_run and shutil.which("sbatch") is None:
        raise UserError("There is no sbatch on PATH, so nothing was submitted. Log in where Slurm is, use --cluster "
                        "local, or --dry-run to see what Slurm would get.")
    code, content = planned_snapshot(run.folder)
    frozen = run.folder.absolute() / "launch" / f"config-{config_hash(run.config)[:12]}.yaml"
    wanted = run.config.launch.train.nodes
    bad, kept = failing(run.folder, wanted)
    if bad:
        print(f"left out  {', '.join(sorted(bad))}: failed twice within a day (launch/nodes.jsonl)\n")
    if kept:
        print(f"not left out  {named(kept)}: failed twice within a day as well, but of {wanted} nodes no more than "
              f"{few(wanted)} may be missed (launch.exclude leaves out others)\n")
    return replace(options, frozen=str(frozen), chain=_new_id(), code=str(code), code_sha256=content,
                   exclude=tuple(sorted(bad)))


def submit_chain(run: Run, jobs: list[Job], options: Options, *, rehearse: bool | None) -> int:
    """Submit what is to run as one chain; the exit status.

    rehearse: whether a step of training is rehearsed before; None: where it is worth it.

    Raises:
        UserError: something cannot work; nothing was submitted, or what was is named.
    """
    config = run.config
    trained = {job.to_run for job in jobs if job.stage == "train"} == {False} and run.manifest("train") is not None
    # Checkpoints that still lack a result though training is done; while it runs, its own jobs see to that.
    jobs = [*(job for job in jobs if job.to_run), *(pending(config, options) if trained else [])]
    if not jobs:
        print("nothing to submit: all asked stages are done")
        return 0
    modules = {module for job in jobs for _, module, _ in needed_modules(config, job.stage)}
    if all(job.own_python for job in jobs):
        refuse_wrong_packages({"slurm", *(EXTRAS[module] for module in modules if module in EXTRAS)})
    else:
        say("note", f"the packages of {jobs[0].command[0]} are not checked from here; `drover doctor` tries them")
    _refuse_untrusted(run)
    if foreign := of_another_job(os.environ):
        say("note", f"not passed on to sbatch and the jobs: {named(foreign)} of your shell. What jobs ask for stands "
                    f"in the section `launch` (`drover explain launch`)")
    make_folder(run.folder)
    # From here until all is recorded, or this process ends, nobody else submits this run.
    held = lock(run.folder, "submission", f"the submission of {run.folder}")
    _refuse_queued(run, jobs)
    if rehearse or (rehearse is None and worth_rehearsing(config, jobs)):
        rehearse_training(run, jobs, options)  # last: it takes up to some minutes
    take_snapshot(Path(options.code), options.code_sha256)
    (run.folder / STOP).unlink(missing_ok=True)  # it was meant for what ran then
    submitted = submit(config, jobs, Chain(
        id=options.chain, submitted=now(), command=tuple(sys.argv), git=git_state(), config=options.frozen,
        code=options.code))
    if held is not None:
        held.close()
    for entry in submitted:
        after = f" after {', '.join(entry.dependencies)}" if entry.dependencies else ""
        kind = "" if entry.kind == "job" else f" ({' '.join(filter(None, [entry.kind, entry.phase]))})"
        print(f"{entry.stage:<9} job {entry.id}{kind}{after}")
    print(f"\nlogs in {run.folder / LOGS}; the chain is recorded in {run.folder / CHAIN}\n"
          f"`drover status {run.folder} --watch` shows it; the same command"
          f"{' without --force' * options.force} submits what is left")
    return 0


def _new_id() -> str:
    """Of a submission: sorts by time."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def _refuse_untrusted(run: Run) -> None:
    """What the jobs execute from the run folder is nobody else's to write; they look at it again at every start."""
    launch = run.config.launch
    if not launch.check_owners:
        return
    if launch.trusted_group is None:
        os.umask(os.umask(0o077) | 0o022)  # of what is written from here on; Slurm hands it on to the jobs
    elif not group_exists(launch.trusted_group):
        raise UserError(f"launch.trusted_group is {launch.trusted_group}, but there is no such group here (`id` lists "
                        f"yours).")
    plugins = plugin_files()
    if found := owner_problems([*folders_of(run.folder), *run.folder.glob("launch/*.json"), *plugins],
                               launch.trusted_group, [run.folder, *plugins]):
        raise UserError(f"Jobs execute what is in the run folder, and others could change it:\n{listed(found)}")


def _refuse_queued(run: Run, jobs: list[Job]) -> None:
    """A run's jobs are in the queue once; where Slurm does not answer, singleton and the lock keep a second from
    training."""
    queued, mine = in_queue(run.folder, Scheduler())
    if mine is None:
        print("Slurm does not say whether jobs of this run are queued already; should they be, the new ones wait")
        return
    if queued:
        listing = ", ".join(f"{job.id} ({job.name})" for job in queued)
        raise UserError(f"Jobs of {run.folder} are in the queue already: {listing}. Watch them with `drover "
                        f"status {run.folder}`, remove them with `drover cancel {run.folder}`, or use "
                        f"name=<another> for a run of its own.")
    names = {job.name for job in jobs}
    if namesakes := ", ".join(f"{job.id} ({job.name})" for job in mine if job.name in names):
        print(f"other jobs of the same names are in the queue: {namesakes}; training waits for its namesake, whose "
              f"ever it is")
