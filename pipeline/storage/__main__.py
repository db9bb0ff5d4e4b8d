"""Fetch an export or a checkpoint from an object store and compare each file with its hash.

    python -m drover.pipeline.storage s3://bucket/models/mine models/mine

If it is killed, it leaves a hidden folder `.mine-...` next to the target, which you may remove.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from drover.pipeline.core.console import Parser, Program, echo
from drover.pipeline.storage.mirror import fetch_copy


def add_options(parser: Parser) -> None:
    """The options."""
    parser.add_argument("url", help="where convert.copy_to or train.checkpoint.copy_to (and /step-...) put it")
    parser.add_argument("folder", type=Path, help="a new folder")


def work(options: argparse.Namespace) -> None:
    """Fetch and compare."""
    size = fetch_copy(options.url, options.folder)
    echo(f"{options.folder}: {size / 1e6:,.1f} MB, every file as it was copied")


main = Program("python -m drover.pipeline.storage", __doc__, add_options, work)

if __name__ == "__main__":
    sys.exit(main())
