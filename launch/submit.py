"""Start stages of a run, on this machine or through Slurm; stop them, cancel them, show their logs.

    python launch/submit.py --stage all --config configs/demo.yaml --cluster local
    python launch/submit.py --stage train --config configs/demo.yaml --cluster local train.steps=50
    python launch/submit.py --stage train,convert --config configs/demo.yaml name=trial reuse=runs/demo train.lr=1e-3
    python launch/submit.py --stage all --nodes 4 --gpus-per-node 8 --cluster ours --config configs/llama3_8b.yaml
    python launch/submit.py --stage train --nodes 4 --config configs/demo.yaml --dry-run
    python launch/submit.py --why runs/demo
    python launch/submit.py --why train --config configs/demo.yaml train.lr=1e-3
    python launch/submit.py --explain train.lr
    python launch/submit.py --stop runs/demo
    python launch/submit.py --cancel runs/demo
    python launch/submit.py --logs runs/demo train --follow

The plan is printed first; whatever cannot work is refused before anything starts. Ctrl-C stops cleanly, and the
same command continues. `drover status RUN` shows how far a run is. Exit status: 0 all asked stages are done (Slurm:
submitted), 2 refused, 130 stopped. `drover run`, `plan`, `why`, `explain`, `logs`, `stop` and `cancel` do the same.
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
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from drover.pipeline.core.command_line import FoundRun, Parser, Program, add_json, add_run, find_run
from drover.pipeline.core.console import echo
from drover.pipeline.core.errors import UserError, absent, refusals

if TYPE_CHECKING:
    from drover.launch.plan import Job, Options
    from drover.pipeline.config.tree import Config

USUAL = Path("configs") / "demo.yaml"
CLUSTERS = ("auto", "slurm", "local")
"""Values of --cluster that are no profiles."""


def add_options(parser: Parser) -> None:
    """What to do, where and how."""
    parser.set_defaults(json=None)
    what = parser.add_argument_group("what")
    what.add_argument("--stage", metavar="STAGES", help="shard, tokenizer, encode, train, convert, evaluate, report, "
                                                        "several with commas, or all")
    _add_config(parser)
    how = parser.add_argument_group("how")
    how.add_argument("--dry-run", action="store_true", help="only print the plan and the commands or sbatch scripts")
    how.add_argument("--force", action="store_true",
                     help="rebuild every stage asked for (old checkpoints are renamed, never deleted)")
    how.add_argument("--accept-drift", action="store_true",
                     help="continue although inputs or settings have changed; every later manifest records it")
    how.add_argument("--rehearse", action=argparse.BooleanOptionalAction, default=None,
                     help="for Slurm: compute the memory of a training step before the job is submitted, and refuse "
                          "what does not fit (default: for several nodes with GPUs; takes up to a minute)")


def _add_config(parser: Parser) -> None:
    parser.add_argument("--config", metavar="FILE", help=f"YAML file of the run ({USUAL})")
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value",
                        help="overrides a setting of the file")
    where = parser.add_argument_group("where")
    where.add_argument("--cluster", default="auto", metavar="auto|slurm|local|PROFILE",
                       help="auto (default): Slurm if sbatch is on PATH, else this machine; PROFILE: Slurm with the "
                            "settings of configs/clusters/PROFILE.yaml, or of a file")
    where.add_argument("--nodes", type=int, metavar="N", help="nodes for train (launch.train.nodes)")
    where.add_argument("--gpus-per-node", type=int, metavar="N", help="GPUs per node (launch.gpus_per_node)")


def _usual_config() -> str:
    """The demo's configuration if none is given, which is printed."""
    for path in (USUAL, Path(__file__).resolve().parent.parent / USUAL):
        if path.is_file():
            echo(f"config    {path}, since no --config is given")
            return str(path)
    raise UserError("No configuration is given. Add --config FILE (--help shows complete commands).")


def _config(options: argparse.Namespace) -> Config:
    from drover.pipeline.config.loading import load_config

    options.config = options.config or _usual_config()
    return load_config(options.config, _overrides(options), check=False)


