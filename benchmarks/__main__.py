"""Measure Drover on this machine.

    python -m benchmarks train        a training step on the CPU, compared with transformers
    python -m benchmarks data         the stages shard and encode, compared with datatrove
    python -m benchmarks gpu          matrix products and training steps of one GPU, in nine minutes
    python -m benchmarks layouts      training steps in the layouts of the recipes, on nodes of eight GPUs

--help after a name shows its options. --out FOLDER writes results.json and results.md there. Contenders take turns in
one run, and a ratio is the median of the ratios within a round. CPU time is given with wall time: on a busy machine it
varies less.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import ModuleType

from benchmarks import data, suite
from benchmarks.measuring import Record
from drover.pipeline.core.command_line import Parser, Program

MODULES: dict[str, ModuleType] = {"train": suite, "data": data, "gpu": suite, "layouts": suite}
ROUNDS = {"train": 5, "data": 5}
"""Default rounds of benchmarks whose contenders take turns; others are measured once."""


def add_options(parser: Parser) -> None:
    """The benchmarks and their options."""
    parsers = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, module in MODULES.items():
        one = parsers.add_parser(name, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        one.add_argument("--out", type=Path, metavar="FOLDER", help="write results.json and results.md there")
        one.add_argument("--rounds", type=int, default=ROUNDS.get(name, 1),
                         help="measurements of each (%(default)s)")
        module.add_options(one)


def work(options: argparse.Namespace) -> int:
    """Measure; 1 if a case failed."""
    record = Record(options.name, options.out)
    failed = MODULES[options.name].run(options, record)
    record.save()
    return bool(failed)


main = Program("python -m benchmarks", __doc__, add_options, work)

if __name__ == "__main__":
    sys.exit(main())
