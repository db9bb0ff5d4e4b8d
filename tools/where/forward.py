"""From a step (and a rank) to shards, documents and text."""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np

from pipeline.contract.run import Run
from pipeline.contract.stage_work import Work
from pipeline.data.exclusion import ranges_of, sample_numbers, spelled
from pipeline.data.provenance import pieces
from pipeline.errors import UserError
from pipeline.training.data.opening import open_training_data
from tools.where.steps import Steps


def show(run: Run, options: argparse.Namespace) -> None:
    """Print the pieces of the asked step or samples: lines, or with `--json` one object."""
    from pipeline.tokenization.kinds import load_tokenizer

    work = Work(run, "train", run.fingerprint("train"))
    data = open_training_data(work)
    steps, notes = Steps(run.folder, run.config, data.order.links, options.ranks), list[str]()
    data.leave_out(steps.excluded)
    if options.samples is not None:
        samples, title = _asked(options), ""
    else:
        samples, notes = _of_step(options, steps)
        title = f"step {options.step}: "
    tokenizer = load_tokenizer(work.input("tokenizer")[0]) if options.text else None
    told: list[dict[str, Any]] = []
    if not options.json:
        print("".join(f"{note}\n" for note in notes) + f"{title}samples {spelled(ranges_of(samples))}")
    for piece in pieces(data, samples):
        text = tokenizer.decode(piece.ids().tolist()) if tokenizer is not None else None
        if options.json:
            told.append({"sample": piece.sample, "source": piece.shard.source, "shard": piece.shard.path.name,
                         "document": piece.document, "key": piece.key, "tokens": [piece.start, piece.stop],
                         **({} if text is None else {"text": text})})
            continue
        print(f"sample {piece.sample}  {piece.shard.path.name}  document {piece.document}  key {piece.key}  "
              f"tokens {piece.start}..{piece.stop}")
        if text is not None:
            print("    " + text.replace("\n", "\n    "))
    if options.json:
        print(json.dumps({"step": options.step, "samples": ranges_of(samples), "notes": notes, "pieces": told},
                         ensure_ascii=False))


def _asked(options: argparse.Namespace) -> np.ndarray:
    first, end = options.samples
    if not 0 <= first < end or options.rank is not None:
        raise UserError(f"--samples takes FIRST and END with 0 <= FIRST < END, and no --rank; asked: {first} {end}.")
    return sample_numbers([(first, end)])


def _of_step(options: argparse.Namespace, steps: Steps) -> tuple[np.ndarray, list[str]]:
    """The sample numbers of a step (and rank), as logged or, where it is not done yet, as it will be; and what is to be
    said of it."""
    step, rank, ranks = options.step, options.rank, options.ranks
    if step < 1 or not 0 <= (rank or 0) < ranks:
        raise UserError(f"--step counts from 1, --rank from 0 below --ranks; asked: step {step}, rank {rank} of "
                        f"{ranks}.")
    steps.check_ranks(step)
    steps.warn_of_drift()
    notes = []
    if step > steps.done:
        notes.append(f"this run has done {steps.done} steps; this is what step {step} would see")
    if why := steps.skipped(step):
        notes.append(f"the update of step {step} was skipped ({why})")
    samples = steps.samples(step)
    return (samples if rank is None else np.array_split(samples, ranks)[rank]), notes
