"""What stages and tools cost before they work: processor time to import a stage, and of a tool's --help."""

from __future__ import annotations

import argparse
import sys
from functools import partial

from benchmarks.measuring import Record, alternated, command, compared
from drover.pipeline.contract.stages import STAGES

TOOLS = tuple(f"drover.tools.{name}" for name in ("audit", "where", "verify", "rehearse", "chat", "serve", "lm_eval"))


def add_options(parser: argparse.ArgumentParser) -> None:
    """There are no further ones."""


def run(options: argparse.Namespace, record: Record) -> None:
    """Start each by turns."""
    commands = {"python alone": ["-c", ""], **{
        f"import drover.pipeline.{name}": ["-c", f"import drover.pipeline.{name}"]
                                               for name in STAGES},
                **{f"{tool} --help": ["-m", tool, "--help"] for tool in TOOLS}}
    contenders = {name: partial(command, [sys.executable, *words]) for name, words in commands.items()}
    rows = compared(alternated(contenders, options.rounds), 1, "starts")
    record.add("Starts", {"": "{name}", "processor seconds": "{cpu_s:.2f}", "clock seconds": "{wall_s:.2f}"},
               *({**row, "cpu_s": 1 / row["cpu_rate"], "wall_s": 1 / row["rate"]} for row in rows))
