"""Measure Drover on this machine.

    python -m benchmarks train        a training step on the CPU, beside transformers and litgpt
    python -m benchmarks generate     one text, beside transformers' generate
    python -m benchmarks data         shard, encode and the loader, beside datatrove
    python -m benchmarks start        what stages and tools cost before they work
    python -m benchmarks gpu          everything worth knowing of one GPU, in nine minutes
    python -m benchmarks layouts      training steps at the layouts of the recipes, on nodes of eight GPUs

Each says its options with --help. --out FOLDER writes results.json and results.md there. --beside CHECKOUT measures
the code of another checkout by turns with this one's and prints the ratios. Times are paired: what is compared runs by
turns in one run, and a ratio is the median of those within a round. The processor's time stands beside the clock's; on
a busy machine it is the steadier of the two.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path

from benchmarks.measuring import Record, positive, spread
from drover.pipeline.errors import UserError
from drover.pipeline.files import read_json

MODULES = {name: name for name in ("train", "generate", "data", "start")} | {"gpu": "suite", "layouts": "suite"}
REPOSITORY = Path(__file__).resolve().parent.parent


def main(arguments: list[str] | None = None) -> int:
    """The command line; 1 where a benchmark says that something failed."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parsers = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, file in MODULES.items():
        module = import_module(f"benchmarks.{file}")
        one = parsers.add_parser(name, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        one.add_argument("--out", type=Path, metavar="FOLDER", help="write results.json and results.md there")
        one.add_argument("--beside", type=Path, metavar="CHECKOUT", help="another checkout, measured by turns")
        one.add_argument("--rounds", type=positive, default=5, help="measurements of each (%(default)s)")
        module.add_options(one)
    options = parser.parse_args(arguments)
    try:
        if options.beside is not None:
            return beside(options, arguments)
        record = Record(options.name, options.out)
        failed = import_module(f"benchmarks.{MODULES[options.name]}").run(options, record)
        record.save()
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    return int(bool(failed))


def beside(options: argparse.Namespace, arguments: list[str]) -> int:
    """Run this benchmark on the code of two checkouts by turns, one round at a time; ratios of rates, row by row."""
    if not (options.beside / "pipeline").is_dir():
        raise UserError(f"--beside {options.beside} is no checkout of Drover: it has no folder pipeline.")
    rates: dict[str, dict[str, list[tuple[float, float]]]] = {}
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as place:
        (Path(place) / "benchmarks").symlink_to(REPOSITORY / "benchmarks")  # the same script measures both
        for number in range(options.rounds):
            checkouts = {"now": REPOSITORY, "before": options.beside.resolve()}
            for which in list(checkouts)[::-1 if number % 2 else 1]:
                out = f"{place}/{number}-{which}"
                same = _without(arguments, "--beside", "--rounds", "--out")
                subprocess.run([sys.executable, "-m", "benchmarks", *same, "--rounds=1", f"--out={out}"], cwd=place,
                               check=True, stdout=subprocess.DEVNULL,
                               env={**os.environ, "PYTHONPATH": f"{place}{os.pathsep}{checkouts[which]}"})
                for row in read_json(Path(out) / "results.json")["rows"]:
                    if "rate" in row:
                        rates.setdefault(row["name"], {}).setdefault(which, []).append(
                            (row["rate"], row.get("cpu_rate", row["rate"])))
    record = Record(f"{options.name}, beside {options.beside}", options.out)
    for name, found in rates.items():
        if len(found.get("now", [])) == len(found.get("before", [])) == options.rounds:
            wall, cpu = ([now[at] / before[at] for now, before in zip(found["now"], found["before"], strict=True)]
                         for at in (0, 1))
            record.add("Now beside before", {
                "": "{name}", "times as fast, clock, median (least - most)": "{wall_ratio:.3f} ({wall_least:.3f} - "
                "{wall_most:.3f})", "processor": "{cpu_ratio:.3f} ({cpu_least:.3f} - {cpu_most:.3f})"},
                {"name": name, **spread(wall), **spread(cpu, "cpu")})
    return 0


def _without(arguments: list[str], *names: str) -> list[str]:
    """The arguments without these options and their values."""
    left: list[str] = []
    for word, before in zip(arguments, ["", *arguments], strict=False):
        if word.partition("=")[0] not in names and before not in names:
            left.append(word)
    return left


if __name__ == "__main__":
    sys.exit(main())
