"""The passes between reading and writing: sort, match, components, resolve, rank, decide, plan. Each but the last is a
phase of units; each writes files that the next ones read, see `runs` and `near_duplicates`.

No pass depends on how many units, groups or partitions there are, nor on who does them in which order.

What becomes of every document is decided group by group, by the links of its documents. With `validation_rule: tail`
the split is not decided there: all that stay count as trained on until the plan knows where the border falls.
"""

from __future__ import annotations

import struct
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from math import ceil, inf
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np

from drover.pipeline.contract.workers import Task
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Record, atomic_file, output_record
from drover.pipeline.data.documents import Document, document_key, to_json, validation_below
from drover.pipeline.data.filters.base import DROPPED, Dropped
from drover.pipeline.data.planning.near_duplicates import banding, join_components, near_columns, resolve_partition
from drover.pipeline.data.planning.runs import (
    DIGEST,
    DUPLICATE,
    INDEX,
    LOW_SCORE,
    NEAR_DUPLICATE,
    OUTCOMES,
    SUMS,
    TRAIN,
    VALIDATION,
    CorpusLayout,
    StagedDocuments,
    by_key,
    index_row,
    layout,
    match_partition,
    read_links,
    sort_group,
    staged,
    sums_of,
    with_records,
    write_array,
)
from drover.pipeline.data.text_shards import SPLITS, write_members

if TYPE_CHECKING:
    from drover.pipeline.config.data import ShardConfig
    from drover.pipeline.contract.stage_work import Work

@dataclass(frozen=True)
class Decided:
    """What becomes of the documents.

    Attributes:
        dropped: (units, 3) numbers of exact and near-duplicates, and of documents with a low score.
        least: the lowest score that is kept, by number of the source; only for those that keep the best documents.
        pieces: what makes each split of each source.
        payloads: a shard each, for `write_shard`.
        kept: records of the outputs about dropped documents: those that name the kept one, and those with low scores.
    """

    dropped: np.ndarray
    least: dict[int, float]
    pieces: list[list[list[ShardPiece]]]
    payloads: list[Record]
    kept: list[Record]

    def sums(self, source: int) -> dict[str, dict[str, int]]:
        """By split, SUMS over the documents of a source, by its number."""
        pieces = {split: of_sources[source] for split, of_sources in zip(SPLITS, self.pieces, strict=True)}
        return {split: {name: sum(piece.sums[at] for piece in own) for at, name in enumerate(SUMS)}
                for split, own in pieces.items()}

    def cuts(self, source: int) -> bool:
        """Whether a document of a source is cut in two, with `validation_rule: tail`."""
        return any(piece.is_half for piece in self.pieces[0][source])


def decide(work: Work, config: ShardConfig, names: list[str], sources: list[int],
           read: list[Record]) -> Decided:
    """Decide what becomes of all staged documents.

    Args:
        names: of the units that were read.
        sources: number of each unit's source.
        read: their records.
    """
    near, folder = config.near_duplicates, work.folder
    plan = layout(names, sources, [record["documents"] for record in read], banding(near)[1] if near else 0)
    plan.write(folder)
    work.run_pass("sort", _groups(plan), sort_group, "groups")
    work.run_pass("match", _partitions(plan, range(plan.bands + 1)), match_partition, "partitions")
    if near is not None:
        work.run_pass("components", [Task("followers", {})], join_components)
        units = _partitions(plan, near_columns(plan)[:1], verify=near.verify, words=near.words)
        work.run_pass("resolve", units, resolve_partition, "partitions")
    best = config.best_shares
    ranking = [Task(name, {"source": config.source_names.index(name), "share": keep.share,
                           "drop": config.drop_duplicates}) for name, keep in best.items()]
    ranked = work.run_pass("rank", ranking, rank_source, "sources") if ranking else []
    tail, name_kept = config.validation_rule == "tail", config.keep_dropped or near is not None
    decided = work.run_pass("decide", _groups(
        plan, drop=config.drop_duplicates, name_kept=name_kept, ranked=[record["source"] for record in ranked],
        low={name: keep.reason for name, keep in best.items()} if config.keep_dropped else {},
        validation=None if tail else validation_below(config.validation_share)), decide_group, "groups")
    sums, dropped = (np.array([row for record in decided for row in record[name]]) for name in ("sums", "dropped"))
    pieces = pieces_by_tail(folder, plan, sums, config.validation_share, len(config.sources)) if tail else \
        pieces_by_hash(plan, sums, len(config.sources))
    payloads = plan_shards(pieces, config.shard_mb * 1e6, config.source_names)
    return Decided(dropped, {record["source"]: record["least"] for record in ranked}, pieces, payloads, [
                   output for record in decided for output in record["outputs"] if "split" in output])


