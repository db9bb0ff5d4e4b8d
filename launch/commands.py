"""Commands about a run that is there, or about a configuration: logs, stop, cancel, why, explain."""

from __future__ import annotations

import argparse

from drover.launch.arguments import add_config, configuration, refuse_unusable_places
from drover.launch.slurm import control
from drover.pipeline.config.explaining import explain as explanation
from drover.pipeline.contract.run import Run
from drover.pipeline.contract.stages import STAGES, parse_stages
from drover.pipeline.core.command_line import NamedRun, Parser, Program, add_run, find_run
from drover.pipeline.core.console import echo
from drover.pipeline.core.errors import UserError


def _log_options(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", action=NamedRun, help="a run's name (demo) or folder (runs/demo)")
    parser.add_argument("stage", metavar="STAGE", help="such as train")
    parser.add_argument("--rank", type=int, default=0, metavar="N", help="the rank whose output is shown (default 0)")
    parser.add_argument("--follow", action="store_true", help="keep printing as the output grows, also after restarts")


def _why_options(parser: Parser) -> None:
    parser.add_argument("why", metavar="RUN|STAGE")
    add_config(parser)


def _why(options: argparse.Namespace) -> int:
    if options.config is None and {*options.why.split(",")} - {*STAGES, "all"}:
        try:
            return control.why(find_run(options.why))
        except UserError as error:
            raise UserError(f"{options.why} is no stage. {error}") from None
    config = configuration(options)
    refuse_unusable_places(config, options.config)
    for name in parse_stages(options.why):
        echo(Run(config).why(name))
    return 0


def _explain_options(parser: Parser) -> None:
    parser.add_argument("explain", nargs="?", default="", metavar="KEY",
                        help="such as train.lr or train (default: all settings)")
    add_config(parser)


def _explain(options: argparse.Namespace) -> int:
    key, overridden, _ = options.explain.partition("=")  # `explain train.lr=5`: the override was meant as one
    options.overrides = [*[options.explain] * bool(overridden), *options.overrides]
    echo(explanation(configuration(options), key))
    return 0


logs = Program("drover logs", "Show the output of a stage's newest start.", _log_options,
               lambda options: control.logs(options.run, options.stage, rank=options.rank, follow=options.follow))
stop = Program("drover stop", "Let training save a checkpoint and end. The command that started it continues it.",
               add_run, lambda options: control.stop(options.run))
cancel = Program("drover cancel", "Cancel a run's jobs in Slurm.", add_run, lambda options: control.cancel(options.run))
why = Program("drover why", "Show why a run stopped: the end of each start, with its last lines. Or show why a stage "
              "is up to date or out of date.", _why_options, _why, mixed=True)
explain = Program("drover explain", "Show what a setting or section means, its type, default and value.",
                  _explain_options, _explain, mixed=True)
