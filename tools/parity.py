"""Compare the losses of two runs, such as fp8 with bf16, before a long run is started.

    drover parity --reference runs/bf16 --run runs/fp8 --band 0.01

Both runs must have trained on the same samples, step by step. Mean losses are compared in ten windows of steps, and so
are bits per byte of the validation text at the last step that both measured. Exit status: 1 if a window after the first
fifth of the steps, or the validation text, is worse than the reference by more than the band.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from drover.pipeline.core.command_line import Parser, Program, find_run
from drover.pipeline.core.console import echo
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Record
from drover.pipeline.records.metrics import read_metrics

WINDOWS = 10
"""Windows of the steps that both runs have."""


def windows(reference: Sequence[Record], found: Sequence[Record]) -> list[tuple[int, int, float, float]]:
    """The steps that both runs logged, in windows: first and last step, and the mean losses of the two runs, in nats
    per target token.

    Raises:
        UserError: there are fewer than WINDOWS such steps, or one of them was on other samples.
    """
    theirs = {record["step"]: record for record in reference}
    pairs = [(theirs[record["step"]], record) for record in found if record["step"] in theirs]
    if len(pairs) < WINDOWS:
        raise UserError(f"The two runs have {len(pairs)} logged steps in common; {WINDOWS} are needed at least.")
    if other := next((ours["step"] for their, ours in pairs if their["samples"] != ours["samples"]), None):
        raise UserError(f"In step {other} the two runs saw other samples, so that their losses say nothing about each "
                        f"other. Give both the same seed, data, batch_tokens and sequence_length.")
    edges = [len(pairs) * number // WINDOWS for number in range(WINDOWS + 1)]
    parts = [pairs[begin:end] for begin, end in pairwise(edges)]
    return [(part[0][0]["step"], part[-1][0]["step"], *(fmean(float(pair[side]["loss"]) for pair in part)
                                                        for side in (0, 1))) for part in parts]


def validation(reference: Sequence[Record], found: Sequence[Record]) -> dict[str, tuple[float, float]]:
    """Bits per byte of each source at the last step at which both runs measured it: (reference, found)."""
    theirs = {record["step"]: record.get("validation_bpb", {}) for record in reference}
    return {source: (theirs[record["step"]][source], bits) for record in found
            for source, bits in record.get("validation_bpb", {}).items() if source in theirs.get(record["step"], {})}


def report(reference: Sequence[Record], found: Sequence[Record], band: float) -> tuple[list[str], bool]:
    """What to print, and whether the run is within the band."""
    lines, sound = list[str](), True

    def judge(what: str, theirs: float, ours: float, unit: str = "", *, judged: bool = True) -> None:
        nonlocal sound
        worse = ours / theirs - 1
        within = not judged or worse <= band  # NaN is beyond everything
        sound &= within
        lines.append(f"{what} {theirs:.4f}, {ours:.4f}{unit} ({worse:+.2%}){', not judged' * (not judged)}"
                     f"{', BEYOND' * (not within)}")
    for number, (first, last, theirs, ours) in enumerate(windows(reference, found)):
        judge(f"steps {first} to {last}: loss", theirs, ours, judged=number >= WINDOWS // 5)
    measured = validation(reference, found)
    for source, (theirs, ours) in measured.items():
        judge(f"validation text {source}:", theirs, ours, " bits per byte")
    if not measured:
        lines.append("validation text is not judged: the runs have no common step at which they measured it")
    for factor in ("input", "weight", "gradient"):
        if zeros := [record[key] for record in found if (key := f"fp8_{factor}_zeros") in record]:
            lines.append(f"{factor}s: at most {zeros[-1]:.2%} of a layer's values become zero in fp8, as last measured")
    return [*lines, f"{'within' if sound else 'BEYOND'} the band of {band:.2%}"], sound


def add_options(parser: Parser) -> None:
    """The options."""
    parser.add_argument("--reference", required=True, type=find_run, metavar="RUN", help="the run to compare with")
    parser.add_argument("--run", required=True, type=find_run, metavar="RUN", help="the run that is judged")
    parser.add_argument("--band", type=float, default=0.01, help="share by which it may be worse (default 0.01)")


def work(options: argparse.Namespace) -> int:
    """Compare and print; 1 if the run is beyond the band."""
    lines, sound = report(_metrics(options.reference), _metrics(options.run), options.band)
    echo("\n".join(lines))
    return 0 if sound else 1


def _metrics(folder: Path) -> list[Record]:
    path = folder / "train/metrics.jsonl"
    if not path.is_file():
        raise UserError(f"{folder} is no run that has trained: there is no {path}.")
    return read_metrics(path)


main = Program("python -m drover.tools.parity", __doc__, add_options, work)

if __name__ == "__main__":
    sys.exit(main())