def rank_source(folder: Path, payload: Record) -> Record:
    """Write which documents of a source are not among the best, a bool each. Holds 33 bytes for each document.

    payload: `source`, its number; `share` of its documents, without duplicates, that is kept; `drop` as in
        `decide_group`.

    Returns:
        `source`; `least`, the lowest score that is kept (above all if no document has one); the files as `outputs`.
    """
    plan = CorpusLayout.read(folder)
    documents = StagedDocuments(folder, plan)
    of_units: dict[str, np.ndarray] = {}
    for group in range(len(plan.groups) - 1):
        units = [unit for unit in plan.units(group) if plan.sources[unit] == payload["source"]]
        outcomes = _decided(folder, plan, documents, group, payload["drop"])[0] if units else np.zeros(0)
        for unit in units:
            first = plan.starts[unit] - plan.bounds(group)[0]
            scores = of_units[plan.names[unit]] = np.load(staged(folder, plan.names[unit], ".scores"))
            scores[outcomes[first:first + len(scores)] != TRAIN] = np.nan
    scores = np.concatenate([np.zeros(0), *of_units.values()])
    staying = scores[~np.isnan(scores)]
    count = min(ceil(Fraction(str(payload["share"])) * len(staying)), int((staying > -inf).sum()))
    least = float(np.partition(staying, -count)[-count]) if count else sys.float_info.max
    best = scores > least
    equal = np.concatenate([np.zeros(0, INDEX), *(np.load(staged(folder, name, ".npy"), mmap_mode="r")[own == least]
                                                  for name, own in of_units.items())])
    best[np.flatnonzero(scores == least)[by_key([equal["high"], equal["low"]])[:count - int(best.sum())]]] = True
    low = np.split(~best, np.cumsum([len(own) for own in of_units.values()], dtype=int))
    return {"source": payload["source"], "least": least, **with_records(folder, [
            write_array(staged(folder, name, ".low"), own) for name, own in zip(of_units, low, strict=False)])}


def _groups(plan: CorpusLayout, **payload: Any) -> list[Task]:
    return [Task(name, {"group": group, **payload}) for group, name in enumerate(plan.group_names)]


def _partitions(plan: CorpusLayout, columns: Iterable[int], **payload: Any) -> list[Task]:
    return [Task(f"{column:03d}-{name}", {"column": column, "partition": partition, **payload})
            for column in columns for partition, name in enumerate(plan.partition_names)]


DUPLICATES = "duplicates"
"""Folder of the outputs that name, for each document that was dropped, the one that was kept; and their split."""
_ROWS_AT_ONCE = 20_000


