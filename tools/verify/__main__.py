"""Check every file of a run against the hash that was recorded when it was written.

    drover verify runs/demo [--sample 1%] [--processes N] [--json]

All stages are checked, reused ones too. Outputs are compared with their manifest and checkpoints with their markers;
manifests, markers and small records carry checksums of their own, as do TensorBoard's files. Text shards are read
document by document; token shards are checked for layout, offsets, BOS and EOS, ids and counts, and against the text
shards, key by key. Input files are compared with the hashes made when they were read. The output also lists files that
are missing, unknown files, and files without a recorded hash.

Exit status: 0 no problem; 1 there are problems, and each file is named with what to do; 2 there is no such run.
"""

from __future__ import annotations

import argparse
import json
import operator
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from drover.pipeline.config.plugins import add_run_and_plugins
from drover.pipeline.contract.threads import usable_cores
from drover.pipeline.core.command_line import Parser, Program, add_json
from drover.pipeline.core.console import ProgressBar, echo
from drover.tools.processes import in_order, processes_asked

if TYPE_CHECKING:
    from drover.tools.verify.inventory import Inventory


def verify(folder: Path, share: float = 1.0, processes: int = 1, *, show_progress: bool = False) -> Inventory:
    """Verify a run. Returns the inventory with all problems and notes.

    Args:
        share: share of the shards and input files to read, from 0 to 1. A hash of their names chooses them.
        processes: worker processes; the report does not depend on them.
        show_progress: show a progress bar.

    Raises:
        UserError: the folder is no run.
    """
    from drover.tools.verify.inventory import Inventory

    report = Inventory(run=str(folder))
    checks = report.take(share)
    progress = ProgressBar("verify", "files", len(checks), "checks") if show_progress else None
    with progress or nullcontext():
        for found in in_order(operator.call, checks, min(processes, max(1, len(checks)))):
            report.add(found)
            if progress:
                progress.advance()
    return report


def share_of(text: str) -> float:
    """Parse a share such as `1%` or `0.01`. Raises ArgumentTypeError."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share. Give 1% or 0.01, and at most 100%.")
    return share


def add_options(parser: Parser) -> None:
    """The options."""
    add_run_and_plugins(parser)
    parser.add_argument("--sample", type=share_of, default=1.0, metavar="SHARE",
                        help="read only this share of the shards and input files (1%%), always the same ones; of the "
                             "other shards only the size is checked, and all other files are read")
    parser.add_argument("--processes", type=int, default=usable_cores(), metavar="N",
                        help="worker processes (default: one per core)")
    add_json(parser)


def work(options: argparse.Namespace) -> int:
    """Verify and print; 1 if something is wrong."""
    report = verify(options.run, options.sample, processes_asked(options.processes), show_progress=not options.json)
    echo(json.dumps(asdict(report), indent=1) if options.json else "\n".join(report.lines()))
    return bool(report.problems)


main = Program("python -m drover.tools.verify", __doc__, add_options, work)

if __name__ == "__main__":
    sys.exit(main())
