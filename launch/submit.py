"""Start stages of a run, on this box or through Slurm; stop them, cancel them, show their logs.

    python launch/submit.py --stage all --config configs/demo.yaml --cluster local
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: find the packages, and shadow no library with a file beside this one
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import os
import shutil
from typing import TYPE_CHECKING

from drover.pipeline.errors import UserError

if TYPE_CHECKING:
    from drover.pipeline.config.tree import Config

EXAMPLES = """\
examples:
  python launch/submit.py --stage all --config configs/demo.yaml --cluster local
  python launch/submit.py --stage train --config configs/demo.yaml --cluster local train.steps=50
  python launch/submit.py --stage train,convert --config configs/demo.yaml name=trial reuse=runs/demo train.lr=1e-3
  python launch/submit.py --stage all --nodes 4 --gpus-per-node 8 --cluster ours --config configs/llama3_8b.yaml
  python launch/submit.py --stage train --nodes 4 --config configs/demo.yaml --dry-run
  python launch/submit.py --why train --config configs/demo.yaml train.lr=1e-3
  python launch/submit.py --explain train.lr
  python launch/submit.py --stop runs/demo
  python launch/submit.py --logs runs/demo train --follow

The plan is printed first; whatever cannot work is refused before anything starts. Ctrl-C stops cleanly, and the
same command continues. `python launch/status.py --run RUN` shows how far a run is. Exit status: 0 all asked stages are
done (Slurm: submitted), 2 refused, 130 stopped.
"""


USUAL = Path("configs") / "demo.yaml"


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit status."""
    options = parser().parse_intermixed_args(arguments)
    try:
        return _main(options)
    except UserError as error:
        sys.stdout.flush()
        print(f"\ndrover stops here: {error}", file=sys.stderr, flush=True)
        return error.exit_status
    except KeyboardInterrupt:
        print("\nstopped before anything was started", file=sys.stderr, flush=True)
        return 130
    except BrokenPipeError:  # `| head` has seen enough
        sys.stderr.close()
        return 1


