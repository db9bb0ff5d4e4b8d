"""The filters of a configuration, one after another, over the documents of one unit; and what they did."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from drover.pipeline.config.shipped import FILTERS, name_of
from drover.pipeline.core.errors import UnusableInputError, raised_at
from drover.pipeline.data.documents import Document, as_values, to_json
from drover.pipeline.data.filters.base import Filter

NO_TEXT = "no text was left"
MOST_REASONS = 50
"""Reasons of one filter that are counted apart, so that one which puts numbers into them fills no manifest."""
OTHER_REASONS = "other reasons"


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

    Attributes:
        counts: for each filter by name: `documents` and `bytes` (of UTF-8) that it dropped, `reasons` (how many
            documents for each), and how many documents it `changed`.

    Raises:
        UserError: a filter cannot be opened.
    """

    def __init__(self, items: Iterable[Any]) -> None:
        self.filters: list[Filter] = FILTERS.made([FILTERS.read(item) for item in items])
        self.counts = no_counts(self.filters)
        for own in self.filters:
            own.open()

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
                raise UnusableInputError(
                    f"The filter {name} of shard.filters fails on the document {document.id} of the source "
                    f"{document.source}: {type(error).__name__}: {error} ({raised_at(error)}). Correct it, or take it "
                    f"out, and run the stage again: what was read so far is then read again.") from error
            if isinstance(result, str) or not result.text.strip():
                return self._drop(Dropped(document, name, result if isinstance(result, str) else NO_TEXT))
            self.counts[name]["changed"] += result != document
            document = result
        return document, member

    def findings(self) -> dict[str, dict[str, Any]]:
        """The findings of filters that have some, by name."""
        return {name_of(own): result for own in self.filters if (result := own.findings())}

    def _drop(self, dropped: Dropped) -> Dropped:
        counts = self.counts[dropped.filter]
        counts["documents"] += 1
        counts["bytes"] += len(dropped.document.text.encode())
        counts["reasons"][dropped.reason] = counts["reasons"].get(dropped.reason, 0) + 1
        return dropped


def no_counts(filters: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """The counts of filters before any document."""
    return {name_of(own): {"documents": 0, "bytes": 0, "changed": 0, "reasons": {}} for own in filters}


def total(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Counts, in dictionaries of dictionaries, added up; what only some have is there as well."""
    result: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            nested = isinstance(value, dict)
            result[name] = total([result.get(name, {}), value]) if nested else result.get(name, 0) + value
    return result


def most_frequent(counts: Mapping[str, int], most: int, others: str) -> dict[str, int]:
    """The most frequent of some counts; the rest are counted together, as `others`."""
    ordered = sorted(counts.items(), key=lambda entry: (entry[0] == others, -entry[1], entry[0]))
    return total([dict(ordered[:most]), *({others: count} for _, count in ordered[most:])])


def few_reasons(counts: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Counts of filters with the most frequent reasons of each."""
    return {name: {**own, "reasons": most_frequent(own["reasons"], MOST_REASONS, OTHER_REASONS)}
            for name, own in counts.items()}


def _check(before: Document, after: Any) -> None:
    if not isinstance(after, Document):
        raise TypeError(f"it returned a {type(after).__name__}, not a document or the reason why it is dropped")
    if (after.source, after.id) != (before.source, before.id) or not isinstance(after.text, str):
        raise ValueError("it changed the document's source or id, or its text to what is no text")
