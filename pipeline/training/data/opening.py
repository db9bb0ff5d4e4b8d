"""What is trained on: the token shards of a run in the order that its settings give them, as files or from an object
store (`train.tokens_from`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.phases import PhasePlan
from pipeline.config.tree import Config
from pipeline.contract.stage_work import Work
from pipeline.data.sampling.consumption import (
    TOGETHER,
    Consumption,
    consumed_by,
    excesses,
    plan_lines,
    planned,
    planned_by,
    train_tokens,
)
from pipeline.data.sampling.loader import TrainingData
from pipeline.data.sampling.packed_data import PackedData, PhasePackings, Planner, lengths_of
from pipeline.data.sampling.packing_plan import Planning, read
from pipeline.data.sampling.phased_data import PhasedData
from pipeline.data.shard_table import Opener, OpenShards, ShardTable, open_by_source, size_problems
from pipeline.errors import UserError, listed

if TYPE_CHECKING:
    from pipeline.parallel.ranks import Ranks

SHOWN = 10
"""Damaged shards that are named; of the others the number is."""


def read_shard_table(work: Work) -> ShardTable:
    """What the encode stage's manifest says of its shards."""
    return ShardTable.of(work.input("encode")[1].outputs)


def open_training_data(work: Work, table: ShardTable | None = None, opener: Opener | None = None,
                       planner: Planner | None = None) -> TrainingData:
    """The training split of the encode stage, in the order of the configuration's sources.

    Args:
        table: its shards, where they are known (`read_shard_table`). No shard is looked at before it is read.
        opener: see `OpenShards`.
        planner: makes the plans of a packing, on all ranks alike; None: they are read as their indexes have them, and
            what has none is made aside, which is said on stderr: for tools, whose output is something else.
    """
    folder, manifest = work.input("encode")
    table = read_shard_table(work) if table is None else table
    planner = planner or (lambda planning: read(planning, partial(print, file=sys.stderr)))
    train, sources = work.config.train, [source.name for source in work.config.shard.sources]
    shards = open_by_source(folder, table, "train", sources, opener)
    seed, content, vocabulary = work.config.seed, table.content("train"), manifest.counts.get("vocab_size")
    packed, place, plan = train.packing != "concatenate", work.folder / "packing", PhasePlan.of(train)
    if packed and plan.declared:
        packings = PhasePackings(place, shards, lengths_of(plan), planner)
        return PackedData(packings, plan, seed, content, vocabulary)
    if plan.declared:
        return PhasedData(shards, plan, seed, content, vocabulary)
    packing = None
    if packed:
        opened = OpenShards(folder, table, opener=opener)
        packing = planner(Planning.whole(place / str(train.sequence_length), opened, train.sequence_length))
    return TrainingData(shards, train.sequence_length, seed, train.mixture, content, vocabulary, packing)


def refuse_beyond(config: Config, counts: Mapping[str, Any], data: TrainingData, say: Callable[[str], None]) -> None:
    """Say what the plan will consume, where there are phases or a mixture; UserError where that is more than
    train.max_epochs allows.

    counts: of encode's manifest.
    """
    train = config.train
    if not train.phases and train.mixture is None and train.max_epochs is None:
        return
    if not data.packings:
        found = planned(config, train_tokens(config, counts))
    elif isinstance(data, PackedData):
        found = planned_by(data.order)
    else:  # of as many sequences as the packing makes
        samples = PhasePlan.of(train).sequences_between(0, train.steps)
        taken, held = consumed_by(data.order, samples), {pool.name: pool.tokens for pool in data.order.pools}
        if train.mixture is None:  # its one pool has a name of its own there, which the plan's hash knows
            taken, held = {TOGETHER: sum(taken.values())}, {TOGETHER: sum(held.values())}
        found = Consumption((taken,), held)
    for text in plan_lines(train, found):
        say(text)
    if beyond := excesses(train, found):
        raise UserError(listed(beyond) if len(beyond) > 1 else beyond[0])


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
