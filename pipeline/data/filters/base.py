"""What a filter of documents is, and which ones ship.

A filter is a class with settings as fields and one method, which is called with one document at a time:

    class Short(Filter):
        \"\"\"Drops documents that are too long.\"\"\"

        max_characters: int = Field(1000, gt=0)
        \"\"\"Longer documents are dropped.\"\"\"

        def __call__(self, document: Document) -> Document | str:
            return "too long" if len(document.text) > self.max_characters else document

`shard.filters: [{kind: ..., max_characters: 500}]` lists filters in the order in which they run. A document that one
drops never reaches the next. The texts that pass the last filter are deduplicated, hashed, split and trained on.

To add one from outside: put the class into a module that Python finds (PYTHONPATH, or an installed package; where jobs
run, too) and give `kind: my_module:Short`. To add one to Drover: a module in this folder, its line in `FILTERS` of
pipeline/config/shipped.py, and its test in tests/data/filters.

A filter's decision may depend only on the document and the settings: any number of processes read documents, in any
order, and again after a kill. Keep costly objects (a compiled expression) in a `functools.cached_property`: a process
makes each filter once for a unit of reading.

A filter that needs files (a model, evaluation sets) names them in `reads` and reads them in `open`. Declare their paths
as `LocalPath` and with `execution` (`drover.pipeline.config.section`): their content counts, not their place. Keep what
takes long to read in a function with `lru_cache`, once for the process. The stage records these files and their hashes
as its inputs, as filters/<name of the filter>/<name of the file>, and does not continue with other files. Tools that
only look at a run do not import a filter from outside of Drover, so they do not see its files.

The stage counts how many documents a filter dropped and why. A filter counts everything else itself (languages, items
of evaluation sets) and returns it as `findings`, which are added up over all units.
"""

from __future__ import annotations

import json
import unicodedata
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from drover.pipeline.config.kinds import Kind, external_sources
from drover.pipeline.config.section import added
from drover.pipeline.config.shipped import FILTERS, name_of
from drover.pipeline.core.errors import UnusableInputError, UserError, raised_at
from drover.pipeline.core.files import Record
from drover.pipeline.data.counts import most_frequent
from drover.pipeline.data.documents import Document, as_values, to_json

if TYPE_CHECKING:
    from drover.pipeline.config.tree import Config

class Filter(Kind):
    """One filter: settings are its fields, each with its text underneath."""

    name: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]+$")
    """Under which its documents are counted; null: the kind. Two filters of one kind need two names."""
    sources: list[str] | None = added(None, min_length=1)
    """Names of the sources whose documents it sees, as in [web]; null: all."""

    @abstractmethod
    def __call__(self, document: Document) -> Document | str:
        """What becomes of a document.

        Returns:
            The document as it was given, to keep it; one with another text (`Document.with_text`) or `meta`, to
            replace it; or a string, to drop it: the reason, one of a few fixed phrases, because they are counted.
            A document that is left without text is dropped. Its source and id must stay.

        Raises:
            Exception: any; it ends the stage, naming the filter and the document.
        """

    def reads(self) -> list[Path]:
        """The files that it needs; UserError if it cannot find out."""
        return []

    def open(self) -> None:
        """Read what it needs, before the first document of a unit.

        Raises:
            UserError: a file is not there or cannot be used.
        """

    def take(self, files: Sequence[Path]) -> None:
        """Read what passes before the reading made for it; for most filters there is nothing."""

    def kept(self) -> None:
        """Called after the document that it was given last has passed all filters."""

    def findings(self) -> Record:
        """What it has counted in the documents so far: numbers, or dictionaries of them."""
        return {}


def libraries(items: Iterable[Kind]) -> dict[str, str]:
    """What else decides what filters do: versions of packages that they need, and of Python's table of characters."""
    from importlib.metadata import packages_distributions, version

    modules = {own.needs for own in FILTERS.made(list(items)) if own.needs}
    packages = {name for module in modules for name in packages_distributions().get(module, [])[:1]}
    return {"unicode": unicodedata.unidata_version} | {package: version(package) for package in sorted(packages)}


def external_code(config: Config) -> dict[str, Path]:
    """The source files of filters from outside, by module."""
    return external_sources(item.kind for item in config.shard.filters)


