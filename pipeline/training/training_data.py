"""What is trained on: the token shards of a run in the order that its settings give them."""

from __future__ import annotations

from pathlib import Path

from pipeline.contract.stage_work import Work
from pipeline.data.loader import TrainingData
from pipeline.data.shard_table import ShardTable, open_by_source, size_problems
from pipeline.errors import UserError, listed
from pipeline.parallel.ranks import Ranks

SHOWN = 10
"""Damaged shards that are named; of the others the number is."""


def read_shard_table(work: Work) -> ShardTable:
    """What the encode stage's manifest says of its shards."""
    return ShardTable.of(work.input("encode")[1].outputs)


def open_training_data(work: Work, table: ShardTable | None = None) -> TrainingData:
    """The training split of the encode stage, in the order of the configuration's sources.

    table: its shards, where they are known (`read_shard_table`). No shard is looked at before it is read.
    """
    folder, manifest = work.input("encode")
    table = read_shard_table(work) if table is None else table
    train, sources = work.config.train, [source.name for source in work.config.shard.sources]
    return TrainingData(open_by_source(folder, table, "train", sources), train.sequence_length, work.config.seed,
                        train.mixture, table.content("train"), manifest.counts.get("vocab_size"))


def refuse_cut_shards(folder: Path, table: ShardTable, ranks: Ranks) -> None:
    """See that every shard is there at its full length: each is looked at once, by one of the ranks.

    Raises:
        UserError: some are not; the same on every rank.
    """
    parts = ranks.gather(size_problems(folder, table, range(ranks.rank, len(table), ranks.world)))
    if found := [problem for part in parts for problem in part]:
        more = f"\n... and {len(found) - SHOWN:,} more" if len(found) > SHOWN else ""
        raise UserError(found[0] if len(found) == 1 else
                        f"{len(found):,} of {len(table):,} token shards are damaged:\n{listed(found[:SHOWN])}{more}")
