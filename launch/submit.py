"""Start stages of a run, on this machine or through Slurm.

    python launch/submit.py --stage all --config configs/demo.yaml --cluster local
    python launch/submit.py --stage train --config configs/demo.yaml --cluster local train.steps=50
    python launch/submit.py --stage train,convert --config configs/demo.yaml name=trial reuse=runs/demo train.lr=1e-3
    python launch/submit.py --stage all --nodes 4 --gpus-per-node 8 --cluster ours --config configs/llama3_8b.yaml
    python launch/submit.py --stage train --nodes 4 --config configs/demo.yaml --dry-run

The plan is printed first; whatever cannot work is refused before anything starts. Ctrl-C stops cleanly, and the
same command continues. `drover status RUN` shows how far a run is. Exit status: 0 all asked stages are done (Slurm:
submitted), 2 refused, 130 stopped. `drover run` and `drover plan` do the same.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: find the packages, and let no file of this folder shadow a library
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import json
import os
import shlex
import shutil
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from drover.launch.arguments import add_config, configuration, overrides, refuse_unusable_places
from drover.launch.checks import (
    absence,
    absent_stages,
    configuration_problems,
    fitting,
    refuse_jobs,
    refuse_unusable_stores,
    say_absent,
)
from drover.launch.describe import by_hand, print_plan
from drover.launch.forecast import Disk, disk
from drover.launch.local import find_machine, run_jobs
from drover.launch.plan import Job, Options, plan
from drover.launch.rehearsing import rehearse_training
from drover.launch.slurm.sbatch import scripts
from drover.launch.slurm.scheduler import Scheduler
from drover.launch.slurm.submission import for_slurm, submit_chain, with_site_limits
from drover.pipeline.config.loading import load_config
from drover.pipeline.config.places import make_folder
from drover.pipeline.config.tree import Config, changed
from drover.pipeline.contract.preparation import note_done
from drover.pipeline.contract.run import Run
from drover.pipeline.contract.stages import STAGES, parse_stages
from drover.pipeline.contract.state import STOP
from drover.pipeline.core.command_line import Parser, Program, add_json
from drover.pipeline.core.console import echo
from drover.pipeline.core.errors import UserError, absent, refusals


@dataclass(frozen=True)
class Request:
    """What was planned and is not refused. disk: what it may write."""

    run: Run
    jobs: list[Job]
    options: Options
    disk: Disk


def add_options(parser: Parser) -> None:
    """What to do, where and how."""
    parser.set_defaults(json=False)
    what = parser.add_argument_group("what")
    what.add_argument("--stage", metavar="STAGES", help="shard, tokenizer, encode, train, convert, evaluate, report, "
                                                        "several with commas, or all")
    add_config(parser)
    how = parser.add_argument_group("how")
    how.add_argument("--dry-run", action="store_true", help="only print the plan and the commands or sbatch scripts")
    how.add_argument("--force", action="store_true",
                     help="rebuild every stage asked for (old checkpoints are renamed, never deleted)")
    how.add_argument("--accept-drift", action="store_true",
                     help="continue although inputs or settings have changed; every later manifest records it")
    how.add_argument("--rehearse", action=argparse.BooleanOptionalAction, default=None,
                     help="for Slurm: compute the memory of a training step before the job is submitted, and refuse "
                          "what does not fit (default: for several nodes with GPUs; takes up to a minute)")


def _launch(options: argparse.Namespace) -> int:
    """Plan, show the plan, refuse what cannot work, and hand the rest to this machine or to Slurm."""
    request = _planned(options)
    say_absent(request.run, request.jobs)
    return _show(request, options) if options.dry_run else _start(request, options)


def _planned(options: argparse.Namespace) -> Request:
    """Plan, and print the plan unless it is for programs.

    Raises:
        UserError: names all that cannot work, with a command that can where there is one.
    """
    if options.stage is None:
        raise UserError("No stage is given. Add --stage all, or the stages you want (--help names them).")
    config, stages = configuration(options), parse_stages(options.stage)
    cluster, where, misplaced = _cluster(options)
    here, showing, machine = cluster == "local", options.dry_run, find_machine(config.launch.device)
    refuse_unusable_places(config, options.config)
    if not here and not showing:
        config = with_site_limits(config)
    run = Run(config)
    asked = Options(cluster, options.config, tuple(overrides(options)), options.force, options.accept_drift, machine)
    if not here:
        asked = for_slurm(run, asked)
    elif options.rehearse:
        raise UserError("--rehearse is for jobs on Slurm, but this is none. Leave it out, or look at a layout with "
                        "drover rehearse (--cpu for ranks without GPUs).")
    else:
        where += f"; {machine.cores} cores, {machine.gpus or 'no'} GPU{'' if machine.gpus == 1 else 's'}"
    jobs = plan(config, run, stages, asked)
    missing = [] if showing else absent_stages(run, jobs)
    # What is missing has to run too: all that is wrong with it belongs in the same answer.
    needed = plan(config, run, parse_stages(",".join([*stages, *missing])), asked) if missing else jobs
    request = Request(run, jobs, asked, disk(config, jobs))
    invalid = refusals(partial(configuration_problems, config, needed, options.config, here=here or not showing))
    uninstalled = absent("Slurm", "submitit", "use --cluster local") if not here and not showing else []
    if not options.json and not invalid:
        print_plan(run, jobs, asked, where, request.disk)
    if found := invalid + refusals(partial(
            refuse_jobs, run, needed, asked, disk(config, needed), os.environ, showing=showing, valid=not invalid,
            known=[*misplaced, *uninstalled, *absence(run, jobs, missing)])):
        advice = [] if showing or options.json else _advice(options, config, needed, asked,
                                                            misplaced=bool(misplaced), packages=bool(uninstalled))
        raise UserError("\n".join([*found, *advice]))
    return request


def _show(request: Request, options: argparse.Namespace) -> int:
    """Print the commands, or the scripts for Slurm."""
    run, running = request.run, [job for job in request.jobs if job.to_run]
    if options.rehearse:
        rehearse_training(run, request.jobs, request.options)
    if request.options.cluster == "local":
        shown = [f"# {job.stage}{f', each of {job.ranks} ranks' * (job.ranks > 1)}\n{by_hand(job)}\n"
                 for job in running]
    else:
        shown = [f"# ---- {job.key}: sbatch would get this, and the job would do\n#      {by_hand(job)}\n{text}"
                 for job, text in scripts(run.config, running)]
    echo(*shown or ["nothing to do: all asked stages are done"])
    return 0


def _start(request: Request, options: argparse.Namespace) -> int:
    """Run the stages here, or submit them."""
    run, jobs, local = request.run, request.jobs, request.options.cluster == "local"
    for stage in {job.stage: None for job in jobs if not job.to_run}:
        note_done(run, stage, locked=False)
    refuse_unusable_stores(run.config, jobs, os.environ, here=local)
    if not local:
        return submit_chain(run, jobs, request.options, rehearse=options.rehearse)
    if any(job.to_run for job in jobs):
        make_folder(run.folder)
    (run.folder / STOP).unlink(missing_ok=True)  # it was meant for what ran then
    return run_jobs(run.config, jobs, request.options)


def _cluster(options: argparse.Namespace) -> tuple[Literal["local", "slurm"], str, list[str]]:
    """Where to run, why there, and why that cannot be."""
    asked, explicit = options.cluster, options.nodes is not None or options.gpus_per_node is not None
    has_sbatch = shutil.which("sbatch") is not None
    if asked not in ("auto", "local"):
        unusable = ["There is no sbatch on PATH, so nothing can be submitted. Log in to a machine with Slurm, use "
                    "--cluster local, or use --dry-run to see the scripts."] * (
                        not has_sbatch and not options.dry_run)
        return "slurm", "as asked" if asked == "slurm" else f"profile {asked}", unusable
    if asked == "auto" and has_sbatch:
        return "slurm", "sbatch is on PATH", []
    why = "as asked" if asked == "local" else "no sbatch on PATH"
    if explicit and asked == "auto" and options.dry_run:
        return "slurm", "no sbatch here: only shown", []
    return "local", why, [
        f"--nodes and --gpus-per-node are for Slurm, but this runs here ({why}). Leave them out "
        f"(launch.processes=N sets the ranks here), or use --cluster slurm where Slurm is; `drover plan --cluster "
        f"slurm` shows what it would get."] * explicit


def _advice(options: argparse.Namespace, config: Config, jobs: Sequence[Job], request: Options, *, misplaced: bool,
            packages: bool) -> list[str]:
    """A command that would start what the refused one is for; [] if there is none so simple. Every check but that of
    packages is done on it.

    Args:
        jobs: those that the command needs, on the cluster of `request`.
        misplaced: they cannot run there, so they are to run on this machine.
        packages: the launcher itself lacks some.
    """
    stages = list(dict.fromkeys(job.stage for job in jobs))
    better = argparse.Namespace(**vars(options))
    if misplaced:
        better.cluster, better.nodes, better.gpus_per_node = "local", None, None
        request = replace(request, cluster="local")
    elif request.cluster == "slurm":
        settings = fitting(config, [job for job in jobs if job.to_run], Scheduler().node_kinds())
        kept = [word for word in options.overrides if word.partition("=")[0] not in settings]
        for name, key in (("nodes", "launch.train.nodes"), ("gpus_per_node", "launch.gpus_per_node")):
            if key in settings and getattr(options, name) is not None:
                setattr(better, name, settings.pop(key))
        better.overrides = [*kept, *(f"{key}={value}" for key, value in settings.items())]
    run = Run(changed(load_config(better.config, overrides(better), check=False),
                      {"launch.limits": config.launch.limits}))
    jobs = plan(run.config, run, stages, request)
    checked = partial(configuration_problems, run.config, jobs, better.config)
    if refusals(partial(checked, installed=True),
                partial(refuse_jobs, run, jobs, request, disk(run.config, jobs), os.environ)):
        return []
    program = ["python", sys.argv[0]] if Path(sys.argv[0]).name == "submit.py" else ["drover", "run"]
    words = ["--stage", "all" if {*stages} == {*STAGES} else ",".join(stages), "--config", better.config]
    for name, usual in (("cluster", "auto"), ("nodes", None), ("gpus_per_node", None)):
        if (value := getattr(better, name)) != usual:
            words += [f"--{name.replace('_', '-')}", str(value)]
    words += [word for word, given in (("--force", better.force), ("--accept-drift", better.accept_drift),
                                       ("--rehearse", better.rehearse), ("--no-rehearse", better.rehearse is False))
              if given]
    this = "Once the packages are installed, this" if packages or refusals(checked) else "This"
    return [f"{this} command would start: {shlex.join([*program, *words, *better.overrides])}"]


def _plan(options: argparse.Namespace) -> int:
    """With --json, notes for people go to stderr."""
    if not options.json:
        return _launch(options)
    with redirect_stdout(sys.stderr):
        request = _planned(options)
    print(json.dumps({"run": str(request.run.folder), "cluster": request.options.cluster,
                      "disk_bytes": request.disk.parts, "jobs": [
        {"job": job.key, "stage": job.stage, "state": "to do" if job.forced else job.state.kind,
         "reasons": job.state.reasons, "nodes": job.nodes, "ranks": job.ranks, "after": job.dependencies,
         "command": by_hand(job)} for job in request.jobs]}, indent=1))
    return 0


def _run_options(parser: Parser) -> None:
    add_options(parser)
    parser.set_defaults(stage="all")


def _plan_options(parser: Parser) -> None:
    _run_options(parser)
    add_json(parser)
    parser.set_defaults(dry_run=True)


RUN = """Run the stages, on this machine or through Slurm. Stages that are done are skipped.

    drover run --config configs/demo.yaml
    drover run --config configs/demo.yaml train.steps=50
    drover run --stage train,convert --config configs/demo.yaml name=trial reuse=runs/demo train.lr=1e-3
    drover run --nodes 4 --gpus-per-node 8 --cluster ours --config configs/llama3_8b.yaml
"""
INTERRUPTED = "stopped before anything was started"
main = Program("python launch/submit.py", __doc__, add_options, _launch, mixed=True, interrupted=INTERRUPTED)
run = Program("drover run", RUN, _run_options, _launch, mixed=True, interrupted=INTERRUPTED)
show_plan = Program("drover plan", "Show what `drover run` would do with these options. Nothing is started.",
                    _plan_options, _plan, mixed=True)

if __name__ == "__main__":
    sys.exit(main())
