"""Export token shards for other programs: Megatron Core's SOURCE.bin and SOURCE.idx, or SOURCE.parquet.

    drover export-tokens demo --out exported/demo
    drover export-tokens demo --out exported/valid --split validation
    drover export-tokens demo --out exported/rows --format hf

Documents are exported as they are trained on, BOS ... EOS, in the order of the shards. Parquet files have a row per
document, with its ids in the column input_ids, as `datasets` reads them. The folder appears under its name when it is
complete and was read back. An interrupted export continues with the same command.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from drover.pipeline.config.kinds import add_run_and_plugins
from drover.pipeline.contract.run import run_in
from drover.pipeline.core.console import Parser, Program


def add_options(parser: Parser) -> None:
    """The options."""
    add_run_and_plugins(parser)
    parser.add_argument("--out", required=True, type=Path, help="folder to make")
    parser.add_argument("--split", choices=("train", "validation"), default="train", help="which split (train)")
    parser.add_argument("--format", choices=("megatron", "hf"), default="megatron",
                        help="Megatron Core's files, or Parquet for datasets (megatron)")
    parser.add_argument("--without-bos", action="store_true", help="leave out the BOS before each document; its EOS "
                                                                   "stays")


def work(options: argparse.Namespace) -> None:
    """Export."""
    run = run_in(options.run)
    from drover.tools.token_export import export

    export(run, options.out, options.split, options.format, without_bos=options.without_bos)


main = Program("python -m drover.tools.export_tokens", __doc__, add_options, work)

if __name__ == "__main__":
    sys.exit(main())
