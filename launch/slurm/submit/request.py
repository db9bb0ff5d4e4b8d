"""A request for Slurm: planned, shown, checked as far as anything can be known, then submitted as one chain."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from dataclasses import replace
from datetime import UTC, datetime

from launch.checks import (
    cluster_problems,
    configuration_problems,
    refuse_unsound,
    refuse_unusable_stores,
    refuse_wrong_packages,
    say_absent,
)
from launch.describe import by_hand, print_commands, print_plan
from launch.forecast import disk
from launch.plan import Job, Options, plan
from launch.rehearsing import rehearse_training, worth_rehearsing
from launch.slurm.chain import CHAIN, Chain, ChainJob, read_chains, unrecorded
from launch.slurm.nodes import excluded, few, named, spared
from launch.slurm.scheduler import Scheduler, of_another_job
from launch.slurm.submit.sbatch import (
    LOGS,
    Submission,
    evaluation_name,
    frozen_config,
    scripts,
    submit,
    submit_evaluation,
)
from launch.slurm.submit.snapshot import planned_snapshot, take_snapshot
from launch.slurm.trust import folders_of, group_exists, owner_problems
from pipeline.config.loading import cluster_profile, config_hash
from pipeline.config.places import make_folder
from pipeline.config.plugins import loaded_plugins
from pipeline.contract.locks import lock
from pipeline.contract.run import Run
from pipeline.contract.stage_work import git_state
from pipeline.contract.state import STOP, now
from pipeline.errors import UserError, listed


def run_on_slurm(run: Run, stages: list[str], request: Options, where: str, *, dry_run: bool,
                 rehearse: bool | None = None) -> int:
    """Submit `stages`, or with `dry_run` show what sbatch would get and write nothing; the exit status.

    rehearse: whether a step of training is rehearsed before; None: where it is worth it.

    Raises:
        UserError: something cannot work; nothing was submitted, or what was is named.
    """
    if not dry_run and shutil.which("sbatch") is None:
        raise UserError("There is no sbatch on PATH, so nothing was submitted. Log in where Slurm is, use --cluster "
                        "local, or --dry-run to see what Slurm would get.")
    config = run.config
    code, content = planned_snapshot(run.folder)
    request, given = replace(
        request, config_path=str(frozen_config(config)), overrides=(), chain=_new_id(),
        code=str(code), python=config.launch.python or sys.executable), request
    jobs = plan(config, run, stages, request)
    configuration_problems(config, jobs, given.config_path, here=not dry_run)
    wanted = config.launch.train.nodes
    bad = excluded(run.folder, wanted)
    space = disk(config, jobs)
    print_plan(config, run, jobs, request, where, space)
    if bad:
        print(f"left out  {', '.join(bad)}: failed twice within a day (launch/nodes.jsonl)\n")
    if kept := spared(run.folder, wanted):
        print(f"not left out  {named(kept)}: failed twice within a day as well, but of {wanted} nodes no more than "
              f"{few(wanted)} may be missed (launch.exclude leaves out others)\n")
    cluster_problems(config, jobs, None if dry_run else space, os.environ, [] if dry_run else Scheduler().node_kinds())
    refuse_unsound(run, jobs, request, showing=dry_run)
    say_absent(run, jobs)
    submission = Submission(config, request.chain, request.code, tuple(bad), content)
    if dry_run:
        if rehearse:
            _rehearse(run, jobs, given)
        return print_commands([f"# ---- {job.key}: sbatch would get this, and the job would do\n#      {by_hand(job)}\n"
                               f"{text}" for job, text in scripts(submission, jobs)])
    owed, environment = _owed(run, jobs), {**config.launch.environment, "PYTHONPATH": request.code}
    if not any(job.to_run for job in jobs) and not owed:
        print("nothing to submit: all asked stages are done")
        return 0
    refuse_wrong_packages()
    refuse_unusable_stores(config, jobs, os.environ, here=False)
    _refuse_untrusted(run)
    _clear_environment()
    make_folder(run.folder)
    # From here until all is recorded, or this process ends, nobody else submits this run.
    held = lock(run.folder, "submission", f"the submission of {run.folder}")
    _refuse_queued(run, jobs)
    if rehearse or (rehearse is None and worth_rehearsing(config, jobs)):
        _rehearse(run, jobs, given)  # last: it takes up to some minutes
    take_snapshot(run.folder)
    (run.folder / STOP).unlink(missing_ok=True)  # it was meant for what ran then
    chain = Chain(id=request.chain, submitted=now(), command=tuple(sys.argv), git=git_state(),
                  config=request.config_path, config_sha256=config_hash(config), code=request.code,
                  cluster=cluster_profile(given.config_path, given.overrides))
    submitted = submit(submission, jobs, chain)
    submitted += [submit_evaluation(run.folder, step, request.python, environment) for step in owed]
    if held is not None:
        held.close()
    return _tell(run, submitted, request.force)


def _rehearse(run: Run, jobs: list[Job], given: Options) -> None:
    made = run.manifest("tokenizer")
    rehearse_training(run.config, jobs, given, None if made is None else made.counts["vocab_size"])


def _new_id() -> str:
    """Of a submission: sorts by time."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def _owed(run: Run, jobs: list[Job]) -> list[int]:
    """Checkpoints that still lack a result though training is done; while it runs, its own jobs see to that."""
    every = run.config.launch.evaluate.every_checkpoints
    if not every or {job.to_run for job in jobs if job.stage == "train"} != {False} or run.manifest("train") is None:
        return []
    from launch.slurm.evaluations import owed

    steps = owed(run.folder, every * run.config.train.checkpoint.every_steps, run.config.train.steps)
    queued = {job.name for job in Scheduler().mine() or ()} if steps else set()
    return [step for step in steps if evaluation_name(run.config.name, step) not in queued]


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
    plugins = [*loaded_plugins().values()]
    if found := owner_problems([*folders_of(run.folder), *run.folder.glob("launch/*.json"), *plugins],
                               launch.trusted_group, [run.folder, *plugins]):
        raise UserError(f"Jobs execute what is in the run folder, and others could change it:\n{listed(found)}")


