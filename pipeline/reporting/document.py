"""The content of a report without its format: chapters of blocks, which are rendered as a page or as Markdown.

Blocks without content are false, and are omitted. A paragraph is a plain string.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any

from drover.pipeline.core.console import duration, readable
from drover.pipeline.core.files import Record


def compact(value: float) -> str:
    """A number for an axis or a tile: 1,250; 12.5k; 3.21M; 0.0031."""
    size = abs(value)
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g}{unit}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


ALL = "all"
"""A row with this in its first or second cell is a sum and is highlighted."""
NONE = "–"
FORMS: dict[str, Callable[[Any], str]] = {"B": readable, "s": duration, "k": compact}
"""Formats that Python's format strings lack: bytes, seconds, and short forms of large numbers."""
DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Table:
    """A table of records.

    Attributes:
        columns: by heading, the template of its cells for `filled`. Numbers, which have a format, are right-aligned.
        records: one for each row; the key `strong` highlights the row.
    """

    title: str
    columns: Mapping[str, str]
    records: Sequence[Record]
    note: str = ""

    def __bool__(self) -> bool:
        return bool(self.records)

    @property
    def rows(self) -> list[tuple[bool, list[str]]]:
        """Whether a row is highlighted, and its cells."""
        rows = [[filled(column, record) for column in self.columns.values()] for record in self.records]
        return [(ALL in row[:2] or "strong" in record, row) for row, record in zip(rows, self.records, strict=True)]


@dataclass(frozen=True)
class Series:
    """A line: its name and points. faint: drawn in the background. errors: the half length of each error bar."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    faint: bool = False
    errors: Sequence[float] | None = None


@dataclass(frozen=True)
class Lines:
    """A chart of lines. scale: `linear`, `from zero` or `log`; histogram: the points are shares of classes, each twice
    as wide as the one before, and x is where a class ends, in bytes."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    note: str = ""
    scale: str = "linear"
    percent: bool = False
    histogram: bool = False

    def __bool__(self) -> bool:
        return any(line.x for line in self.series)

    @property
    def told(self) -> str:
        """A histogram as text; empty for other charts, since tables have their values."""
        return "; ".join(f"{line.name} " + ", ".join(
            f"{share:.1%} up to {readable(end)}" for end, share in zip(line.x, line.y, strict=True) if share)
            for line in self.series if self.histogram)


@dataclass(frozen=True)
class Bars:
    """A chart of horizontal bars: a value for each label, and the values' format, as in a table's column. ours: the
    label of the highlighted bar."""

    title: str
    unit: str
    bars: Mapping[str, float]
    ours: str = ""
    form: str = ".3f"
    note: str = ""

    def __bool__(self) -> bool:
        return bool(self.bars)

    @property
    def told(self) -> str:
        """The chart as text."""
        return ", ".join(f"{label} {text}" for label, text, _ in self.rows)

    @property
    def rows(self) -> list[tuple[str, str, float]]:
        """For each bar its label, its value, and its length in percent, at most 78, which leaves room for the value."""
        most = max(self.bars.values()) or 1
        return [(label, written(value, self.form), round(78 * value / most, 1)) for label, value in self.bars.items()]


@dataclass(frozen=True)
class Passage:
    """A model's continuation of a prompt. Both are untrusted text."""

    title: str
    prompt: str
    text: str


@dataclass(frozen=True)
class Fold:
    """A long text that is shown on demand, and in print."""

    title: str
    text: str

    def __bool__(self) -> bool:
        return bool(self.text)


Block = str | Table | Lines | Bars | Passage | Fold


@dataclass(frozen=True)
class Notice:
    """A message about the figures. kind: `warning` or `note`."""

    kind: str
    text: str
    entries: Sequence[str] = ()


@dataclass(frozen=True)
class Tile:
    """A headline figure."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Chapter:
    """A chapter and its blocks in order."""

    title: str
    blocks: Sequence[Block]

    @property
    def name(self) -> str:
        """The title in the form of a link's target."""
        return self.title.lower().replace(" ", "-")


@dataclass(frozen=True)
class Document:
    """The whole report."""

    title: str
    subtitle: str
    verdict: str
    notices: Sequence[Notice]
    tiles: Sequence[Tile]
    chapters: Sequence[Chapter]


def pairs(title: str, values: Mapping[str, str], record: Record, note: str = "") -> Table:
    """A table of labels and values, which are templates for `filled`. Absent values are omitted."""
    rows = [{"label": label, "value": filled(value, record)} for label, value in values.items()]
    return Table(title, {"": "{label}", " ": "{value}"}, [row for row in rows if row["value"] not in ("", NONE)], note)


class _Filled(Formatter):
    """Python's format strings over a record, with our formats, shares, and a dash for absent values."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        part, *whole = (_found(name, kwargs) for name in field_name.split(" / "))
        for divisor in whole:
            part = part / divisor if divisor and part is not None else None
        return part, field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        return written(value, format_spec)


def _found(name: str, value: Any) -> Any:
    """The value of `key[inner][0]` in mappings and sequences. Sources' names may be numbers, too."""
    for key in name.rstrip("]").replace("][", "[").split("["):
        if value is not None:
            value = value.get(key) if isinstance(value, Mapping) else value[int(key)]
    return value


def filled(template: str, record: Record) -> str:
    """A format string with the values of a record.

    After the colon of `{steps:,}`, `{text_bytes[train]:B}` or `{changed / documents:.1%}` is the format: one of FORMS,
    one of Python's, or `n` for any number. Without a colon the value is written as text.
    """
    return _Filled().vformat(template, (), record)


def value(name: str, record: Record) -> Any:
    """The value of a field of a format string, such as `text_bytes[train]` or `changed / documents`, or None."""
    return _Filled().get_field(name, (), record)[0]


def written(value: Any, form: str = "") -> str:
    """A value for readers: 12,345; 0.0321; text unchanged; a dash for None."""
    if value is None:
        return NONE
    if form not in ("", "n") and not isinstance(value, str):
        return FORMS[form](value) if form in FORMS else format(value, form)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10000 else f"{value:.2e}" if 0 < abs(value) < 1e-4 else f"{value:,.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{words(key)} {written(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(written, value))
    text = str(value)
    return f"{text[:16]}…" if DIGEST.fullmatch(text) else text


def words(key: str) -> str:
    """A field's name as words."""
    return key.replace("_", " ")


def spread(values: Sequence[Any], most: int) -> list[Any]:
    """At most `most` of the values, evenly spaced, including the first and the last."""
    count = min(most, len(values))
    return [values[round(place * (len(values) - 1) / max(1, count - 1))] for place in range(count)]


def flat(nested: Record, *names: str) -> list[Record]:
    """A record for each innermost mapping, or other value (as `value`), of nested mappings. The keys on the path to it
    are stored under `names`."""
    if not names:
        return [dict(nested) if isinstance(nested, Mapping) else {"value": nested}]
    return [{names[0]: key, **record} for key, inner in nested.items() for record in flat(inner, *names[1:])]
