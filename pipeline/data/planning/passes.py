"""The passes between reading and writing: sort, match, components, compare, resolve, decide, plan. Each but the last is
a phase of units; each writes files that the next ones read, see `layout`, `runs` and the modules of the passes.

No pass depends on how many units, groups or partitions there are, nor on who does them in which order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from drover.pipeline.contract.tasks import Unit
from drover.pipeline.data.planning.comparing import compare_group, near_column, resolve_partition
from drover.pipeline.data.planning.components import label_components
from drover.pipeline.data.planning.decisions import Summary, decide_group, heldout_below, summary
from drover.pipeline.data.planning.layout import Layout, layout
from drover.pipeline.data.planning.runs import match_partition, sort_group
from drover.pipeline.data.planning.shards import Pieces, pieces_by_hash, plan_shards
from drover.pipeline.data.planning.signatures import banding
from drover.pipeline.data.planning.tails import find_borders, pieces_by_tail
from drover.pipeline.files import sha256_json

if TYPE_CHECKING:
    from drover.pipeline.config.data import ShardConfig
    from drover.pipeline.contract.stage_work import Work


@dataclass(frozen=True)
class Decided:
    """What becomes of the documents.

    Attributes:
        summary: sums over units.
        pieces: what makes each split of each source.
        cut: numbers of the sources of which a document is cut in two, with `heldout_rule: tail`.
        payloads: a shard each, for `write_shard`.
        kept: records of the outputs that name, for each dropped document, the kept one.
    """

    summary: Summary
    pieces: list[list[Pieces]]
    cut: set[int]
    payloads: list[dict[str, Any]]
    kept: list[dict[str, Any]]


def decide(work: Work, config: ShardConfig, names: list[str], sources: list[int],
           read: list[dict[str, Any]]) -> Decided:
    """Decide what becomes of all staged documents.

    Args:
        names: of the units that were read.
        sources: number of each unit's source.
        read: their records.
    """
    near, folder = config.near_duplicates, work.folder
    plan = layout(names, sources, [record["documents"] for record in read], last=config.keep_duplicate == "last",
                  bands=banding(near)[1] if near else 0)
    plan.write(folder)
    tail, name_kept = config.heldout_rule == "tail", config.keep_dropped or near is not None
    settings = {"drop": config.drop_duplicates, "heldout": None if tail else heldout_below(config.heldout_share),
                "name_kept": name_kept}
    staged = [sha256_json([output["sha256"] for output in record["outputs"]
                           if output["path"].endswith((".documents", ".npy", ".bands"))]) for record in read]
    decided = work.do_units("decide", _groups(plan, {**settings, "inputs": _link(work, config, plan, staged)}),
                            decide_group, "groups")
    found, borders = summary(decided), []
    if tail:
        borders = find_borders(folder, plan, found, config.heldout_share)
        pieces = pieces_by_tail(folder, plan, found, borders, len(config.sources))
    else:
        pieces = pieces_by_hash(plan, found, len(config.sources))
    fates = [output["sha256"] for record in decided for output in record["outputs"][:len(record["sums"])]]
    payloads = plan_shards(folder, pieces, config.shard_mb * 1e6, [source.name for source in config.sources],
                           {name: sha256_json(own) for name, *own in zip(names, staged, fates, strict=True)})
    return Decided(found, pieces, {border.source for border in borders if border.characters}, payloads,
                   [record["outputs"][-1] for record in decided if name_kept])


def _link(work: Work, config: ShardConfig, plan: Layout, staged: list[str]) -> str:
    """Sort, match, label, compare: the hash of all that says which documents are equal or alike."""
    inputs = sha256_json([asdict(plan), staged])
    inputs = _hash(work.do_units("sort", _groups(plan, {"inputs": inputs}), sort_group, "groups"), inputs)
    units = _partitions(plan, range(plan.bands + 1), {"inputs": inputs})
    inputs = _hash(work.do_units("match", units, match_partition, "partitions"), inputs)
    near = config.near_duplicates
    settings = {"verify": near and near.verify, "words": near and near.words}
    inputs = _hash(work.do_units("components", [Unit("labels", {"inputs": inputs})] if near else [], label_components),
                   inputs)
    compared = work.do_units("compare", _groups(plan, {**settings, "inputs": inputs}) if near else [], compare_group,
                             "groups")
    inputs = _hash(compared, inputs)
    resolved = work.do_units("resolve", _partitions(plan, [near_column(plan)], {**settings, "inputs": inputs})
                             if near else [], resolve_partition, "partitions")
    return _hash(resolved, inputs)


def _groups(plan: Layout, payload: dict[str, Any]) -> list[Unit]:
    return [Unit(name, {"group": group, **payload}) for group, name in enumerate(plan.group_names)]


def _partitions(plan: Layout, columns: Iterable[int], payload: dict[str, Any]) -> list[Unit]:
    return [Unit(f"{column:03d}-partition-{partition:06d}", {"column": column, "partition": partition, **payload})
            for column in columns for partition in range(plan.partitions)]


def _hash(records: list[dict[str, Any]], before: str) -> str:
    return sha256_json([before, *(output["sha256"] for record in records for output in record["outputs"])])
