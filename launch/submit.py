"""Start stages of a run, on this machine or through Slurm.

    python launch/submit.py --stage all configs/demo.yaml --cluster local
    python launch/submit.py --stage train configs/demo.yaml --cluster local train.steps=50
    python launch/submit.py --stage train,convert configs/demo.yaml name=trial reuse=runs/demo train.lr=1e-3
    python launch/submit.py --stage all --nodes 4 --gpus-per-node 8 --cluster ours configs/llama3_8b.yaml
    python launch/submit.py --stage train --nodes 4 configs/demo.yaml --dry-run

Whatever cannot work is refused before anything starts; then the plan is printed. Ctrl-C stops cleanly, and the
same command continues. `drover status RUN` shows how far a run is. Exit status: 0 all asked stages are done (Slurm:
submitted), 2 refused, 130 stopped. `drover run` and `drover plan` do the same.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: find the packages, and let no file of this folder shadow a library
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import shutil
from functools import partial
from typing import Literal

from drover.launch.arguments import USUAL, add_config, configuration, overrides, refuse_unusable_places
from drover.launch.checks import (
    absence,
    configuration_problems,
    say_absent,
    start_problems,
)
from drover.launch.describe import by_hand, print_plan
from drover.launch.local import find_machine, run_jobs
from drover.launch.plan import Job, Options, plan
from drover.launch.slurm.options import parameters
from drover.launch.slurm.submission import for_slurm, refuse_queued, submit_chain
from drover.pipeline.config.loading import refusal
from drover.pipeline.config.section import make_folder
from drover.pipeline.config.tree import Config
from drover.pipeline.contract.entry import clear_done
from drover.pipeline.contract.run import Run
from drover.pipeline.contract.stages import parse_stages
from drover.pipeline.contract.state import LOCAL, STOP, now
from drover.pipeline.core.console import Parser, Program, counted, echo
from drover.pipeline.core.errors import UserError, absent, all_problems, refusals


def add_options(parser: Parser) -> None:
    """What to do, where and how."""
    what = parser.add_argument_group("what")
    what.add_argument("--stage", metavar="STAGES", help="shard, tokenizer, encode, train, convert, evaluate, report, "
                                                        "several with commas, or all")
    add_config(parser)
    how = parser.add_argument_group("how")
    how.add_argument("--dry-run", action="store_true",
                     help="only print the plan, and the commands or the parameters of submitit")
    parser.set_defaults(commands=True)
    how.add_argument("--force", action="store_true",
                     help="rebuild every stage asked for (old checkpoints are renamed, never deleted)")
    how.add_argument("--accept-changes", action="store_true",
                     help="continue training although inputs or settings have changed, and rebuild the stages "
                          "after it")


def _launch(options: argparse.Namespace) -> int:
    """Plan, show the plan, refuse what cannot work, and hand the rest to this machine or to Slurm.

    Raises:
        UserError: names all that cannot work.
    """
    cluster, where, problems = _cluster(options)
    local, showing = cluster == "local", options.dry_run
    unsaid = ["No stage is given. Add --stage all, or the stages you want (--help names them)."] * (not options.stage)
    if options.config is None and not showing:
        unsaid.append(f"No configuration, a word that ends in .yaml, is given, so nothing starts. `drover run {USUAL}` "
                      f"runs the demo. `drover init FOLDER` writes a configuration for your own text.")
    if unsaid:
        raise UserError(all_problems(unsaid, "The command is not complete"))
    config, stages = configuration(options), parse_stages(options.stage)
    machine = find_machine(config.launch.device)
    refuse_unusable_places(config, options.config)
    run = Run(config)
    requested = Options(cluster, options.config, tuple(overrides(options)), options.force, options.accept_changes,
                        machine, chain=f"{LOCAL}{now()}")
    if local:
        where += f"; {machine.cores} cores, {counted(machine.gpus, 'GPU')}"
    else:
        requested = for_slurm(run, requested)
    jobs = plan(config, run, stages, requested)
    nothing = not any(job.to_run for job in jobs)
    invalid = configuration_problems(config, jobs, local=local or not showing)
    if not showing:
        problems += absence(run, jobs)
        problems += [] if local else absent("Slurm", "submitit", "use --cluster local")
    if not invalid:
        problems += start_problems(run, jobs, requested)
    refused = [str(refusal(invalid, options.config))] if invalid else []
    if problems:
        refused.append(all_problems(problems, "This cannot be started", len(problems)))
    if refused:
        raise UserError("\n".join(refused))
    print_plan(run, jobs, requested, where)
    say_absent(run, jobs)
    if showing:
        if nothing:
            echo("nothing to do: all asked stages are done")
        if options.commands:
            _show(config, jobs, local=local)
        for problem in [] if local else refusals(partial(refuse_queued, run)):
            echo(problem)
        return 0
    for job in jobs:
        if not job.to_run:
            clear_done(run, job.stage, locked=False)
    if not local:
        return submit_chain(run, jobs, requested)
    if not nothing:
        make_folder(run.folder)
    (run.folder / STOP).unlink(missing_ok=True)  # it was meant for what ran then
    return run_jobs(config, jobs, requested)


def _show(config: Config, jobs: list[Job], *, local: bool) -> None:
    """Print the commands, or for Slurm the parameters of submitit."""
    import yaml  # not above: a Python without packages, or too old for Drover, is named by drover/__init__.py

    running = [job for job in jobs if job.to_run]
    ids = {job.stage: f"ID_OF_{job.stage}" for job in running}
    for job in running:
        if local:
            echo(f"# {job.stage}{f', each of {job.ranks} ranks' * (job.ranks > 1)}\n{by_hand(job)}\n")
        else:
            echo(f"# ---- {job.stage}: submitit would get these parameters, and the job would do\n"
                 f"#      {by_hand(job)}\n" + yaml.safe_dump(parameters(config, job, ids), sort_keys=False, width=1000))


def _cluster(options: argparse.Namespace) -> tuple[Literal["local", "slurm"], str, list[str]]:
    """Where to run, why there, and why that cannot be."""
    requested, sbatch = options.cluster, shutil.which("sbatch")
    for_slurm_alone = options.nodes is not None or options.gpus_per_node is not None
    why = f"--cluster {requested}" if requested != "auto" else f"{'' if sbatch else 'no '}sbatch on PATH"
    usable = sbatch is not None or options.dry_run
    if requested not in ("auto", "local") or (requested == "auto" and usable and (sbatch or for_slurm_alone)):
        return "slurm", why, [
            "There is no sbatch on PATH, so nothing can be submitted. Log in to a machine with Slurm, use --cluster "
            "local, or use --dry-run to see what it would get."] * (not usable)
    return "local", why, [
        f"--nodes and --gpus-per-node are for Slurm, but this runs here ({why}). Leave them out "
        f"(launch.processes=N sets the ranks here), or use --cluster slurm where Slurm is; `drover plan --cluster "
        f"slurm` shows what it would get."] * for_slurm_alone


def _run_options(parser: Parser) -> None:
    add_options(parser)
    parser.set_defaults(stage="all")


def _plan_options(parser: Parser) -> None:
    _run_options(parser)
    parser.set_defaults(dry_run=True, commands=False)


RUN = """Run the stages, on this machine or through Slurm. Stages that are done are skipped.

    drover run configs/demo.yaml
    drover run configs/demo.yaml train.steps=50
    drover run configs/demo.yaml --stage train name=trial reuse=runs/demo
    drover run configs/llama3_8b.yaml --nodes 4 --gpus-per-node 8 --cluster ours
"""
INTERRUPTED = "stopped before anything was started"
main = Program("python launch/submit.py", __doc__, add_options, _launch, mixed=True, interrupted=INTERRUPTED)
run = Program("drover run", RUN, _run_options, _launch, mixed=True, interrupted=INTERRUPTED)
show_plan = Program("drover plan", "Show what `drover run` would do with these options. Nothing is started. `drover "
                    "run --dry-run` also prints the commands, or what submitit gets.",
                    _plan_options, _launch, mixed=True)

if __name__ == "__main__":
    sys.exit(main())