def _launch(options: argparse.Namespace) -> int:
    """Plan, show the plan, refuse what cannot work, and hand the rest to this machine or to Slurm."""
    if options.stage is None:
        raise UserError("No stage is given. Add --stage all, or the stages you want (--help names them).")
    config = _config(options)
    from drover.pipeline.contract.stages import parse_stages

    stages = parse_stages(options.stage)
    from drover.launch.checks import (
        absence,
        absent_stages,
        configuration_problems,
        refuse_jobs,
        refuse_unusable_places,
        refuse_unusable_stores,
        say_absent,
    )
    from drover.launch.describe import by_hand, print_plan
    from drover.launch.forecast import disk
    from drover.launch.local import find_machine, run_jobs
    from drover.launch.plan import Options, plan
    from drover.pipeline.config.places import make_folder
    from drover.pipeline.contract.preparation import note_done
    from drover.pipeline.contract.run import Run
    from drover.pipeline.contract.state import STOP

    cluster, where, misplaced = _cluster(options)
    here, showing, machine = cluster != "slurm", options.dry_run, find_machine(config.launch.device)
    request = Options(cluster, options.config, tuple(_overrides(options)), options.force,
                      options.accept_drift, machine)
    refuse_unusable_places(config, options.config)
    if not here and not showing:
        from drover.launch.slurm.submit.request import with_site_limits
        config = with_site_limits(config)
    run = Run(config)
    if here and options.rehearse:
        raise UserError("--rehearse is for jobs on Slurm, but this is none. Leave it out, or look at a layout with "
                        "drover rehearse (--cpu for ranks without GPUs).")
    if here:
        where += f"; {machine.cores} cores, {machine.gpus or 'no'} GPU{'' if machine.gpus == 1 else 's'}"
    else:
        from drover.launch.slurm.submit.request import for_slurm, submit_chain
        from drover.launch.slurm.submit.sbatch import scripts
        request = for_slurm(run, request)
    jobs, environment = plan(config, run, stages, request), os.environ
    missing = [] if showing else absent_stages(run, jobs)
    # What is missing has to run too: all that is wrong with it belongs in the same answer.
    needed = plan(config, run, parse_stages(",".join([*stages, *missing])), request) if missing else jobs
    space = disk(config, jobs)
    invalid = refusals(partial(configuration_problems, config, needed, options.config, here=here or not showing))
    uninstalled = absent("Slurm", "submitit", "use --cluster local") if not here and not showing else []
    if not options.json and not invalid:
        print_plan(run, jobs, request, where, space)
    if found := invalid + refusals(partial(
            refuse_jobs, run, needed, request, disk(config, needed), environment, showing=showing, valid=not invalid,
            known=[*misplaced, *uninstalled, *absence(run, jobs, missing)])):
        advice = [] if showing or options.json else _advice(options, config, needed, request,
                                                            misplaced=bool(misplaced), packages=bool(uninstalled))
        raise UserError("\n".join([*found, *advice]))
    running = [job for job in jobs if job.to_run]
    if options.json:
        print(json.dumps({"run": str(run.folder), "cluster": request.cluster, "disk_bytes": space.parts, "jobs": [
            {"job": job.key, "stage": job.stage, "state": "to do" if job.forced else job.state.kind,
             "reasons": job.state.reasons, "nodes": job.nodes, "ranks": job.ranks, "after": job.dependencies,
             "command": by_hand(job)} for job in jobs]}, indent=1), file=options.json)
        return 0
    say_absent(run, jobs)
    if showing:
        if options.rehearse:
            from drover.launch.rehearsing import rehearse_training
            rehearse_training(run, jobs, request)
        shown = [f"# {job.stage}{f', each of {job.ranks} ranks' * (job.ranks > 1)}\n{by_hand(job)}\n"
                 for job in running] if here else [
            f"# ---- {job.key}: sbatch would get this, and the job would do\n#      {by_hand(job)}\n{text}"
            for job, text in scripts(config, running)]
        echo(*shown or ["nothing to do: all asked stages are done"])
        return 0
    for stage in {job.stage: None for job in jobs if not job.to_run}:
        note_done(run, stage, locked=False)
    refuse_unusable_stores(config, jobs, environment, here=here)
    if not here:
        return submit_chain(run, jobs, request, rehearse=options.rehearse)
    if running:
        make_folder(run.folder)
    (run.folder / STOP).unlink(missing_ok=True)  # it was meant for what ran then
    return run_jobs(config, jobs, request)


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
    from drover.launch.checks import configuration_problems, fitting, refuse_jobs
    from drover.launch.forecast import disk
    from drover.launch.plan import plan
    from drover.launch.slurm.scheduler import Scheduler
    from drover.pipeline.config.loading import load_config
    from drover.pipeline.config.tree import changed
    from drover.pipeline.contract.run import Run
    from drover.pipeline.contract.stages import STAGES

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
    run = Run(changed(load_config(better.config, _overrides(better), check=False),
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


def _overrides(options: argparse.Namespace) -> list[str]:
    profile = None if options.cluster in CLUSTERS else options.cluster
    given = {"launch.cluster": profile, "launch.train.nodes": options.nodes,
             "launch.gpus_per_node": options.gpus_per_node}
    return [*options.overrides, *(f"{key}={value}" for key, value in given.items() if value is not None)]


def _stop(options: argparse.Namespace) -> int:
    from drover.launch.slurm.control import stop
    return stop(options.run)


def _cancel(options: argparse.Namespace) -> int:
    from drover.launch.slurm.control import cancel
    return cancel(options.run)


def _logs(options: argparse.Namespace) -> int:
    from drover.launch.slurm.control import logs
    return logs(options.run, options.stage, rank=options.rank, follow=options.follow)


def _explain(options: argparse.Namespace) -> int:
    from drover.pipeline.config.explaining import explain

    key, overridden, _ = options.explain.partition("=")  # `--explain train.lr=5`: the override was meant as one
    options.overrides = [*[options.explain] * bool(overridden), *options.overrides]
    echo(explain(_config(options), key))
    return 0


def _why(options: argparse.Namespace) -> int:
    from drover.pipeline.contract.stages import STAGES

    if options.config is None and {*options.why.split(",")} - {*STAGES, "all"}:
        from drover.launch.slurm.control import why as why_stopped
        try:
            return why_stopped(find_run(options.why))
        except UserError as error:
            raise UserError(f"{options.why} is no stage. {error}") from None
    config = _config(options)
    from drover.launch.checks import refuse_unusable_places
    from drover.pipeline.contract.run import Run
    from drover.pipeline.contract.stages import parse_stages

    refuse_unusable_places(config, options.config)
    for name in parse_stages(options.why):
        echo(Run(config).why(name))
    return 0


def _asking(parser: Parser, name: str, **about: Any) -> None:
    """A question about a configuration."""
    parser.add_argument(name, **about)
    _add_config(parser)


def _log_options(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", action=FoundRun, help="a run's name (demo) or folder (runs/demo)")
    parser.add_argument("stage", metavar="STAGE", help="such as train")
    parser.add_argument("--rank", type=int, default=0, metavar="N", help="the rank whose output is shown (default 0)")
    parser.add_argument("--follow", action="store_true", help="keep printing as the output grows, also after restarts")


def _run_options(parser: Parser) -> None:
    add_options(parser)
    parser.set_defaults(stage="all")


def _plan(options: argparse.Namespace) -> int:
    """With --json, notes for people go to stderr."""
    options.json = sys.stdout if options.json else None
    with redirect_stdout(sys.stderr) if options.json else nullcontext():
        return _launch(options)


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
script = Program("python launch/submit.py", __doc__, add_options, _launch, mixed=True, interrupted=INTERRUPTED)
run = Program("drover run", RUN, _run_options, _launch, mixed=True, interrupted=INTERRUPTED)
show_plan = Program("drover plan", "Show what `drover run` would do with these options. Nothing is started.",
                    _plan_options, _plan, mixed=True)
show_logs = Program("drover logs", "Show the output of a stage's newest start.", _log_options, _logs, mixed=True)
stop = Program("drover stop", "Let training save a checkpoint and end. The command that started it continues it.",
               add_run, _stop)
cancel = Program("drover cancel", "Cancel a run's jobs in Slurm.", add_run, _cancel)
why = Program("drover why", "Show why a run stopped: the end of each start, with its last lines. Or show why a stage "
              "is up to date or out of date.", partial(_asking, name="why", metavar="RUN|STAGE"), _why, mixed=True)
explain = Program("drover explain", "Show what a setting or section means, its type, default and value.",
                  partial(_asking, name="explain", nargs="?", default="", metavar="KEY",
                          help="such as train.lr or train (default: all settings)"),
                  _explain, mixed=True)
INSTEAD = {"--why": why, "--explain": explain, "--logs": show_logs, "--stop": stop, "--cancel": cancel}
"""Options of the script that are commands of their own; their arguments follow."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The script: start stages, or what an option of INSTEAD says."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    for at, word in enumerate(words):
        name, _, value = word.partition("=")
        if name in INSTEAD:
            return INSTEAD[name]([*([value] if value else []), *words[at + 1:], *words[:at]], f"{script.name} {name}")
    return script(words)


if __name__ == "__main__":
    sys.exit(main())
