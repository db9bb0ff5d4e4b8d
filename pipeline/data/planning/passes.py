"""The passes between reading and writing, in order: sort, match, decide, plan. Each but the last is a phase of units.

No pass depends on how many units, groups or partitions there are, nor on who does them in which order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.config.data import ShardConfig
from pipeline.contract.stage_work import Unit, Work
from pipeline.data.planning.decisions import Summary, decide_group, decide_payload, heldout_below, summary
from pipeline.data.planning.matches import match_name, match_partition, match_payload
from pipeline.data.planning.runs import Layout, group_name, layout, sort_group, sort_payload
from pipeline.data.planning.shards import Pieces, pieces_by_hash, plan_shards
from pipeline.data.planning.tails import Cuts, cut, find_borders, pieces_by_tail
from pipeline.files import sha256_json


@dataclass(frozen=True)
class Decided:
    """What becomes of the documents.

    Attributes:
        summary: sums over units.
        pieces: what makes each split of each source.
        cuts: the documents that are cut in two, with `heldout_rule: tail`.
        payloads: a shard each, for `write_shard`.
    """

    summary: Summary
    pieces: list[list[Pieces]]
    cuts: Cuts
    payloads: list[dict[str, Any]]


def decide(work: Work, config: ShardConfig, names: list[str], sources: list[int],
           read: list[dict[str, Any]]) -> Decided:
    """Decide what becomes of all staged documents.

    Args:
        names: of the units that were read.
        sources: number of each unit's source.
        read: their records.
    """
    groups = layout(names, sources, [record["documents"] for record in read], config.keep_duplicate)
    runs, matches = _sort_and_match(work, groups, [hash_of(record, ".npy") for record in read])
    tail, target = config.heldout_rule == "tail", config.shard_mb * 1e6
    settings = {"drop": config.drop_duplicates, "target": target,
                "heldout": None if tail else heldout_below(config.heldout_share)}
    payloads = [decide_payload(groups, group, settings, sha256_json([runs, matches]))
                for group in range(len(groups.groups) - 1)]
    decided = work.do_units("decide", [Unit(group_name(payload["group"]), payload) for payload in payloads],
                            decide_group, "groups")
    found, cuts = summary(decided), Cuts([], [], [])
    if tail:
        borders = find_borders(work.folder, groups, found, config.heldout_share)
        cuts = cut(work.folder, groups, borders)
        pieces = pieces_by_tail(work.folder, groups, found, borders, len(config.sources), target)
    else:
        pieces = pieces_by_hash(groups, found, len(config.sources))
    staged = [*(hash_of(record, ".documents") for record in read), *cuts.hashes[:1]]
    fates = [*(hash_of(record, ".npy") for record in decided), *cuts.hashes[1:]]
    return Decided(found, pieces, cuts, plan_shards(
        groups, pieces, target, [source.name for source in config.sources], staged, fates, cuts.changed_copies))


def _sort_and_match(work: Work, groups: Layout, indexes: list[str]) -> tuple[str, str]:
    """The hashes of all runs and of all matches."""
    sorts = [sort_payload(groups, group, indexes) for group in range(len(groups.groups) - 1)]
    done = work.do_units("sort", [Unit(group_name(payload["group"]), payload) for payload in sorts], sort_group,
                         "groups")
    runs = _hash(done)
    matches = [match_payload(groups, partition, runs) for partition in range(groups.partitions)]
    done = work.do_units("match", [Unit(match_name(payload["partition"]), payload) for payload in matches],
                         match_partition, "partitions")
    return runs, _hash(done)


def _hash(records: list[dict[str, Any]]) -> str:
    return sha256_json([output["sha256"] for record in records for output in record["outputs"]])


def hash_of(record: dict[str, Any], ending: str) -> str:
    """The sha256 of the one output of a unit whose path has this ending."""
    [found] = [output["sha256"] for output in record["outputs"] if output["path"].endswith(ending)]
    return str(found)