NO_TEXT = "no text was left"
MOST_REASONS = 50
"""Reasons of one filter that are counted apart, so that one which puts numbers into them fills no manifest."""
OTHER_REASONS = "other reasons"


DROPPED = "dropped"
"""Folder of the documents that filters dropped, a file for each unit, where they are kept."""


@dataclass(frozen=True)
class Dropped:
    """A document that was dropped, as the filter that dropped it saw it."""

    document: Document
    filter: str
    reason: str

    def line(self) -> bytes:
        """It as a line of JSON, which a `files` source reads."""
        value = {**as_values(self.document), "filter": self.filter, "reason": self.reason}
        return (json.dumps(value, ensure_ascii=False) + "\n").encode()


class Chain:
    """Filters in order.

    Args:
        items: filters as a configuration has them, or as their settings were dumped.
        folder, made: of the stage, and files in it that earlier passes made, by name of the filter.

    Attributes:
        counts: for each filter by name: `documents` and `bytes` (of UTF-8) that it dropped, `reasons` (how many
            documents for each), and of how many documents it `changed` the text.

    Raises:
        UserError: a filter cannot be opened.
    """

    def __init__(self, items: Iterable[Any], folder: Path = Path(), made: Mapping[str, Sequence[str]] | None = None
                 ) -> None:
        self.filters: list[Filter] = FILTERS.made([FILTERS.read(item) for item in items])
        self.counts = no_counts(self.filters)
        for own in self.filters:
            own.open()
            own.take([folder / path for path in (made or {}).get(name_of(own), ())])

    def __call__(self, document: Document, member: bytes) -> tuple[Document, bytes] | Dropped:
        """What becomes of a document that has text, whose JSON is `member`.

        Raises:
            UnusableInputError: a filter failed, or made what is no document.
        """
        for own in self.filters:
            if own.sources is not None and document.source not in own.sources:
                continue
            name = name_of(own)
            try:
                result = own(document)
                if result is document:
                    continue
                if not isinstance(result, str):
                    _check(document, result)
                    result = replace(result, place=document.place)  # which a filter of one's own may forget
                    member = to_json(result)
            except Exception as error:
                why = error if isinstance(error, UserError) else f"{type(error).__name__}: {error} ({raised_at(error)})"
                raise UnusableInputError(
                    f"The filter {name} of shard.filters fails on the document {document.id} of the source "
                    f"{document.source}: {why}. Correct it, or take it out, and run the stage again: what was read so "
                    f"far is then read again.") from error
            if isinstance(result, str) or not result.text.strip():
                return self._drop(Dropped(document, name, result if isinstance(result, str) else NO_TEXT))
            self.counts[name]["changed"] += result.text != document.text
            document = result
        for own in self.filters:
            own.kept()
        return document, member

    def findings(self) -> dict[str, Record]:
        """The findings of filters that have some, by name."""
        return {name_of(own): result for own in self.filters if (result := own.findings())}

    def _drop(self, dropped: Dropped) -> Dropped:
        counts = self.counts[dropped.filter]
        counts["documents"] += 1
        counts["bytes"] += len(dropped.document.text.encode())
        counts["reasons"][dropped.reason] = counts["reasons"].get(dropped.reason, 0) + 1
        return dropped


def no_counts(filters: Sequence[Any]) -> dict[str, Record]:
    """The counts of filters before any document."""
    return {name_of(own): {"documents": 0, "bytes": 0, "changed": 0, "reasons": {}} for own in filters}


def few_reasons(counts: dict[str, Record]) -> dict[str, Record]:
    """Counts of filters with the most frequent reasons of each."""
    return {name: {**own, "reasons": most_frequent(own["reasons"], MOST_REASONS, OTHER_REASONS)}
            for name, own in counts.items()}


def _check(before: Document, after: Any) -> None:
    if not isinstance(after, Document):
        raise TypeError(f"it returned a {type(after).__name__}, not a document or the reason why it is dropped")
    if (after.source, after.id) != (before.source, before.id) or not isinstance(after.text, str):
        raise ValueError("it changed the document's source or id, or its text to what is no text")