def decide_group(folder: Path, payload: Record) -> Record:
    """Write what becomes of each document of a group.

    payload: `group`; `drop` (whether equal documents are dropped); `validation` (see `validation_below`; None: not
        decided here); `name_kept` (whether to write which document is kept instead of each that is dropped);
        `ranked` (numbers of the sources that keep the best documents); `low` (by name of each of these sources, why its
        documents with low scores are dropped, if they are to be written).

    Returns:
        For each unit in `sums` SUMS of what is kept in each split, and in `dropped` the numbers of each outcome from
        DUPLICATE on; the files as `outputs`, those that last with their split.
    """
    plan, group = CorpusLayout.read(folder), payload["group"]
    documents = StagedDocuments(folder, plan)
    outcomes, kept, splits_by = _decided(folder, plan, documents, group, payload["drop"])
    begin, _ = plan.bounds(group)
    record: Record = {"sums": [], "dropped": [], "outputs": []}
    for unit in plan.units(group):
        index, first = np.load(staged(folder, plan.names[unit], ".npy")), plan.starts[unit] - begin
        own = outcomes[first:first + len(index)]
        if plan.sources[unit] in payload["ranked"]:
            own[(own == TRAIN) & np.load(staged(folder, plan.names[unit], ".low"))] = LOW_SCORE
        if payload["validation"] is not None:
            high = index["high"]
            for place in splits_by.keys() & range(first, first + len(index)):
                high[place - first] = splits_by[place]
            own[(own == TRAIN) & (high < np.uint64(payload["validation"]))] = VALIDATION
        record["sums"].append([sums_of(index[own == outcome]) for outcome in (TRAIN, VALIDATION)])
        record["dropped"].append([int((own == outcome).sum()) for outcome in range(DUPLICATE, len(OUTCOMES))])
        record["outputs"].append(output_record(folder, write_array(staged(folder, plan.names[unit], ".fates"), own)))
    if payload["name_kept"]:
        dropped = np.flatnonzero((outcomes == DUPLICATE) | (outcomes == NEAR_DUPLICATE))
        record["outputs"].append(_write_kept(documents, plan.group_names[group], dropped + begin, kept[dropped],
                                             [OUTCOMES[outcome] for outcome in outcomes[dropped]]))
    if payload["low"]:
        record["outputs"].append(_write_low(documents, plan.group_names[group],
                                            np.flatnonzero(outcomes == LOW_SCORE) + begin, payload["low"]))
    return record


def _write_low(documents: StagedDocuments, name: str, numbers: np.ndarray, reasons: dict[str, str]) -> Record:
    """Write the documents with low scores as those that filters drop; the output's record. reasons: by source."""
    path = documents.folder / DROPPED / f"low_score-{name}.jsonl"
    size = 0
    with atomic_file(path) as file:
        for number in numbers.tolist():
            document = documents.document(number)
            size += len(document.text.encode())
            file.write(Dropped(document, "keep", reasons[document.source]).line())
    return output_record(documents.folder, path, split=DROPPED, source="", docs=len(numbers), text_bytes=size)


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
                kinds: list[str]) -> Record:
    """Write, for each dropped document, its id, source and URL, those of the one that is kept, why it was dropped, and
    whether both texts are equal; in order, as Parquet. Returns the output's record."""
    import pyarrow as pa
    from pyarrow import parquet
    texts = ("id", "source", "url", "kept_id", "kept_source", "kind")
    schema = pa.schema([*((column, pa.string()) for column in texts), ("equal", pa.bool_())])
    path = documents.folder / DUPLICATES / f"{name}.parquet"
    with atomic_file(path) as file, parquet.ParquetWriter(file, schema) as writer:
        for start in range(0, len(numbers), _ROWS_AT_ONCE):
            pairs = np.stack([numbers, kept], 1)[start:start + _ROWS_AT_ONCE]
            named = {number: documents.named(number) for number in np.unique(pairs).tolist()}
            rows = []
            for (number, other), kind in zip(pairs.tolist(), kinds[start:], strict=False):
                own_id, own_source, url, text = named[number]
                kept_id, kept_source, _, kept_text = named[other]
                rows.append({"id": own_id, "source": own_source, "url": url, "kept_id": kept_id,
                             "kept_source": kept_source, "kind": kind, "equal": text == kept_text})
            writer.write_table(pa.Table.from_pylist(rows, schema))
    return output_record(documents.folder, path, split=DUPLICATES, source="", docs=len(numbers), text_bytes=0)


_BYTES, _CHARACTERS = SUMS.index("text_bytes"), SUMS.index("characters")


