"""The passes between reading and writing: sort, match, components (of near-duplicates), decide, plan. Each but
the last is a phase of units.

No pass depends on how many units, groups or partitions there are, nor on who does them in which order.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.contract.units import Unit
from pipeline.data.planning.components import components_payload, label_components
from pipeline.data.planning.decisions import Summary, decide_group, decide_payload, heldout_below, summary
from pipeline.data.planning.kept import write_units
from pipeline.data.planning.matches import match_name, match_partition, match_payload
from pipeline.data.planning.near import band_name, band_payload, match_band, sort_bands
from pipeline.data.planning.runs import Layout, group_name, layout, sort_group, sort_payload
from pipeline.data.planning.shards import Pieces, pieces_by_hash, plan_shards
from pipeline.data.planning.signatures import banding, words_setting
from pipeline.data.planning.tails import Cuts, cut, find_borders, pieces_by_tail
from pipeline.files import sha256_json

if TYPE_CHECKING:
    from pipeline.config.data import ShardConfig
    from pipeline.contract.stage_work import Work


@dataclass(frozen=True)
class Decided:
    """What becomes of the documents.

    Attributes:
        summary: sums over units.
        pieces: what makes each split of each source.
        cuts: the documents that are cut in two, with `heldout_rule: tail`.
        payloads: a shard each, for `write_shard`.
        kept: records of the outputs that name, for each dropped document, the kept one.
    """

    summary: Summary
    pieces: list[list[Pieces]]
    cuts: Cuts
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
    groups = layout(names, sources, [record["documents"] for record in read], config.keep_duplicate)
    near = config.near_duplicates
    matches = _matches(work, groups, read, banding(near)[1] if near else 0)
    tail, target = config.heldout_rule == "tail", config.shard_mb * 1e6
    settings: dict[str, Any] = {
        "drop": config.drop_duplicates, "target": target, "near": near is not None,
        "verify": None if near is None else near.verify, "name_kept": config.keep_dropped or near is not None,
        "heldout": None if tail else heldout_below(config.heldout_share),
        **(words_setting(near) if near is not None else {})}
    if settings["name_kept"]:
        write_units(work.folder, groups)
        # The units name and compare documents of any group.
        settings["documents"] = sha256_json([hash_of(record, ".documents") for record in read])
    payloads = [decide_payload(groups, group, settings, matches) for group in range(len(groups.groups) - 1)]
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
    payloads = plan_shards(groups, pieces, target, [source.name for source in config.sources], staged, fates,
                           cuts.changed_copies)
    return Decided(found, pieces, cuts, payloads, [output for record in decided for output in record["outputs"][1:]])


def _matches(work: Work, groups: Layout, read: list[dict[str, Any]], bands: int) -> str:
    """Sort, match, label: the hash of all that says which documents are equal or alike."""
    indexes = [sha256_json([hash_of(record, ending) for ending in (".npy", ".bands")[:1 + (bands > 0)]])
               for record in read]
    sorts = [{**sort_payload(groups, group, indexes), "bands": bands} for group in range(len(groups.groups) - 1)]
    runs = _hash(work.do_units("sort", [Unit(group_name(payload["group"]), payload) for payload in sorts], _sort,
                               "groups"))
    partitions = range(groups.partitions)
    units = [Unit(match_name(partition), match_payload(groups, partition, runs)) for partition in partitions]
    units += [Unit(band_name(band, partition), band_payload(groups, bands, band, partition, runs))
              for band in range(bands) for partition in partitions]
    matches = sha256_json([runs, _hash(work.do_units("match", units, _match, "partitions"))])
    labels = [Unit("labels", components_payload(groups, bands, matches))] if bands else []
    return sha256_json([matches, _hash(work.do_units("components", labels, label_components))])


def _sort(folder: Path, payload: dict[str, Any]) -> dict[str, Any]:
    record = sort_group(folder, payload)
    return {"outputs": record["outputs"] + (sort_bands(folder, payload) if payload["bands"] else [])}


def _match(folder: Path, payload: dict[str, Any]) -> dict[str, Any]:
    return match_band(folder, payload) if "band" in payload else match_partition(folder, payload)


def _hash(records: list[dict[str, Any]]) -> str:
    return sha256_json([output["sha256"] for record in records for output in record["outputs"]])


def hash_of(record: dict[str, Any], ending: str) -> str:
    """The sha256 of the one output of a unit whose path has this ending."""
    [found] = [output["sha256"] for output in record["outputs"] if output["path"].endswith(ending)]
    return str(found)
