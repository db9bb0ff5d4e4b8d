"""What a report consists of, apart from its looks: the two templates render the same document."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Table:
    """Rows of text. The first `labels` columns are words, the others numbers and set flush right."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    labels: int = 1
    note: str = ""
    strong: frozenset[int] = frozenset()
    """Rows to stress."""


@dataclass(frozen=True)
class Figure:
    """A chart as an <svg> element that we drew ourselves."""

    title: str
    svg: str
    note: str = ""


@dataclass(frozen=True)
class Passage:
    """Text that a model wrote after a prompt. Neither is to be trusted."""

    title: str
    prompt: str
    text: str


@dataclass(frozen=True)
class Fold:
    """Something long that is shown on demand."""

    title: str
    text: str


@dataclass(frozen=True)
class Notice:
    """Something the reader must know before believing the figures. kind: `warning` or `note`."""

    kind: str
    text: str
    items: Sequence[str] = ()


@dataclass(frozen=True)
class Tile:
    """A headline figure."""

    label: str
    value: str
    note: str = ""


@dataclass
class Section:
    """One chapter: words, then charts, tables, passages, and what is folded away."""

    name: str
    title: str
    words: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    passages: list[Passage] = field(default_factory=list)
    folds: list[Fold] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.words or self.figures or self.tables or self.passages or self.folds)


@dataclass(frozen=True)
class Document:
    """The whole report."""

    title: str
    subtitle: str
    verdict: str
    notices: Sequence[Notice]
    tiles: Sequence[Tile]
    sections: Sequence[Section]


DIGEST = re.compile("[0-9a-f]{64}")


def shown(value: Any) -> str:
    """A value for a table: 12,345; 0.0321; text as it is; a dash for nothing."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if abs(value) >= 10000:
            return f"{value:,.0f}"
        return f"{value:,.4g}" if value == 0 or abs(value) >= 1e-4 else f"{value:.2e}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(shown, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {shown(item)}" for key, item in value.items())
    text = str(value)
    return f"{text[:16]}…" if DIGEST.fullmatch(text) else text


def percent(share: float, digits: int = 1) -> str:
    """0.1234 -> 12.3 %."""
    return f"{100 * share:.{digits}f} %"


def size(count: float) -> str:
    """Bytes as a person says them, in powers of ten."""
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= limit:
            return f"{count / limit:.3g} {unit}"
    return f"{count:.0f} B"


def words(key: str) -> str:
    """A key of a manifest as words."""
    return key.replace("_", " ")


def count_tables(title: str, counts: Mapping[str, Any], leave_out: Iterable[str] = ()) -> list[Table]:
    """Everything in a manifest's counts: single values in one table, each mapping in one of its own."""
    left = {key: value for key, value in counts.items() if key not in set(leave_out)}
    single = [(words(key), shown(value)) for key, value in left.items() if not isinstance(value, Mapping)]
    tables = [Table(title, ["", ""], single)] if single else []
    for key, value in left.items():
        if isinstance(value, Mapping) and value:
            tables.append(_mapping_table(f"{title}: {words(key)}", value))
    return tables


def _mapping_table(title: str, value: Mapping[str, Any]) -> Table:
    """One row per key; where the values are mappings too, one column per inner key."""
    if not all(isinstance(item, Mapping) for item in value.values()):
        return Table(title, ["", ""], [(str(key), shown(item)) for key, item in value.items()])
    columns = list(dict.fromkeys(column for item in value.values() for column in item))
    rows = [(str(key), *(shown(item.get(column)) for column in columns)) for key, item in value.items()]
    return Table(title, ["", *map(words, columns)], rows)