def _clear_environment() -> None:
    """sbatch would take options from the shell's variables, and jobs those of an allocation that the shell is in."""
    foreign = of_another_job(os.environ)
    for name in foreign:
        del os.environ[name]
    options = [name for name in foreign if name.startswith("SBATCH_")]
    if options:
        print(f"note      not passed on to sbatch: {', '.join(options)} of your shell. What jobs ask for stands in the "
              f"section `launch` (python launch/submit.py --explain launch)")
    if len(foreign) > len(options):
        print(f"note      not passed on to the jobs: {len(foreign) - len(options)} variables of the allocation that "
              f"this shell is in (SLURM_*)")


def _refuse_queued(run: Run, jobs: list[Job]) -> None:
    """A run's jobs are in the queue once; where Slurm does not answer, singleton and the lock keep a second from
    training."""
    chains, scheduler, names = read_chains(run.folder), Scheduler(), {job.name for job in jobs}
    known = [job for chain in chains for job in chain.jobs]
    found, mine = scheduler.jobs([job.id for job in known]), scheduler.mine()
    if found is None or mine is None:
        print("Slurm does not say whether jobs of this run are queued already; should they be, the new ones wait")
        return
    queued = [(job.id, job.name) for job in known if found[job.id].queued]
    if queued := queued + [(job.id, job.name) for job in unrecorded(chains, mine)]:
        listing = ", ".join(f"{id} ({name})" for id, name in queued)
        raise UserError(f"Jobs of {run.folder} are in the queue already: {listing}. Watch them with `python "
                        f"launch/status.py --run {run.folder}`, remove them with `python launch/submit.py --cancel "
                        f"{run.folder}`, or use name=<another> for a run of its own.")
    if named := [job for job in mine if job.name in names]:
        print(f"other jobs of the same names are in the queue: {', '.join(f'{job.id} ({job.name})' for job in named)}; "
              f"training waits for its namesake, whose ever it is")


def _tell(run: Run, submitted: list[ChainJob], forced: bool) -> int:
    without = " without --force" if forced else ""
    for entry in submitted:
        after = f" after {', '.join(entry.dependencies)}" if entry.dependencies else ""
        kind = "" if entry.kind == "job" else f" ({' '.join(filter(None, [entry.kind, entry.phase]))})"
        print(f"{entry.stage:<9} job {entry.id}{kind}{after}")
    print(f"\nlogs in {run.folder / LOGS}; the chain is recorded in {run.folder / CHAIN}\n"
          f"`python launch/status.py --run {run.folder} --watch` shows it; the same command{without} submits what is "
          f"left")
    return 0
