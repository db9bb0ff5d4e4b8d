"""What is counted of a source while it is read: what became of its files, and what its documents are like."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from drover.pipeline.core.console import counted, first, readable
from drover.pipeline.core.files import Record
from drover.pipeline.data.documents import Document, Rejection

if TYPE_CHECKING:
    from drover.pipeline.config.data import Source
    from drover.pipeline.data.filters.base import Dropped

MOST_NAMED = 100
"""So many files of which something could not be read are in the manifest, those with the most such bytes first."""
MOST_REASON = 300
"""Characters of a reason in a message."""
FEW_NAMED = 5
"""So many are named in a message."""
BECAME = ("whole", "partly", "unread", "empty")


@dataclass
class FileRead:
    """One input file. Bytes are those on the disk; of a packed file or one of columns they are a share of them.

    Attributes:
        documents: records that are documents.
        rejected: records that are none, and `lost_bytes` their bytes.
        lost: it was not read to its end.
        reason: why the first of them is none.
        separated: whether the source's separator occurs in it; None where there is none to look for.
        more_records: a field of its first record that holds a list of such records.
        passed_over: records of a WARC file that are no pages, by what they are instead.
        truncated: pages that the crawler cut.
    """

    source: str
    file: str
    bytes: int
    documents: int = 0
    rejected: int = 0
    lost_bytes: int = 0
    lost: bool = False
    reason: str = ""
    separated: bool | None = None
    more_records: str = ""
    truncated: int = 0
    passed_over: dict[str, int] | None = None

    def count(self, item: object) -> None:
        """Count a document that was read of it, or a rejection."""
        if isinstance(item, Rejection):
            self.rejected += item.documents
            self.lost_bytes += item.lost_bytes
            self.lost = self.lost or item.lost
            self.reason = self.reason or (item.reason if item.documents else "")
        else:
            self.documents += 1

    def record(self) -> Record:
        """What differs from a file of which nothing is known."""
        return {name: value for name, value in vars(self).items() if value != getattr(FileRead, name, None)}

    def add(self, part: Record) -> None:
        """Add what was recorded of a part of it."""
        for name in ("documents", "rejected", "lost_bytes", "truncated"):
            setattr(self, name, getattr(self, name) + part.get(name, 0))
        for name in ("lost", "separated", "reason", "more_records"):
            setattr(self, name, getattr(self, name) or part.get(name, getattr(self, name)))
        self.lost_bytes = min(self.bytes, self.lost_bytes)
        self.passed_over = total([self.passed_over or {}, part.get("passed_over") or {}])

    @property
    def became(self) -> str:
        """One of BECAME; `empty` if nothing in it is a record."""
        if self.documents:
            return "partly" if self.rejected else "whole"
        return "unread" if self.rejected else "empty"

    def __str__(self) -> str:
        rest = f"all {readable(self.bytes)} read, but more is missing" if self.lost and not self.lost_bytes else \
            f"{readable(self.lost_bytes)} of {readable(self.bytes)} not read"
        return (f"{self.source}/{self.file} ({counted(self.documents, 'document')} read, {rest}: "
                f"{self.reason[:MOST_REASON]})")


def files_read(inputs: Iterable[Record]) -> list[FileRead]:
    """The files in the order of `inputs`, the units' records of files and of parts of them."""
    result: dict[str, FileRead] = {}
    for part in inputs:
        result.setdefault(part["name"], FileRead(part["source"], part["file"], part["bytes"])).add(part)
    return list(result.values())


def counts_of_files(files: Sequence[FileRead]) -> Record:
    """How many files and bytes of a source were read, for the manifest."""
    became = dict.fromkeys(BECAME, 0)
    for file in files:
        became[file.became] += 1
    return {"files": {"in": len(files), **became},
            "bytes": {"in": sum(file.bytes for file in files), "rejected": sum(file.lost_bytes for file in files)}}


def incomplete(files: Iterable[FileRead]) -> list[FileRead]:
    """Those of which something could not be read, those with the most such bytes first."""
    result = (file for file in files if file.rejected)
    return sorted(result, key=lambda file: (-file.lost_bytes, file.source, file.file))


def named(files: Sequence[FileRead]) -> str:
    """The first of some files, with what was read of them, as text for a message."""
    return first(list(map(str, files)), FEW_NAMED)


def remarks(source: Source, files: Sequence[FileRead]) -> Iterator[str]:
    """What a person should know of how a source's files were read, as lines."""
    if single := [file for file in files if file.more_records and file.documents == 1]:
        yield (f"warning: source {source.name}: {len(single):,} files are one document each, although the field "
               f"{single[0].more_records} ({single[0].file}) holds more records, which are not read; if these are the "
               f"documents, take them out (jq -c '.FIELD[]' FILE.json > FILE.jsonl)")
    if passed := passed_over(files):
        pages = sum(file.documents + file.rejected for file in files if file.passed_over)
        kinds = ", ".join(f"{count:,} {what}" for what, count in passed.items())
        yield (f"source {source.name}: of {sum(passed.values()) + pages:,} records of WARC files {pages:,} are pages; "
               f"passed over are {kinds}")
    if truncated := sum(file.truncated for file in files):
        yield f"source {source.name}: {truncated:,} pages were truncated by the crawler, and are kept as far as they go"
    if empty := [file.file for file in files if file.became == "empty" and not file.passed_over]:
        yield f"source {source.name}: {counted(len(empty), 'file')} without a record ({first(empty)})"
    looked = [file for file in files if file.separated is not None]
    without = [file for file in looked if not file.separated]
    if source.kind == "files" and without:
        yield (f"{'warning: ' * (len(without) == len(looked))}source {source.name}: the separator "
               f"{json.dumps(source.separator)} does not occur in {len(without):,} of {len(looked):,} files")


