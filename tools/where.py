"""Which documents did a training step see? From a step (and a rank) to shards, documents and text.

    python -m tools.where --run runs/demo --step 120
    python -m tools.where --run runs/demo --step 120 --rank 1 --ranks 2 --text

The order is a pure function of the sample number, so nothing was stored for this: it is computed again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.config.loading import load_config
from pipeline.config.tree import Config
from pipeline.data.loader import TrainingData
from pipeline.errors import UserError
from pipeline.run import Run
from pipeline.training.metrics import read_lines, read_metrics
from pipeline.training.session import open_training_data
from pipeline.work import Work


@dataclass(frozen=True)
class Piece:
    """A document's part of a training sequence: tokens [start, stop) of document `document` of `shard`."""

    sample: int
    shard: str
    document: int
    key: str
    start: int
    stop: int
    ids: np.ndarray


def pieces(data: TrainingData, first: int, count: int) -> Iterator[Piece]:
    """Every document's part of the samples [first, first + count), in order."""
    pools, _, sequences = data.order.locate(np.arange(first, first + count, dtype=np.int64))
    for sample, pool, sequence in zip(range(first, first + count), pools, sequences, strict=True):
        stream, at = data.streams[pool], int(sequence) * data.length
        end = at + data.length
        while at < end:
            index = int(np.searchsorted(stream.ends, at, side="right"))
            shard = stream.shards[index]
            base = int(stream.ends[index]) - shard.token_count
            document = int(np.searchsorted(shard.offsets, at - base, side="right")) - 1
            begin, stop = int(shard.offsets[document]), min(int(shard.offsets[document + 1]), end - base)
            yield Piece(sample, shard.path.name, document, shard.document_key(document), at - base - begin,
                        stop - begin, shard.tokens(at - base, stop))
            at = base + stop


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.where", description=__doc__.splitlines()[0])
    parser.add_argument("--run", required=True, type=Path, help="folder of the run, e.g. runs/demo")
    parser.add_argument("--step", required=True, type=int, help="optimizer step, counted from 1 as in metrics.jsonl")
    parser.add_argument("--rank", type=int, help="only this rank's samples (with --ranks)")
    parser.add_argument("--ranks", type=int, default=1, help="ranks that the step ran on")
    parser.add_argument("--text", action="store_true", help="print the text of each piece")
    options = parser.parse_args(arguments)
    try:
        show(load_config(options.run / "config.yaml", [f"runs_dir={options.run.parent}", f"name={options.run.name}"]),
             options)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    except BrokenPipeError:  # `| head` has seen enough
        sys.stderr.close()
    return 0


def _samples(run: Path, step: int, batch: int) -> tuple[int, int]:
    """The samples [first, end) of a step: as logged, or, where it is not done yet, as it will be."""
    if any(event.get("drift") for event in read_lines(run / "train/events.jsonl")):
        print("warning: this run went on under other settings at some point (--accept-drift); steps before that may "
              "have seen other text than is shown here", file=sys.stderr)
    logged = {record["step"]: record["samples"] for record in read_metrics(run / "train/metrics.jsonl")}
    if step > max(logged, default=0):
        print(f"this run has done {max(logged, default=0)} steps; this is what step {step} would see")
    first, end = logged.get(step, ((step - 1) * batch, step * batch))
    return first, end


def show(config: Config, options: argparse.Namespace) -> None:
    """Print the pieces of the asked step."""
    from pipeline.vocabulary.kinds import load_vocabulary

    run = Run(config)
    work = Work(run, "train", run.fingerprint("train"))
    batch = config.train.batch_tokens // config.train.sequence_length
    if options.step < 1 or not 0 <= (options.rank or 0) < options.ranks or batch % options.ranks:
        raise UserError(f"--step counts from 1, --rank from 0 below --ranks, and --ranks must divide the "
                        f"{batch} sequences of a step; asked: step {options.step}, rank {options.rank} of "
                        f"{options.ranks}.")
    begin, end = _samples(options.run, options.step, batch)
    share = (end - begin) // options.ranks if options.rank is not None else end - begin
    first = begin + (options.rank or 0) * share
    vocabulary = load_vocabulary(work.input("tokenizer")[0]) if options.text else None
    print(f"step {options.step}: samples [{first}, {first + share})")
    for piece in pieces(open_training_data(work), first, share):
        print(f"sample {piece.sample}  {piece.shard}  document {piece.document}  key {piece.key}  "
              f"tokens {piece.start}..{piece.stop}")
        if vocabulary is not None:
            print("    " + vocabulary.decode(piece.ids.tolist()).replace("\n", "\n    "))


if __name__ == "__main__":
    sys.exit(main())
