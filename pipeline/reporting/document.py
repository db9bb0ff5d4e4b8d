"""The content of a report without its format: chapters of blocks, which are rendered as a page or as Markdown.

Blocks without content are false, and are omitted. A paragraph is a plain string.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from string import Formatter
from typing import TYPE_CHECKING, Any

from drover.pipeline.core.console import counted, duration, readable, table
from drover.pipeline.core.files import Record

if TYPE_CHECKING:
    from rich.console import RenderableType


def compact(value: float) -> str:
    """A number for an axis or a tile: 1,250; 12.5k; 3.21M; 0.0031; 4.2e+18."""
    size = abs(value)
    if size >= 1e15:
        return f"{value:.3g}"
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g}{unit}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


ALL = "all"
"""A row with this in its first cell is a sum and is highlighted."""
NONE = "–"
FORMS: dict[str, Callable[[Any], str]] = {
    "B": readable, "s": duration, "k": compact, **{f"{word}s": partial(counted, word=word) for word in (
        "document", "step")}}
"""Formats that Python's format strings lack: bytes, seconds, short forms of large numbers, and numbers with a noun."""


@dataclass(frozen=True)
class Table:
    """A table of records.

    Attributes:
        cells: by heading, the template of a column's cells for `filled`. Numbers, which have a format, are
            right-aligned. Columns without any value are omitted.
        records: one for each row.
    """

    title: str
    cells: Mapping[str, str]
    records: Sequence[Record]
    note: str = ""

    def __bool__(self) -> bool:
        return bool(self.records)

    @cached_property
    def columns(self) -> dict[str, list[str]]:
        """The text of each cell, by heading."""
        every = {heading: [filled(cell, record) for record in self.records] for heading, cell in self.cells.items()}
        return {heading: texts for heading, texts in every.items() if set(texts) != {NONE}}

    @property
    def numbers(self) -> list[bool]:
        """Which columns are right-aligned."""
        return [":" in self.cells[heading] for heading in self.columns]

    @property
    def rows(self) -> list[tuple[bool, tuple[str, ...]]]:
        """Whether a row is highlighted, and its cells."""
        return [(row[0] == ALL, row) for row in zip(*self.columns.values(), strict=True)]


@dataclass(frozen=True)
class Series:
    """A line: its name, "" for none in the legend, and points. faint: drawn in the background. errors: half of the
    height of a band around it at each point."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    faint: bool = False
    errors: Sequence[float] = ()


@dataclass(frozen=True)
class Lines:
    """A chart of lines, those without a name last. unit: of its values. from_zero: they begin at 0. over: what x
    counts; log_x: on a logarithmic axis; colour: how many colours are left out. A table has the values as
    text."""

    title: str
    unit: str
    series: Sequence[Series]
    note: str = ""
    from_zero: bool = False
    over: str = "step"
    log_x: bool = False
    colour: int = 0

    def __bool__(self) -> bool:
        return any(line.x for line in self.series)


@dataclass(frozen=True)
class Bars:
    """A chart of horizontal bars: a value for each label. ours: the label of the highlighted bar. A table next to it
    has its values as text."""

    title: str
    bars: Mapping[str, float]
    ours: str

    def __bool__(self) -> bool:
        return bool(self.bars)


@dataclass(frozen=True)
class Text:
    """Untrusted or long text: what a model wrote after a prompt, or, folded, what is shown on demand and in print."""

    title: str
    text: str
    prompt: str = ""
    folded: bool = False

    def __bool__(self) -> bool:
        return bool(self.text or self.prompt)


Block = str | Table | Lines | Bars | Text


@dataclass(frozen=True)
class Notice:
    """A message about the figures. kind: `warning` or `note`."""

    kind: str
    text: str


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


def chapters_of(blocks: Mapping[str, Iterable[Block | None]]) -> list[Chapter]:
    """Chapters by their title, without blocks and chapters that are empty."""
    filled = {title: [block for block in own if block] for title, own in blocks.items()}
    return [Chapter(title, own) for title, own in filled.items() if own]


@dataclass(frozen=True)
class ReportDocument:
    """The whole report."""

    title: str
    subtitle: str
    result: str
    notices: Sequence[Notice]
    tiles: Sequence[Tile]
    chapters: Sequence[Chapter]


def console_lines(document: ReportDocument, most: int | None = None) -> Iterator[RenderableType]:
    """A document without charts, for a terminal: its figures, tables and paragraphs, what weakens them, the result.
    most: chapters of it."""
    yield document.subtitle
    yield from (f"{tile.label}: {tile.value} {tile.note}" for tile in document.tiles)
    yield from block_lines(block for chapter in document.chapters[:most] for block in chapter.blocks)
    yield from ("", *(f"{notice.kind}: {notice.text}" for notice in document.notices), document.result)


def block_lines(blocks: Iterable[Block]) -> Iterator[RenderableType]:
    """The tables and paragraphs among some blocks, for a terminal."""
    for block in blocks:
        if isinstance(block, Table) and block:
            yield from ("", block.title, table([[*block.columns], *(cells for _, cells in block.rows)], [
                heading for heading, is_number in zip(block.columns, block.numbers, strict=True) if is_number]))
        elif isinstance(block, str):
            yield block


class _Filled(Formatter):
    """Python's format strings over a record, with our formats, shares, and a dash for absent values."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        part, *divisors = (value(name, kwargs) for name in field_name.split(" / "))
        for divisor in divisors:
            part = part / divisor if divisor and part is not None else None
        return part, field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        return written(value, format_spec)


def value(name: str, record: Any) -> Any:
    """The value of `key[inner][0]` in mappings and sequences, or None. Sources' names may be numbers, too."""
    for key in name.rstrip("]").replace("][", "[").split("["):
        if record is not None:
            record = record.get(key) if isinstance(record, Mapping) else record[int(key)]
    return record


def filled(template: str, record: Record) -> str:
    """A format string with the values of a record.

    After the colon of `{steps:,}`, `{text_bytes[train]:B}` or `{changed / documents:.1%}` is the format: one of FORMS,
    one of Python's, or `n` for any number. Without a colon the value is written as text.
    """
    return _Filled().vformat(template, (), record)


def written(value: Any, form: str = "") -> str:
    """A value for readers: 12,345; 0.0321; text unchanged; a dash for None and what is empty."""
    if value is None:
        return NONE
    if isinstance(value, int | float) and form not in ("", "n"):
        return FORMS[form](value) if form in FORMS else format(value, form)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10000 else f"{value:.2e}" if 0 < abs(value) < 1e-4 else f"{value:,.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{words(key)} {written(item)}" for key, item in value.items()) or NONE
    if isinstance(value, list | tuple):
        return ", ".join(map(written, value)) or NONE
    return str(value)


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
