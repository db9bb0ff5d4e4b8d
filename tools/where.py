"""Which documents did a training step see? From a step (and a rank) to shards, documents and text.

    python -m tools.where --run runs/demo --step 120
    python -m tools.where --run runs/demo --step 120 --rank 1 --ranks 2 --text
    python -m tools.where --run runs/demo --samples 304 320 --text

The order is a pure function of the sample number, so nothing was stored for this: it is computed again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from pipeline.config.batch import BatchPlan
from pipeline.config.parallel import ParallelConfig
from pipeline.config.tree import Config
from pipeline.contract.run import Run, run_in
from pipeline.contract.stage_work import Work
from pipeline.data.exclusion import Excluded, ranges_of, sample_numbers, spelled
from pipeline.data.provenance import pieces
from pipeline.errors import UserError
from pipeline.files import read_lines
from pipeline.records.metrics import read_metrics
from pipeline.records.rollbacks import excluded_by, is_abandoned, read_rollbacks
from pipeline.training.training_data import open_training_data


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.where", description=__doc__.splitlines()[0])
    parser.add_argument("--run", required=True, type=Path, help="folder of the run, e.g. runs/demo")
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--step", type=int, help="optimizer step, counted from 1 as in metrics.jsonl")
    asked.add_argument("--samples", type=int, nargs=2, metavar=("FIRST", "END"),
                       help="samples [FIRST, END) instead of a step, e.g. those that a rollback left out")
    parser.add_argument("--rank", type=int, help="only this data-parallel rank's samples (with --ranks)")
    parser.add_argument("--ranks", type=int, default=1, help="data-parallel ranks that the step ran on")
    parser.add_argument("--text", action="store_true", help="print the text of each piece")
    options = parser.parse_args(arguments)
    try:
        show(run_in(options.run), options)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    except BrokenPipeError:  # `| head` has seen enough
        sys.stderr.close()
    return 0


def _asked(options: argparse.Namespace) -> np.ndarray:
    first, end = options.samples
    if not 0 <= first < end or options.rank is not None:
        raise UserError(f"--samples takes FIRST and END with 0 <= FIRST < END, and no --rank; asked: {first} {end}.")
    return sample_numbers([(first, end)])


def _of_step(options: argparse.Namespace, config: Config, plan: str) -> np.ndarray:
    """The sample numbers of a step (and rank): as logged, or, where it is not done yet, as it will be."""
    step, rank, ranks = options.step, options.rank, options.ranks
    batch = BatchPlan.of(config.train, ParallelConfig(), max(1, ranks))
    if step < 1 or not 0 <= (rank or 0) < ranks or batch.sequences % ranks:
        raise UserError(f"--step counts from 1, --rank from 0 below --ranks, and --ranks must divide the "
                        f"{batch.sequences} sequences of a step; asked: step {step}, rank {rank} of {ranks}.")
    if any(event.get("drift") for event in read_lines(options.run / "train/events.jsonl")):
        print("warning: this run went on under other settings at some point (--accept-drift); steps before that may "
              "have seen other text than is shown here", file=sys.stderr)
    rollbacks = read_rollbacks(options.run / "train")
    logged = {record["step"]: record for record in read_metrics(options.run / "train/metrics.jsonl")
              if not is_abandoned(record, rollbacks, plan)}
    if step > max(logged, default=0):
        print(f"this run has done {max(logged, default=0)} steps; this is what step {step} would see")
    record = logged.get(step)
    if record is None:
        samples = excluded_by(rollbacks, plan).numbers(0, batch.first(0, step - 1), batch.sequences)
    else:
        samples = sample_numbers(Excluded(record.get("left_out", ())).outside(*record["samples"]))
        if "skipped" in record:
            print(f"the update of step {step} was skipped ({record['skipped']})")
    return samples if rank is None else np.array_split(samples, ranks)[rank]


def show(run: Run, options: argparse.Namespace) -> None:
    """Print the pieces of the asked step or samples."""
    from pipeline.tokenization.kinds import load_tokenizer

    work = Work(run, "train", run.fingerprint("train"))
    data = open_training_data(work)
    if options.samples is not None:
        samples, title = _asked(options), ""
    else:
        samples, title = _of_step(options, run.config, data.order.plan_sha256), f"step {options.step}: "
    tokenizer = load_tokenizer(work.input("tokenizer")[0]) if options.text else None
    print(f"{title}samples {spelled(ranges_of(samples))}")
    for piece in pieces(data, samples):
        print(f"sample {piece.sample}  {piece.shard.path.name}  document {piece.document}  key {piece.key}  "
              f"tokens {piece.start}..{piece.stop}")
        if tokenizer is not None:
            print("    " + tokenizer.decode(piece.ids().tolist()).replace("\n", "\n    "))


if __name__ == "__main__":
    sys.exit(main())
