"""The passes between reading and writing: sort, match, components, resolve, decide, plan. Each but the last is a phase
of units; each writes files that the next ones read, see `runs` and `near_duplicates`.

No pass depends on how many units, groups or partitions there are, nor on who does them in which order.

What becomes of every document is decided group by group, by the links of its documents. With `validation_rule: tail`
the split is not decided there: all that stay count as trained on until the plan knows where the border falls.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from drover.pipeline.contract.workers import Task
from drover.pipeline.core.files import atomic_file, output_record
from drover.pipeline.data.planning.near_duplicates import join_components, near_columns, resolve_partition
from drover.pipeline.data.planning.runs import (
    DIGEST,
    DUPLICATE,
    NEAR_DUPLICATE,
    OUTCOMES,
    SUMS,
    TRAIN,
    VALIDATION,
    CorpusLayout,
    StagedDocuments,
    layout,
    match_partition,
    read_links,
    sort_group,
    sums_of,
)
from drover.pipeline.data.planning.shards import ShardPiece, pieces_by_hash, pieces_by_tail, plan_shards
from drover.pipeline.data.planning.signatures import banding
from drover.pipeline.data.reading import staged
from drover.pipeline.data.text_shards import SPLITS

if TYPE_CHECKING:
    from drover.pipeline.config.data import ShardConfig
    from drover.pipeline.contract.stage_work import Work


@dataclass(frozen=True)
class Decided:
    """What becomes of the documents.

    Attributes:
        dropped: (units, 2) numbers of exact and near-duplicates.
        pieces: what makes each split of each source.
        payloads: a shard each, for `write_shard`.
        kept: records of the outputs that name, for each dropped document, the kept one.
    """

    dropped: np.ndarray
    pieces: list[list[list[ShardPiece]]]
    payloads: list[dict[str, Any]]
    kept: list[dict[str, Any]]

    def sums(self, source: int) -> dict[str, dict[str, int]]:
        """By split, SUMS over the documents of a source, by its number."""
        pieces = {split: of_sources[source] for split, of_sources in zip(SPLITS, self.pieces, strict=True)}
        return {split: {name: sum(piece.sums[at] for piece in own) for at, name in enumerate(SUMS)}
                for split, own in pieces.items()}

    def cuts(self, source: int) -> bool:
        """Whether a document of a source is cut in two, with `validation_rule: tail`."""
        return any(piece.cut for piece in self.pieces[0][source])


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
    work.run_pass("sort", _groups(plan), sort_group, "groups")
    work.run_pass("match", _partitions(plan, range(plan.bands + 1)), match_partition, "partitions")
    if near is not None:
        work.run_pass("components", [Task("followers", {})], join_components)
        units = _partitions(plan, near_columns(plan)[:1], verify=near.verify, words=near.words)
        work.run_pass("resolve", units, resolve_partition, "partitions")
    tail, name_kept = config.validation_rule == "tail", config.keep_dropped or near is not None
    decided = work.run_pass("decide", _groups(
        plan, drop=config.drop_duplicates, name_kept=name_kept,
        validation=None if tail else validation_below(config.validation_share)), decide_group, "groups")
    sums, dropped = (np.array([row for record in decided for row in record[name]]) for name in ("sums", "dropped"))
    pieces = pieces_by_tail(folder, plan, sums, config.validation_share, len(config.sources)) if tail else \
        pieces_by_hash(plan, sums, len(config.sources))
    payloads = plan_shards(pieces, config.shard_mb * 1e6, config.source_names)
    return Decided(dropped, pieces, payloads, [record["outputs"][-1] for record in decided if name_kept])


def _groups(plan: CorpusLayout, **payload: Any) -> list[Task]:
    return [Task(name, {"group": group, **payload}) for group, name in enumerate(plan.group_names)]


def _partitions(plan: CorpusLayout, columns: Iterable[int], **payload: Any) -> list[Task]:
    return [Task(f"{column:03d}-{name}", {"column": column, "partition": partition, **payload})
            for column in columns for partition, name in enumerate(plan.partition_names)]


DUPLICATES = "duplicates"
"""Folder of the outputs that name, for each document that was dropped, the one that was kept; and their split."""
_ROWS_AT_ONCE = 20_000


def validation_below(share: float) -> int:
    """The high half of a digest is held out below this: share * 2^64, which is exact."""
    return ceil(share * 2**64)


def decide_group(folder: Path, payload: dict[str, Any]) -> dict[str, Any]:
    """Write what becomes of each document of a group.

    payload: `group`; `drop` (whether equal documents are dropped); `validation` (see `validation_below`; None: not
        decided here); `name_kept` (whether to write which document is kept instead of each that is dropped).

    Returns:
        For each unit in `sums` SUMS of what is kept in each split, and in `dropped` the numbers of exact and
        near-duplicates; the files as `outputs`, that of the documents kept instead of others last.
    """
    plan, group = CorpusLayout.read(folder), payload["group"]
    documents = StagedDocuments(folder, plan)
    outcomes, kept, splits_by = _decided(folder, plan, documents, group, payload["drop"])
    begin, _ = plan.bounds(group)
    record: dict[str, Any] = {"sums": [], "dropped": [], "outputs": []}
    for unit in plan.units(group):
        index, first = np.load(staged(folder, plan.names[unit], ".npy")), plan.starts[unit] - begin
        own = outcomes[first:first + len(index)]
        if payload["validation"] is not None:
            high = index["high"]
            for place in splits_by.keys() & range(first, first + len(index)):
                high[place - first] = splits_by[place]
            own[(own == TRAIN) & (high < np.uint64(payload["validation"]))] = VALIDATION
        record["sums"].append([sums_of(index[own == outcome]) for outcome in (TRAIN, VALIDATION)])
        record["dropped"].append([int((own == outcome).sum()) for outcome in (DUPLICATE, NEAR_DUPLICATE)])
        with atomic_file(path := staged(folder, plan.names[unit], ".fates")) as file:
            np.save(file, own)
        record["outputs"].append(output_record(folder, path))
    if payload["name_kept"]:
        dropped = np.flatnonzero(outcomes >= DUPLICATE)
        record["outputs"].append(_write_kept(documents, plan.group_names[group], dropped + begin, kept[dropped],
                                             [OUTCOMES[outcome] for outcome in outcomes[dropped]]))
    return record


def _decided(folder: Path, plan: CorpusLayout, documents: StagedDocuments, group: int,
             drop: bool) -> tuple[np.ndarray, np.ndarray, dict[int, int]]:
    """The outcome of each document of a group; the number of the document that is kept in its place; and, for those
    that stay although a component has them, the digest that decides their split, so that the component is in one split.
    """
    begin, end = plan.bounds(group)
    outcomes = np.zeros(end - begin, np.uint8)
    kept = np.arange(begin, end)
    between = read_links(folder, plan, DIGEST, plan.partition_names, group)
    inside = read_links(folder, plan, DIGEST, [plan.group_names[group]], group)
    kept[between["other"] - begin] = between["kept"]
    kept[inside["other"] - begin] = kept[inside["kept"] - begin]
    if drop:
        outcomes[kept != np.arange(begin, end)] = DUPLICATE
    if not plan.bands:
        return outcomes, kept, {}
    links, staying = (read_links(folder, plan, column, plan.partition_names, group) for column in near_columns(plan))
    near = (links["other"] - begin).astype(np.int64)
    outcomes[near[outcomes[near] == TRAIN]] = NEAR_DUPLICATE
    kept[near] = links["kept"]
    kept[inside["other"] - begin] = kept[inside["kept"] - begin]
    return outcomes, kept, {other - begin: documents.row(first)[1]["high"] for other, first in staying.tolist()}


def _write_kept(documents: StagedDocuments, name: str, numbers: np.ndarray, kept: np.ndarray,
                kinds: list[str]) -> dict[str, Any]:
    """Write, for each dropped document, its id and source, those of the one that is kept, why it was dropped, and
    whether both texts are equal; in order, as Parquet. Returns the output's record."""
    import pyarrow as pa
    from pyarrow import parquet
    schema = pa.schema([*((column, pa.string()) for column in ("id", "source", "kept_id", "kept_source", "kind")),
                        ("equal", pa.bool_())])
    path = documents.folder / DUPLICATES / f"{name}.parquet"
    with atomic_file(path) as file, parquet.ParquetWriter(file, schema) as writer:
        for start in range(0, len(numbers), _ROWS_AT_ONCE):
            pairs = np.stack([numbers, kept], 1)[start:start + _ROWS_AT_ONCE]
            named = {number: documents.named(number) for number in np.unique(pairs).tolist()}
            rows = []
            for (number, other), kind in zip(pairs.tolist(), kinds[start:], strict=False):
                (own_id, own_source, text), (kept_id, kept_source, kept_text) = named[number], named[other]
                rows.append({"id": own_id, "source": own_source, "kept_id": kept_id, "kept_source": kept_source,
                             "kind": kind, "equal": text == kept_text})
            writer.write_table(pa.Table.from_pylist(rows, schema))
    return output_record(documents.folder, path, split=DUPLICATES, source="", docs=len(numbers), text_bytes=0)
