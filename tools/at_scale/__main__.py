"""What grows with ranks, measured on one machine: benchmarks/RESULTS.md has the figures.

    python -m tools.at_scale index --ranks 10000                        # an 8B's checkpoint, sharded over all of them
    python -m tools.at_scale index --ranks 16384 --tensor 8 --replicate 32
    python -m tools.at_scale draw --ranks 64 --replicate 8              # what a rank draws of an 8B's first weights
    python -m tools.at_scale channel --ranks 16                         # sockets of so many processes on this machine
"""

from __future__ import annotations

import argparse
import sys


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.at_scale", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["index", "draw", "channel"])
    parser.add_argument("--model", default="llama3_8b", help="preset of the shape (default %(default)s)")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--layout", choices=["fsdp", "zero3"], default="fsdp", help="of an index")
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--replicate", type=int, default=1)
    options = parser.parse_args(arguments)
    from model.presets import preset
    from tools.at_scale import channel, draw, index

    model = preset(options.model)
    if model.vocab_size is None:
        model = model.model_copy(update={"vocab_size": 128_256})
    if options.what == "draw":
        print(draw.measure(model, options.ranks, options.tensor, options.replicate))
    elif options.what == "channel":
        print(channel.measure(options.ranks))
    else:
        print(*index.measure(model, options.ranks, options.layout, options.tensor, options.replicate), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