def dropped_by_reason(counts: Record) -> dict[str, int]:
    """How many documents of a source were dropped for each reason, those of filters as `filter: reason`. counts: of a
    source, as the manifest has them."""
    filters = counts.get("filters", {})
    return {**{name: count for name, count in counts["dropped"].items() if name not in filters},
            **{f"{name}: {reason}": count for name, own in filters.items() for reason, count in own["reasons"].items()}}


def passed_over(files: Iterable[FileRead]) -> dict[str, int]:
    """How many records of WARC files are no pages, by what they are, the most frequent first."""
    return most_frequent(total(file.passed_over or {} for file in files), MOST_REASONS, OTHERS)


EXAMPLE_CHARACTERS = 160
"""Of a dropped document as it is shown."""
MOST_REASONS = 20
"""Reasons of a filter of which examples are kept."""
MOST_LANGUAGES = 30
"""Languages that are counted apart; the rest are `others`."""
OTHERS = "others"


class DataCard:
    """The card of one unit.

    Args:
        examples: dropped documents to show for each filter and reason.
    """

    def __init__(self, examples: int = 0) -> None:
        self._examples = examples
        self._counts = dict.fromkeys(("documents", "changed", "bytes"), 0)
        self._shown: dict[str, dict[str, list[dict[str, str]]]] = {}

    def add(self, document: Document, *, changed: bool = False) -> None:
        """Count a document that the filters kept. changed: they changed it."""
        text = document.text
        self._counts["documents"] += 1
        self._counts["changed"] += changed
        self._counts["bytes"] += len(text) if text.isascii() else len(text.encode())

    def drop(self, dropped: Dropped) -> None:
        """Keep the beginning of a document that a filter dropped, where it is one of the first for its reason."""
        text = dropped.document.text
        more = "…" if len(text) > EXAMPLE_CHARACTERS else ""
        example = {"id": dropped.document.id, "text": text[:EXAMPLE_CHARACTERS] + more}
        _show(self._shown, dropped.filter, dropped.reason, [example], self._examples)

    def record(self) -> Record:
        """As JSON: `documents`, `changed` and `bytes` of those that the filters kept; `examples` of dropped ones by
        filter and reason."""
        return {**self._counts, "examples": self._shown}


def _show(shown: dict[str, dict[str, list[Any]]], name: str, reason: str, examples: list[Any], most: int) -> None:
    """Add examples of what a filter dropped, up to `most` for a reason."""
    reasons = shown.get(name, {})
    if most and (reason in reasons or len(reasons) < MOST_REASONS):
        own = shown.setdefault(name, {}).setdefault(reason, [])
        own += examples[:most - len(own)]


def source_card(records: Sequence[Mapping[str, Any]], examples: int) -> Record:
    """The card of a source, of its units' records in order: their cards added up, and their `findings` of languages,
    scores and duplicate lines.

    Args:
        records: of finished units.
        examples: dropped documents to show for each filter and reason.

    Returns:
        As `DataCard.record`, with `languages`: documents by language, for each filter that counts languages;
        `languages_kept`: those in wanted ones that all filters keep; `scores`: documents `kept` and `dropped` by the
        lower end of the scores' bins, for each classifier; `removed`: lines and bytes, for each filter of duplicate
        lines.
    """
    cards = [DataCard().record()]
    shown = dict[str, dict[str, list[Any]]]()
    for record in records:
        cards.append(record["card"])
        for name, reasons in record["card"]["examples"].items():
            for reason, own in reasons.items():
                _show(shown, name, reason, own, examples)
    card = total({key: value for key, value in own.items() if key != "examples"} for own in cards)
    seen = {what: total({name: own[what] for name, own in record["findings"].items() if what in own}
                        for record in records) for what in ("languages", "languages_kept", "scores", "removed")}
    seen["languages"] = {name: most_frequent(counts, MOST_LANGUAGES, OTHERS)
                         for name, counts in seen["languages"].items()}
    return {**card, "examples": shown, **{what: own for what, own in seen.items() if own}}


def total(parts: Iterable[Record]) -> Record:
    """Counts, in dictionaries of dictionaries, added up; what only some have is there as well."""
    result: Record = {}
    for part in parts:
        for name, value in part.items():
            nested = isinstance(value, dict)
            result[name] = total([result.get(name, {}), value]) if nested else result.get(name, 0) + value
    return result


def most_frequent(counts: Mapping[str, int], most: int, others: str) -> dict[str, int]:
    """The most frequent of some counts; the rest are counted together, as `others`."""
    ordered = sorted(counts.items(), key=lambda entry: (entry[0] == others, -entry[1], entry[0]))
    return total([dict(ordered[:most]), *({others: count} for _, count in ordered[most:])])
