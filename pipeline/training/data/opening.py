"""The training data: the token shards of a run in the order of its settings, as files or from an object store
(`train.tokens_from`)."""

from __future__ import annotations

import sys
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING

from drover.pipeline.config.phases import PhasePlan
from drover.pipeline.config.training import TrainConfig
from drover.pipeline.contract.stage_work import Work
from drover.pipeline.core.console import Say
from drover.pipeline.core.errors import UserError, all_problems, listed
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
from drover.pipeline.data.shard_table import Opener, ShardTable, files_in, open_shards, size_problems

if TYPE_CHECKING:
    from drover.pipeline.parallel.ranks import Ranks


def read_shard_table(work: Work) -> ShardTable:
    """The shards in the encode stage's manifest."""
    return ShardTable.of(work.input("encode")[1].outputs)


def open_training_data(work: Work, table: ShardTable, opener: Opener | None = None,
                       planner: Planner | None = None) -> TrainingData:
    """The training split of the encode stage, in the order of the configuration's sources.

    Args:
        table: its shards (`read_shard_table`). No shard is opened before it is used.
        opener: opens them; None: as files of the encode stage.
        planner: makes the plans of a packing, on all ranks alike. None: plans are read from their files; a missing one
            is made elsewhere, with a message on stderr. This is for tools, which print results on stdout.
    """
    folder, manifest = work.input("encode")
    train, sources = work.config.train, work.config.shard.source_names
    packing = None if train.packing == "concatenate" else (
        work.folder / "packing", planner or (lambda planning: read(planning, partial(print, file=sys.stderr))))
    return TrainingData(open_shards(table, "train", sources, opener or files_in(folder)), PhasePlan.of(train),
                        work.config.seed, table.content("train"), manifest.counts.get("vocab_size"), packing)


def refuse_beyond(train: TrainConfig, data: TrainingData, say: Say) -> dict[str, float]:
    """Log what the plan will consume, if there are phases, a mixture or a limit, and warn of sources that it repeats
    many times. Returns the epochs of these.

    Raises:
        UserError: that is more than train.max_epochs allows.
    """
    found = planned_by(data.order)
    many = many_epochs(train, found)
    for text in [*(plan_lines(train, found) if says_consumption(train) else ()), *starmap(repetition, many.items())]:
        say(text)
    if beyond := excesses(train, found):
        raise UserError(listed(beyond))
    return many


def refuse_cut_shards(folder: Path, table: ShardTable, ranks: Ranks) -> None:
    """Check that every shard exists and has its full length. Each shard is checked by one of the ranks.

    Raises:
        UserError: some are missing or shorter; the same on every rank.
    """
    parts = ranks.gather(size_problems(folder, table, range(ranks.rank, len(table), ranks.world)))
    if found := [problem for part in parts for problem in part]:
        raise UserError(all_problems(found, f"{len(found):,} of {len(table):,} token shards are damaged"))
