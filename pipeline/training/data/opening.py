"""The training data: the token shards of a run, on this node's disk, in the order of its settings."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING

from drover.pipeline.config.phases import PhasePlan
from drover.pipeline.config.training import TrainConfig
from drover.pipeline.contract.stage_work import Work
from drover.pipeline.core.background import BackgroundWorker
from drover.pipeline.core.console import Say
from drover.pipeline.core.errors import UserError, all_problems, listed
from drover.pipeline.data.remote_tokens import download_shards
from drover.pipeline.data.sampling.consumption import (
    excesses,
    many_epochs,
    plan_lines,
    planned_by,
    repetition,
    says_consumption,
)
from drover.pipeline.data.sampling.loader import TrainingData
from drover.pipeline.data.sampling.packing import Planner, read
from drover.pipeline.data.shard_table import ShardTable, open_shards, size_problems

if TYPE_CHECKING:
    from drover.pipeline.parallel.ranks import Ranks

POLL_S = 5.0
"""Interval at which ranks that wait for a download learn whether it is done."""


def read_shard_table(work: Work) -> ShardTable:
    """The shards in the encode stage's manifest."""
    return ShardTable.of(work.input("encode")[1].outputs)


def open_training_data(work: Work, table: ShardTable, folder: Path, planner: Planner | None = None) -> TrainingData:
    """The training split of the encode stage, in the order of the configuration's sources.

    Args:
        table: its shards (`read_shard_table`). No shard is opened before it is used.
        folder: with the shards' files.
        planner: makes the plans of a packing, on all ranks alike. None: plans are read from their files; a missing one
            is made elsewhere, with a message on stderr. This is for tools, which print results on stdout.
    """
    train = work.config.train
    sources = work.config.shard.source_names
    counts = work.input("encode")[1].counts
    packing = None if train.packing == "concatenate" else (
        work.folder / "packing", planner or (lambda planning: read(planning, partial(print, file=sys.stderr))))
    return TrainingData(open_shards(table, "train", sources, folder), PhasePlan.of(train),
                        work.config.seed, table.content("train"), counts.get("vocab_size"), packing)


def refuse_beyond(train: TrainConfig, data: TrainingData, say: Say) -> dict[str, float]:
    """Log what the plan will consume, if there are phases, a mixture or a limit, and warn of sources that it repeats
    many times. Returns the epochs of these.

    Raises:
        UserError: that is more than train.max_epochs allows.
    """
    consumption = planned_by(data.order)
    many = many_epochs(train, consumption)
    repetitions = starmap(repetition, many.items())
    for text in [*(plan_lines(train, consumption) if says_consumption(train) else ()), *repetitions]:
        say(text)
    if beyond := excesses(train, consumption):
        raise UserError(listed(beyond))
    return many


def download_once_per_node(work: Work, table: ShardTable, rows: Iterable[int], ranks: Ranks) -> None:
    """With `train.tokens_from`, have one process of each node download the shards in these rows. Called on all ranks
    alike; UserError as of `download_shards`, the same on every rank."""
    if work.config.train.tokens_from is None:
        return
    worker = BackgroundWorker[Iterable[int]](
        "token-download", lambda wanted: download_shards(work, table, wanted, shows_progress=ranks.is_rank_zero))
    if os.environ.get("LOCAL_RANK", "0") == "0":
        worker.put(rows)
    # Many short collectives, since a download may take longer than a collective waits for other ranks.
    while ranks.sum(worker.close(POLL_S))[0] < ranks.world:
        pass

    def refuse_failed() -> None:
        if worker.error is not None:
            raise worker.error
    ranks.by_all(refuse_failed)


def refuse_cut_shards(folder: Path, table: ShardTable, ranks: Ranks) -> None:
    """Check that every shard exists and has its full length. Each shard is checked by one of the ranks.

    Raises:
        UserError: some are missing or shorter; the same on every rank.
    """
    parts = ranks.gather(size_problems(folder, table, range(ranks.rank, len(table), ranks.world)))
    if problems := [problem for part in parts for problem in part]:
        raise UserError(all_problems(problems, f"{len(problems):,} of {len(table):,} token shards are damaged"))