@dataclass(frozen=True)
class ShardPiece:
    """A range of a unit's documents, of which those with one outcome belong to one split.

    Attributes:
        unit: its name.
        first, end: the first row and the one after the last.
        outcome: of the documents that belong to the split.
        sums: SUMS over them.
        is_half: whether it is a part of a document, staged as a unit of its own.
    """

    unit: str
    first: int
    end: int
    outcome: int
    sums: Sequence[int]
    is_half: bool = False


def pieces_by_hash(plan: CorpusLayout, sums: np.ndarray, sources: int) -> list[list[list[ShardPiece]]]:
    """The pieces of each split and source, by the outcomes of documents.

    sums: (units, 2 splits, SUMS) of what is kept.
    """
    return [[[all_of_unit(plan, sums, unit, split) for unit, owner in enumerate(plan.sources) if owner == source]
             for source in range(sources)] for split in range(len(SPLITS))]


def all_of_unit(plan: CorpusLayout, sums: np.ndarray, unit: int, outcome: int) -> ShardPiece:
    """All documents of a unit with an outcome."""
    return ShardPiece(plan.names[unit], 0, plan.documents(unit), outcome, sums[unit, outcome].tolist())


def plan_shards(pieces: list[list[list[ShardPiece]]], target: float, sources: list[str]) -> list[Record]:
    """The payloads for `write_shard`, in order: shards of about equal size, as few as keep to `target` on average.

    Args:
        pieces: for each split and source.
        target: bytes of text per shard.
    """
    return [{"split": split, "source": source, "name": f"{source}-{number:05d}", "pieces": chosen}
            for split, of_sources in zip(SPLITS, pieces, strict=True)
            for source, own in zip(sources, of_sources, strict=True)
            for number, chosen in enumerate(_cut(own, target))]


