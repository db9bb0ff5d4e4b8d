"""What became of each input file: read whole, in part or not at all, and how many of its bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from drover.pipeline.config.data import FilesSource, HubSource, Source
from drover.pipeline.core.console import first, readable

MOST_NAMED = 100
"""So many files of which something could not be read are in the manifest, those with the most such bytes first."""
MOST_REASON = 300
"""Characters of a reason in a message."""
FEW_NAMED = 5
"""So many are named in a message."""
BECAME = ("whole", "partly", "unread", "empty")
LITTLE = 0.5
"""A file of which a smaller share was read is named where the stage is done."""


@dataclass
class FileRead:
    """One input file. Bytes are those on the disk; of a packed file or one of columns they are a share of them.

    Attributes:
        documents: records that are documents.
        rejected: records that are none, and `lost_bytes` their bytes.
        lost: it was not read to its end.
        reason: why the first of them is none.
        separated: whether the source's separator occurs in it; None where there is none to look for.
        other_separator: another spelling of the separator that it holds.
        records_in: the field in which the file's records stand, where they are wrapped in one.
        more_records: a field of its first record that holds a list of such records.
        quoted_tabs: in so many records a quoted value holds line ends, and tabs, which are the delimiter.
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
    other_separator: str = ""
    records_in: str = ""
    more_records: str = ""
    quoted_tabs: int = 0

    def add(self, part: dict[str, Any]) -> None:
        """Add what a unit recorded of the file or of a part of it (see `reading.FileReading`)."""
        self.documents += part.get("documents", 0)
        self.rejected += part.get("rejected", 0)
        self.lost_bytes = min(self.bytes, self.lost_bytes + part.get("lost_bytes", 0))
        self.quoted_tabs += part.get("quoted_tabs", 0)
        self.lost = self.lost or part.get("lost", False)
        if "separated" in part:
            self.separated = bool(self.separated) or part["separated"]
        for name in ("reason", "other_separator", "records_in", "more_records"):
            setattr(self, name, getattr(self, name) or part.get(name, ""))

    @property
    def became(self) -> str:
        """One of BECAME; `empty` if nothing in it is a record."""
        if self.documents:
            return "partly" if self.rejected else "whole"
        return "unread" if self.rejected else "empty"

    @property
    def is_little(self) -> bool:
        """Whether so little of it was read, or nobody knows how little, that it is named."""
        return bool(self.rejected) and (self.lost or not self.documents or
                                        self.lost_bytes > (1 - LITTLE) * self.bytes)

    def __str__(self) -> str:
        return (f"{self.source}/{self.file} ({self.documents:,} documents read, {readable(self.lost_bytes)} of "
                f"{readable(self.bytes)} not read: {self.reason[:MOST_REASON]})")


def files_read(inputs: Iterable[dict[str, Any]]) -> list[FileRead]:
    """The files in the order of `inputs`, the units' records of files and of parts of them."""
    found: dict[str, FileRead] = {}
    for part in inputs:
        source, _, file = part["name"].partition("/")
        found.setdefault(part["name"], FileRead(source, file, part["bytes"])).add(part)
    return list(found.values())


def counts_of_files(source: Source, files: Sequence[FileRead]) -> dict[str, Any]:
    """How many files and bytes of a source were read, for the manifest; a dataset's own library reads its files."""
    if isinstance(source, HubSource):
        return {}
    became = dict.fromkeys(BECAME, 0)
    for file in files:
        became[file.became] += 1
    return {"files": {"in": len(files), **became},
            "bytes": {"in": sum(file.bytes for file in files), "rejected": sum(file.lost_bytes for file in files)}}


def incomplete(files: Iterable[FileRead]) -> list[FileRead]:
    """Those of which something could not be read, those with the most such bytes first."""
    found = (file for file in files if file.rejected)
    return sorted(found, key=lambda file: (-file.lost_bytes, file.source, file.file))


def named(files: Sequence[FileRead]) -> str:
    """The first of some files, with what was read of them, as text for a message."""
    more = f", and {len(files) - FEW_NAMED:,} more" if len(files) > FEW_NAMED else ""
    return "; ".join(map(str, files[:FEW_NAMED])) + more


def remarks(source: Source, files: Sequence[FileRead]) -> Iterator[str]:
    """What a person should know of how a source's files were read, as lines."""
    if wrapped := [file for file in files if file.records_in]:
        yield (f"source {source.name}: the records of {len(wrapped):,} files are those of a list in the field "
               f"{wrapped[0].records_in} ({wrapped[0].file})")
    if single := [file for file in files if file.more_records and file.documents == 1]:
        yield (f"warning: source {source.name}: {len(single):,} files are one document each, although the field "
               f"{single[0].more_records} ({single[0].file}) holds more records, which are not read; if these are the "
               f"documents, take them out (jq -c '.FIELD[]' FILE.json > FILE.jsonl)")
    if tabbed := [file for file in files if file.quoted_tabs]:
        yield (f"warning: source {source.name}: in {sum(file.quoted_tabs for file in tabbed):,} records of "
               f"{len(tabbed):,} files ({tabbed[0].file}) a quoted value holds tabs and line ends, as where several "
               f"rows are read as one: if quotation marks are text, set the source's `quote: \"\"`")
    if empty := [file.file for file in files if file.became == "empty"]:
        yield f"source {source.name}: {len(empty):,} files hold no record ({first(empty)})"
    looked = [file for file in files if file.separated is not None]
    without = [file for file in looked if not file.separated]
    other = [file for file in looked if file.other_separator]
    if isinstance(source, FilesSource) and (without or other):
        line = (f"source {source.name}: the separator {quoted(source.separator)} does not occur in {len(without):,} of "
                f"{len(looked):,} files")
        if other:
            line += (f"; {len(other):,} files (the first is {other[0].file}) hold {quoted(other[0].other_separator)} "
                     f"within documents: if it separates documents, set the source's separator to it, as in "
                     f"`separator: {quoted(other[0].other_separator)}`, or make these files a source of their own")
        yield f"warning: {line}" if other or len(without) == len(looked) else line


def quoted(text: str | None) -> str:
    """A string as YAML and JSON write it in double quotes."""
    return json.dumps(text)
