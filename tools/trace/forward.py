"""From a step (and a rank) to shards, documents and text."""

from __future__ import annotations

import argparse
import json

import numpy as np

from drover.pipeline.core.console import echo
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Record
from drover.pipeline.data.exclusion import ranges_of, sample_numbers, spelled
from drover.pipeline.data.provenance import pieces
from drover.tools.trace.steps import Steps


def show(steps: Steps, options: argparse.Namespace) -> None:
    """Print the pieces of `--step` or `--samples`, as lines or with `--json` as one object."""
    from drover.pipeline.tokenization.kinds import load_tokenizer

    notes, title = list[str](), "" if options.step is None else f"step {options.step}: "
    samples = _asked(options) if options.step is None else _of_step(options, steps, notes)
    tokenizer = load_tokenizer(steps.ledger.work.input("tokenizer")[0]) if options.text else None
    told: list[Record] = []
    if not options.json:
        echo("".join(f"{note}\n" for note in notes) + f"{title}samples {spelled(ranges_of(samples))}")
    for piece in pieces(steps.ledger.data, samples):
        one = {"sample": piece.sample, "source": piece.shard.source, "shard": piece.shard.path.name,
               "document": piece.document, "key": piece.key, "tokens": [piece.start, piece.stop]}
        if tokenizer is not None:
            one["text"] = tokenizer.decode(piece.ids().tolist())
        if options.json:
            told.append(one)
            continue
        echo(f"sample {piece.sample}  {one['shard']}  document {piece.document}  key {piece.key}  "
             f"tokens {piece.start}..{piece.stop}")
        if "text" in one:
            echo("    " + str(one["text"]).replace("\n", "\n    "))
    if options.json:
        print(json.dumps({"step": options.step, "samples": ranges_of(samples), "notes": notes, "pieces": told},
                         ensure_ascii=False))


def _asked(options: argparse.Namespace) -> np.ndarray:
    first, end = options.samples
    if not 0 <= first < end or options.rank is not None:
        raise UserError(f"--samples takes FIRST and END with 0 <= FIRST < END, and no --rank; asked: {first} {end}.")
    return sample_numbers([(first, end)])


def _of_step(options: argparse.Namespace, steps: Steps, notes: list[str]) -> np.ndarray:
    """The sample numbers of a step (and rank), as logged, or as planned if it is not done yet. Adds remarks to
    `notes`."""
    step, rank, ranks = options.step, options.rank, options.ranks
    if step < 1 or not 0 <= (rank or 0) < ranks:
        raise UserError(f"--step counts from 1, --rank from 0 below --ranks; asked: step {step}, rank {rank} of "
                        f"{ranks}.")
    steps.check_ranks(step)
    steps.warn_of_changes()
    if step > steps.done:
        notes.append(f"this run has done {steps.done} steps; these are the planned samples of step {step}")
    if why := steps.skipped(step):
        notes.append(f"the update of step {step} was skipped ({why})")
    samples = steps.samples(step)
    return samples if rank is None else np.array_split(samples, ranks)[rank]