def _cut(pieces: list[ShardPiece], target: float) -> Iterator[list[list[Any]]]:
    """For each shard its pieces: unit, first row, the one after the last, the outcome, and which bytes of the piece
    begin the shard's documents."""
    own = [piece for piece in pieces if piece.sums[_BYTES]]
    starts = np.cumsum([0, *(piece.sums[_BYTES] for piece in own)]).tolist()
    total, count = starts[-1], ceil(starts[-1] / target)
    for low, high in pairwise(-(-number * total // max(1, count)) for number in range(count + 1)):
        first, end = bisect_right(starts, low) - 1, bisect_left(starts, high)  # of the pieces that reach into the shard
        yield [[piece.unit, piece.first, piece.end, piece.outcome, [max(0, low - start), min(after, high) - start]]
               for piece, (start, after) in zip(own[first:end], pairwise(starts[first:end + 1]), strict=True)]


def picked(folder: Path, unit: str, first: int, end: int, outcome: int) -> tuple[np.ndarray, np.ndarray]:
    """The documents with an outcome among some rows of a unit: their rows, and what its index has there."""
    rows = first + np.flatnonzero(np.load(staged(folder, unit, ".fates"), mmap_mode="r")[first:end] == outcome)
    return rows, np.array(np.load(staged(folder, unit, ".npy"), mmap_mode="r")[rows])


def write_shard(folder: Path, payload: Record) -> Record:
    """Write one shard; its record as `outputs`. If documents are larger than half a shard, no document may begin in
    this one: then it is not written.

    Raises:
        UserError: a document is not what was staged.
    """
    pieces = []
    for unit, first, end, outcome, (low, high) in payload["pieces"]:
        _, index = picked(folder, unit, first, end, outcome)
        before = np.cumsum(index["text_bytes"], dtype=np.int64) - index["text_bytes"].astype(np.int64)
        pieces.append((unit, index[(before >= low) & (before < high)]))
    path, picks = folder / payload["split"] / f"{payload['name']}.tar", np.concatenate([index for _, index in pieces])
    if not len(picks):
        return {"outputs": []}
    write_members(path, zip(_keys(picks), _members(folder, pieces), strict=True))
    record = output_record(folder, path, split=payload["split"], source=payload["source"], docs=len(picks),
                           text_bytes=int(picks["text_bytes"].sum()))
    return {"outputs": [record]}


def _keys(picks: np.ndarray) -> Iterator[str]:
    """Names of documents in their shard; equal ones are numbered."""
    seen: dict[bytes, int] = {}
    for high, low in zip(picks["high"].tolist(), picks["low"].tolist(), strict=True):
        digest = struct.pack(">QQ", high, low)
        before = seen.get(digest, 0)
        yield document_key(digest, before)
        seen[digest] = before + 1


def _members(folder: Path, pieces: list[tuple[str, np.ndarray]]) -> Iterator[bytes]:
    """The JSON of the documents. UserError if it is not what was staged."""
    for unit, index in pieces:
        with open(path := staged(folder, unit, ".documents"), "rb") as file:
            for offset, length, crc in index[["offset", "length", "crc"]].tolist():
                file.seek(offset)
                member = file.read(length)
                if crc32(member) != crc:
                    raise UserError(f"{path} changed after it was written (at byte {offset:,}). Check the disk, and "
                                    f"run the stage again.")
                yield member


def pieces_by_tail(folder: Path, plan: CorpusLayout, sums: np.ndarray, validation_share: float,
                   sources: int) -> list[list[list[ShardPiece]]]:
    """The pieces of each split and source, in the order of documents: of a source's n characters that are kept, the
    first int(n * (1 - share)) stay in the training split. No pieces for a source that keeps nothing.

    The document at the border is staged again, as two units. sums: as in `pieces_by_hash`."""
    trained = 1 - Fraction(str(validation_share))  # as written: 1 - 0.9 is below 0.1
    train, validation = ([list[ShardPiece]() for _ in range(sources)] for _ in SPLITS)
    for source in range(sources):
        units = np.flatnonzero(np.array(plan.sources) == source).tolist()
        ends = np.cumsum(sums[units, TRAIN, _CHARACTERS])
        if not len(ends) or not ends[-1]:
            continue
        border = int(int(ends[-1]) * trained)
        at = int(np.searchsorted(ends, border, side="right"))
        unit, before = units[at], int(ends[at - 1]) if at else 0
        name, end = plan.names[unit], plan.documents(unit)
        rows, index = picked(folder, name, 0, end, TRAIN)
        inside = before + np.cumsum(index["characters"]).astype(np.int64)
        first = int(np.searchsorted(inside, border, side="right"))
        row = int(rows[first])
        characters = border - (int(inside[first - 1]) if first else before)  # of this document; 0: it is whole
        head, tail = _stage_halves(folder, name, StagedDocuments(folder, plan).document(plan.starts[unit] + row),
                                   characters) if characters else ([], [])
        train[source] = [*(all_of_unit(plan, sums, one, TRAIN) for one in units[:at]),
                         ShardPiece(name, 0, row, TRAIN, sums_of(index[:first])), *head]
        rest = first + bool(characters)
        validation[source] = [*tail, ShardPiece(name, row + bool(characters), end, TRAIN, sums_of(index[rest:])),
                              *(all_of_unit(plan, sums, one, TRAIN) for one in units[at + 1:])]
    return [train, validation]


def _stage_halves(folder: Path, unit: str, document: Document, characters: int) -> list[list[ShardPiece]]:
    """The two parts of a unit's document that the border cuts behind so many characters, each staged as a unit of its
    own."""
    result = []
    for name, place, text in ((f"{unit}-000", f"[:{characters}]", document.text[:characters]),
                              (f"{unit}-001", f"[{characters}:]", document.text[characters:])):
        member = to_json(replace(document, text=text, id=document.id + place,
                                 place=document.place and document.place + place))
        index = np.frombuffer(index_row(text, 0, member), INDEX)
        with atomic_file(staged(folder, name, ".documents")) as file:
            file.write(member)
        for ending, table in ((".npy", index), (".fates", np.full(1, TRAIN, np.uint8))):
            write_array(staged(folder, name, ending), table)
        result.append([ShardPiece(name, 0, 1, TRAIN, sums_of(index), is_half=True)])
    return result
