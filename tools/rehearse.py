"""Estimate what one training step needs on any number of ranks, without GPUs: memory, traffic, waits.

    drover rehearse configs/llama3_8b.yaml --ranks 128
    drover rehearse configs/llama3_405b.yaml --ranks 16384 --rank 8192
    drover rehearse configs/llama3_8b.yaml --ranks 128 --memory 80

The real engine takes one step on tensors without contents, in a process group that sends nothing. It does so for rank
0, or for the first, a middle and the last rank of a pipeline, or for those of --rank. Each rank takes seconds to a
minute and about 1 GB of memory. --memory GB says whether the step fits and, if not, which settings do. Exit status:
0; 1 it does not fit; 2 it cannot be estimated. More is in docs/memory.md.
"""

from __future__ import annotations

import argparse
import json
import sys

from drover.pipeline.config.command_line import add_settings
from drover.pipeline.config.loading import load_config
from drover.pipeline.core.console import Parser, Program, add_json, draw, refuse_low
from drover.pipeline.core.errors import UserError


def add_options(parser: Parser) -> None:
    """The options."""
    add_settings(parser)
    parser.add_argument("--ranks", type=int, metavar="N", help="number of ranks")
    parser.add_argument("--rank", type=int, action="append", metavar="R", help="estimate this rank; may be repeated")
    parser.add_argument("--memory", type=float, metavar="GB",
                        help="memory of a GPU: print whether the step fits, or which settings do")
    parser.add_argument("--cpu", action="store_true", help="ranks on CPUs, with their kernels and precision")
    add_json(parser)


def work(options: argparse.Namespace) -> int:
    """Estimate and print; 1 if it does not fit."""
    needed = {"FILE.yaml": options.config, "--ranks N": options.ranks}
    if missing := [name for name, value in needed.items() if value is None]:
        raise UserError(f"Give {' and '.join(missing)} (--help shows complete commands).")
    refuse_low(options, "ranks")
    from drover.pipeline.rehearsal.fitting import fit_in_memory, rehearse_apart
    from drover.pipeline.rehearsal.report import ends_and_middle, fullest, page_of

    config = load_config(options.config, options.overrides)
    numbers = options.rank or ends_and_middle(config, options.ranks)
    result = rehearse_apart(config, options.ranks, numbers, gpu=not options.cpu)
    fits, text = True, ""
    if options.memory is not None:
        fits, text = fit_in_memory(config, fullest(result), options.memory * 1e9, gpu=not options.cpu)
    if options.json:
        print(json.dumps({"fits": fits, "verdict": text, "ranks": [one.as_json() for one in result]}, indent=1))
    else:
        draw(*page_of(config, result), *([f"memory     {text}"] if text else []))
    return 0 if fits else 1


main = Program("python -m drover.tools.rehearse", __doc__, add_options, work, mixed=True)

if __name__ == "__main__":
    sys.exit(main())