def parser() -> argparse.ArgumentParser:
    """The launcher's arguments."""
    result = argparse.ArgumentParser(prog="python launch/submit.py", description=(__doc__ or "").splitlines()[0],
                                     epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = result.add_argument_group("what")
    what.add_argument("--stage", metavar="STAGES", help="shard, tokenizer, encode, train, convert, evaluate, report, "
                                                        "all, or a comma list")
    what.add_argument("--config", metavar="FILE", help=f"YAML file of the run ({USUAL})")
    what.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings laid over the file")
    where = result.add_argument_group("where")
    where.add_argument("--cluster", default="auto", metavar="auto|slurm|local|PROFILE",
                       help="auto: Slurm where sbatch is on PATH, else this box (default); a profile is Slurm with the "
                            "settings of configs/clusters/PROFILE.yaml, or of a file")
    where.add_argument("--nodes", type=int, metavar="N", help="Slurm nodes for train (launch.train.nodes)")
    where.add_argument("--gpus-per-node", type=int, metavar="N", help="GPUs per Slurm node (launch.gpus_per_node)")
    how = result.add_argument_group("how")
    how.add_argument("--dry-run", action="store_true", help="print the plan and the commands or sbatch scripts only")
    how.add_argument("--force", action="store_true",
                     help="rebuild every stage asked for (training output is set aside, never deleted)")
    how.add_argument("--accept-drift", action="store_true",
                     help="go on although inputs or settings changed; recorded in every later manifest")
    how.add_argument("--rehearse", action=argparse.BooleanOptionalAction, default=None,
                     help="for Slurm: take a step of a few ranks, without GPUs, before the job queues, and refuse "
                          "what does not fit (default: for several nodes with GPUs; seconds to a minute)")
    asking = result.add_argument_group("asking")
    asking.add_argument("--explain", nargs="?", const="", metavar="KEY",
                        help="what a setting or section means, its type, default and value (all without KEY)")
    asking.add_argument("--why", metavar="STAGE", help="why a stage is or is not up to date")
    control = result.add_argument_group("what was started (RUN: a run's folder)")
    control.add_argument("--stop", metavar="RUN", help="let training save and leave; it does not go on by itself")
    control.add_argument("--cancel", metavar="RUN", help="remove the run's jobs from Slurm, last ones first")
    control.add_argument("--logs", nargs=2, metavar=("RUN", "STAGE"), help="show what a stage's newest start printed")
    control.add_argument("--rank", type=int, default=0, metavar="N", help="with --logs: of this rank (0)")
    control.add_argument("--follow", action="store_true", help="with --logs: go on as it grows, over restarts")
    return result


def _main(options: argparse.Namespace) -> int:
    if options.stop or options.cancel or options.logs:
        return _control(options)
    if options.explain is not None:
        return _explain(options)
    if options.config is None:
        options.config = _usual_config()
    from drover.pipeline.config.loading import load_config

    config = load_config(options.config, _overrides(options), check=False)
    if options.why is not None:
        return _why(config, options.why, options.config)
    if options.stage is None:
        raise UserError("No stage is given. Add --stage all, or the stages you want (--help names them).")
    return _launch(config, options)


def _usual_config() -> str:
    """The demo's, where no configuration is given; this is said."""
    for path in (USUAL, Path(__file__).resolve().parent.parent / USUAL):
        if path.is_file():
            print(f"config    {path}, since no --config is given")
            return str(path)
    raise UserError("No configuration is given. Add --config FILE (--help shows complete commands).")


def _launch(config: Config, options: argparse.Namespace) -> int:
    """Plan, show the plan, refuse what cannot work, and hand the rest to this box or to Slurm."""
    from drover.pipeline.contract.stages import parse_stages

    stages = parse_stages(options.stage)
    from drover.launch.checks import (
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
    from drover.pipeline.contract.run import Run
    from drover.pipeline.contract.state import STOP

    cluster, where = _cluster(options)
    here, showing, machine = cluster == "local", options.dry_run, find_machine()
    request = Options("local" if here else "slurm", options.config, tuple(_overrides(options)), options.force,
                      options.accept_drift, machine)
    refuse_unusable_places(config, options.config)
    run = Run(config)
    if here and options.rehearse:
        raise UserError("--rehearse is for jobs on Slurm, but this runs here. Leave it out, or look at a layout with "
                        "python -m drover.tools.rehearse (--cpu for ranks without GPUs).")
    if here:
        where += f"; {machine.cores} cores, {machine.gpus or 'no'} GPU{'' if machine.gpus == 1 else 's'}"
    else:
        from drover.launch.slurm.submit.request import for_slurm, submit_chain
        from drover.launch.slurm.submit.sbatch import scripts
        request = for_slurm(run, request, dry_run=showing)
    jobs, environment = plan(config, run, stages, request), os.environ
    configuration_problems(config, jobs, options.config, here=here or not showing)
    space = disk(config, jobs)
    print_plan(run, jobs, request, where, space)
    refuse_jobs(run, jobs, request, space, environment, showing=showing)
    say_absent(run, jobs)
    running = [job for job in jobs if job.to_run]
    if showing:
        if options.rehearse:
            from drover.launch.rehearsing import rehearse_training
            rehearse_training(run, jobs, request)
        shown = [f"# {job.stage}{f', each of {job.ranks} ranks' * (job.ranks > 1)}\n{by_hand(job)}\n"
                 for job in running] if here else [
            f"# ---- {job.key}: sbatch would get this, and the job would do\n#      {by_hand(job)}\n{text}"
            for job, text in scripts(config, running)]
        print(*shown or ["nothing to do: all asked stages are done"], sep="\n")
        return 0
    refuse_unusable_stores(config, jobs, environment, here=here)
    if not here:
        return submit_chain(run, jobs, request, rehearse=options.rehearse)
    if running:
        make_folder(run.folder)
    (run.folder / STOP).unlink(missing_ok=True)  # it was meant for what ran then
    return run_jobs(config, jobs, request)


def _cluster(options: argparse.Namespace) -> tuple[str, str]:
    """Where to run, and why there."""
    asked, explicit = options.cluster, options.nodes is not None or options.gpus_per_node is not None
    if asked not in ("auto", "slurm", "local"):
        return "slurm", f"profile {asked}"
    if asked == "slurm":
        return "slurm", "as asked"
    if asked == "auto" and shutil.which("sbatch"):
        return "slurm", "sbatch is on PATH"
    why = "as asked" if asked == "local" else "no sbatch on PATH"
    if explicit and asked == "auto" and options.dry_run:
        return "slurm", "no sbatch here: only shown"
    if explicit:
        raise UserError(f"--nodes and --gpus-per-node are asked of Slurm, but this runs here ({why}). Leave them out "
                        f"(launch.processes=N sets the ranks here), use --cluster slurm where Slurm is, or add "
                        f"--dry-run to see what it would get.")
    return "local", why


def _overrides(options: argparse.Namespace) -> list[str]:
    profile = None if options.cluster in ("auto", "slurm", "local") else options.cluster
    given = {"launch.cluster": profile, "launch.train.nodes": options.nodes,
             "launch.gpus_per_node": options.gpus_per_node}
    return [*options.overrides, *(f"{key}={value}" for key, value in given.items() if value is not None)]


def _control(options: argparse.Namespace) -> int:
    from drover.launch.slurm.control import cancel, logs, stop
    from drover.launch.status import find_run

    if options.stop:
        return stop(find_run(options.stop))
    if options.cancel:
        return cancel(find_run(options.cancel))
    run, stage = options.logs
    return logs(find_run(run), stage, rank=options.rank, follow=options.follow)


def _explain(options: argparse.Namespace) -> int:
    from drover.pipeline.config.explaining import explain
    from drover.pipeline.config.loading import load_config

    key, overridden, _ = options.explain.partition("=")  # `--explain train.lr=5`: the override was meant as one
    overrides = [*[options.explain] * bool(overridden), *_overrides(options)]
    print(explain(load_config(options.config or _usual_config(), overrides, check=False), key))
    return 0


def _why(config: Config, stage: str, path: str) -> int:
    from drover.launch.checks import refuse_unusable_places
    from drover.pipeline.contract.run import Run
    from drover.pipeline.contract.stages import parse_stages

    refuse_unusable_places(config, path)
    for name in parse_stages(stage):
        print(Run(config).why(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
