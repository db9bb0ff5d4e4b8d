"""What a source is made of, counted while it is read: sizes, lengths, what filters changed and dropped, languages.

A unit of reading has a card of its own. Those of a source are added up in the order of its units, which follows from
the input alone, so the card does not depend on who read what when. A card stays small: counts, and a few beginnings of
dropped documents, which only the first units of a source keep.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from drover.pipeline.data.documents import Document
from drover.pipeline.data.filters.chain import Dropped, most_frequent, total

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
        self._counts = dict.fromkeys(("documents", "changed", "bytes", "characters"), 0)
        self._lengths: Counter[int] = Counter()
        self._shown: dict[str, dict[str, list[dict[str, str]]]] = {}

    def add(self, document: Document, *, changed: bool = False) -> None:
        """Count a document that the filters kept. changed: they changed it."""
        text = document.text
        size = len(text) if text.isascii() else len(text.encode())
        self._counts["documents"] += 1
        self._counts["changed"] += changed
        self._counts["bytes"] += size
        self._counts["characters"] += len(text)
        self._lengths[size.bit_length()] += 1

    def drop(self, dropped: Dropped) -> None:
        """Keep the beginning of a document that a filter dropped, where it is one of the first for its reason."""
        text = dropped.document.text
        more = "…" if len(text) > EXAMPLE_CHARACTERS else ""
        example = {"id": dropped.document.id, "text": text[:EXAMPLE_CHARACTERS] + more}
        _show(self._shown, dropped.filter, dropped.reason, [example], self._examples)

    def record(self) -> dict[str, Any]:
        """As JSON: `documents`, `changed`, `bytes` and `characters` of those that the filters kept; `lengths`, by k the
        documents of 2^(k-1) to 2^k - 1 bytes; `examples` of dropped ones by filter and reason."""
        return {**self._counts,
                "lengths": {str(length): count for length, count in sorted(self._lengths.items())},
                "examples": self._shown}


def _show(shown: dict[str, dict[str, list[Any]]], name: str, reason: str, examples: list[Any], most: int) -> None:
    """Add examples of what a filter dropped, up to `most` for a reason."""
    reasons = shown.get(name, {})
    if most and (reason in reasons or len(reasons) < MOST_REASONS):
        own = shown.setdefault(name, {}).setdefault(reason, [])
        own += examples[:most - len(own)]


def source_card(records: Iterable[Mapping[str, Any]], examples: int) -> dict[str, Any]:
    """The card of a source, of its units' records in order: their cards added up, and their `findings` of languages.

    Args:
        records: of finished units.
        examples: dropped documents to show for each filter and reason.

    Returns:
        As `DataCard.record`, with `languages`: documents by language, for each filter that counts languages.
    """
    cards = [DataCard().record()]
    shown = dict[str, dict[str, list[Any]]]()
    result = []
    for record in records:
        cards.append(record["card"])
        result.append({name: own["languages"] for name, own in record["findings"].items() if "languages" in own})
        for name, reasons in record["card"]["examples"].items():
            for reason, own in reasons.items():
                _show(shown, name, reason, own, examples)
    card = total({key: value for key, value in own.items() if key != "examples"} for own in cards)
    card["lengths"] = dict(sorted(card["lengths"].items(), key=lambda entry: int(entry[0])))
    languages = {name: most_frequent(counts, MOST_LANGUAGES, OTHERS) for name, counts in total(result).items()}
    return {**card, "examples": shown, **({"languages": languages} if languages else {})}
