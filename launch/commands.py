"""Commands about a run that is there, or about a configuration: logs, stop, cancel, why, explain."""

from __future__ import annotations

import argparse
import re
import sys
import time
from codecs import getincrementaldecoder
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from drover.launch.arguments import add_config, configuration, overrides, refuse_unusable_places
from drover.launch.run_status import FINISHED, SILENT, continue_command, read_run
from drover.launch.slurm.chain import in_queue
from drover.launch.slurm.options import FOLDER
from drover.launch.slurm.scheduler import Scheduler
from drover.launch.slurm.start_logs import last_lines, output, rank_log, skip
from drover.launch.status import query
from drover.pipeline.config.explaining import explain as explanation
from drover.pipeline.config.kinds import add_plugin_option
from drover.pipeline.contract.run import Run, run_in
from drover.pipeline.contract.stages import STAGES, parse_stages
from drover.pipeline.contract.state import STOP
from drover.pipeline.core.console import (
    INTERRUPTED,
    NamedRun,
    Parser,
    Program,
    add_run,
    draw,
    echo,
    find_run,
    printable,
    readable,
)
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import opened, read_bytes, write_text
from drover.pipeline.records.metrics import RunFacts

POLL_S = 0.5
SHOWN, LINES = 10, 10
"""Starts of a stage, and lines of each, that `why` shows."""


def _cancel(options: argparse.Namespace) -> int:
    """Cancel the run's queued jobs, those of the newest submission and the last of a chain first: in this order no
    job's end lets another one start."""
    files, scheduler = read_run(options.run), Scheduler()
    queued, answered = in_queue(options.run, scheduler)
    if queued and not answered:
        echo("squeue does not answer, so every job of the chain is cancelled", file=sys.stderr)
    for job in queued:
        if problem := scheduler.cancel(job.id):
            echo(f"{job.name} was not cancelled: {problem}\nThe jobs before it in the chain were left alone. To "
                 f"cancel them, if they are yours: drover cancel {options.run}", file=sys.stderr)
            return 1
        echo(f"cancelled {job.id} ({job.name})")
    echo(f"finished stages are kept; to continue: {continue_command(files)}" if queued else
         f"no job of {options.run} is in the queue")
    return 0


def _stop(options: argparse.Namespace) -> int:
    """Ask training to save and end, through the stop file."""
    run = options.run
    status, = query([run], Scheduler())
    state = next(row.state for row in status.rows if row.stage == "train")
    if state not in ("running", "waiting"):
        echo(f"training of {run} does not run (it is: {state}), so there is nothing to stop")
        return 0
    path = run / STOP
    try:
        write_text(path, "drover stop\n")
    except PermissionError as error:
        raise UserError(f"You may not write into {path.parent}, so training is not asked to stop. Its "
                        f"owner can do that.") from error
    if SILENT in status.remarks:
        echo("Slurm does not answer, so training may not be running", file=sys.stderr)
    queued = (f"; a job that still waits ends when it starts (`drover cancel {run}` removes it from the queue)"
              if status.files.chain else "")
    echo(f"training saves a checkpoint after its current step and ends{queued}. The stages after it do not start.\n"
         f"The request is the file {path}. To withdraw it, delete the file before training sees it.\nto continue, "
         f"once `drover status {run} --watch` has ended: {continue_command(status.files)}")
    return 0


def _log_options(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", action=NamedRun, help="a run's name (demo) or folder (runs/demo)")
    parser.add_argument("stage", metavar="STAGE", nargs="?", help="such as train (default: the one that started last)")
    parser.add_argument("--rank", type=int, default=0, metavar="N", help="the rank whose output is shown (default 0)")
    parser.add_argument("--element", type=int, metavar="N", help="the element of a Slurm array whose output is shown")
    parser.add_argument("--follow", action="store_true", help="keep printing as the output grows, also after restarts, "
                        "and without STAGE the next stages'")
    add_plugin_option(parser)


def _logs(options: argparse.Namespace) -> int:
    """Print the output of a rank in a stage's newest start; with --follow as it grows, until Ctrl-C."""
    run = options.run
    rank = options.rank
    stage = options.stage
    shown, file = Path(), None
    with ExitStack() as closing, suppress(KeyboardInterrupt):
        while True:
            starts = [start for start in RunFacts(run).starts if start.stage == (stage or start.stage)
                      and (options.element is None or start.job.endswith(f"_{options.element}"))]
            path = rank_log(starts[-1].logs(run), rank, starts[-1].ranks_per_node) if starts else shown
            if file is not None:
                _print(file, rank)  # the rest of an earlier start
            if path != shown and path.is_file():
                shown = path
                file = closing.enter_context(opened(path))
                echo(f"==> {path} <==")
                if "_" in starts[-1].job:
                    echo("Each element of its array has an own output: --element N shows it.")
                if skipped := skip(file):
                    echo(f"The first {readable(skipped)} are left out.")
                _print(file, rank)
            if not options.follow:
                if file is None:
                    of = "" if options.element is None else f" of element {options.element}"
                    logged = ", ".join(dict.fromkeys(start.stage for start in RunFacts(run).starts)) or "no stage"
                    has = (f"its newest start has ranks 0-{starts[-1].ranks - 1}" if starts else
                           f"no start of it is recorded, but of {logged}")
                    raise UserError(f"There is no log of rank {rank}{of} of {stage or 'any stage'} in {run}: {has}. "
                                    f"`drover why {run}` shows the logs of its jobs.")
                return 0
            time.sleep(POLL_S)
    echo()
    return INTERRUPTED


def _print(file: IO[bytes], rank: int) -> None:
    decode = getincrementaldecoder("utf-8")("backslashreplace").decode
    for piece in (*output(file, rank), b""):
        sys.stdout.write(printable(decode(piece, not piece).replace("\r\n", "\n").replace("\r", "\n")))
    sys.stdout.flush()


def _why_options(parser: Parser) -> None:
    add_config(parser, "RUN|STAGE", "RUN, or RUN STAGE: why it stopped; STAGE: whether it is up to date; ")
    add_plugin_option(parser)


def _names(options: argparse.Namespace) -> list[str]:
    """The words that are no settings, which are taken from these."""
    names = [word for word in options.overrides if "=" not in word]
    options.overrides = [word for word in options.overrides if "=" in word]
    return names


def _why(options: argparse.Namespace) -> int:
    names = sorted(_names(options), key=_are_stages)  # a run before its stages
    if options.config is None and names and not _are_stages(names[0]):
        run, *stages = names
        found = find_run(run, " It is no stage either.")
        if len(stages) < 2:
            return _why_stopped(found, *map(parse_stages, stages))
    if len(names) != 1:
        raise UserError("Name one run, and a stage of it if you like (drover why demo train), or one stage (or several "
                        "with commas) and its configuration.")
    config = configuration(options)
    refuse_unusable_places(config, options.config)
    for stage in parse_stages(*names):
        echo(Run(config).why(stage))
    return 0


def _are_stages(word: str) -> bool:
    return {*word.split(",")} <= {*STAGES, "all"}


def _why_stopped(run: Path, stages: Sequence[str] = ()) -> int:
    """Print the run's current stage and remarks. Of stages that are not done, print how each start of the newest
    submission ended that did not end well, with the last lines of the rank that its reason names, or of the first.

    stages: those to print; () for all that are not done. Of one that is done, print whether it is up to date, and the
    starts of all submissions.
    """
    status, = query([run], Scheduler())
    draw(f"run       {run}: {status.current.stage} is {status.current.state}", *status.remarks)
    files = status.files
    # An element that failed for good ends the jobs after it, though the others have finished its stage.
    blamed = {id for row in status.rows if row.state == "failed" and not files.stages[row.stage].starts
              if (job := files.stages[row.stage].job) for id in job.dependencies}
    for row in status.rows:
        stage = files.stages[row.stage]
        done = row.state in FINISHED
        if stage.id not in blamed and (row.stage not in stages if stages else done):
            continue
        if done and stages:
            echo(run_in(run).why(row.stage))
            stage.starts = [start for start in RunFacts(run).starts if start.stage == row.stage]
        for start in [start for start in stage.starts if start.status != "done"][-SHOWN:]:  # elements may be done
            how = ": ".join(filter(None, (start.status.replace("preempted", "stopped"), start.reason))) or (
                "its end is not recorded")
            rank = re.search(r"\branks? (\d+)", start.reason)
            folder = start.logs(run)
            number = int(rank[1]) if rank else 0
            lines = last_lines(folder, number, start.ranks_per_node, LINES)
            _print_end(f"{start.stage}, job {start.job}, start {start.number}, at {start.at[:16]} UTC on "
                       f"{', '.join(start.nodes)}: {how}", lines or [f"no output of rank {number} is in {folder}"])
            if not lines:
                _print_file("what srun said", folder / "srun.err")
        ended = {start.job: start.status or row.state == "running" for start in stage.starts}
        for log in sorted((run / FOLDER).glob(f"{stage.job.id}_*log.out")) if stage.job else ():
            if not ended.get(id := log.name.partition("_0_log")[0]):
                _print_file(f"{row.stage}, job {id}, without a recorded end", log)
    if not files.chain and not any(stage.starts for stage in files.stages.values()):
        _print_file("the launcher on this machine", run / "logs" / "local.log")
    return 0


def _print_file(what: str, log: Path) -> None:
    with suppress(OSError):
        _print_end(f"{what}: {log}", read_bytes(log).decode(errors="replace").splitlines()[-LINES:])


def _print_end(what: str, lines: list[str]) -> None:
    echo(f"\n{what}", *(f"    {line}" for line in lines))


def _explain_options(parser: Parser) -> None:
    add_config(parser, "section.key", "section.key: such as train.lr or train (default: all settings); with "
               "runs/NAME/config.yaml its value in a run; ")


def _explain(options: argparse.Namespace) -> int:
    names = _names(options) or [""]
    config = configuration(options) if options.config or overrides(options) else None
    draw(*"\n\n".join(explanation(config, name) for name in names).split("\n"))
    return 0


logs = Program("drover logs", "Show the output of a stage's newest start.", _log_options, _logs)
stop = Program("drover stop", "Let training save a checkpoint and end. The command that started it continues it.",
               add_run, _stop)
cancel = Program("drover cancel", "Cancel a run's jobs in Slurm.", add_run, _cancel)
why = Program("drover why", "Show why a run stopped: the end of each start, with its last lines. Or show why a stage "
              "is up to date or out of date.", _why_options, _why, mixed=True)
explain = Program("drover explain", "Show what a setting or section means, its type, default and value.",
                  _explain_options, _explain, mixed=True)
