"""The report: facts to a document, and the document as one HTML page or as Markdown.

Line charts are inline SVG with the page's colours, so that they are readable in light and dark mode and on paper.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from drover.pipeline.reporting.chapters.data import data, tokenizer
from drover.pipeline.reporting.chapters.results import export, samples, scores, tasks, validation
from drover.pipeline.reporting.chapters.summary import notices, provenance, result, tiles
from drover.pipeline.reporting.chapters.training import goodput, training
from drover.pipeline.reporting.document import Lines, ReportDocument, Series, chapters_of, compact, spread
from drover.pipeline.reporting.facts import Facts

CHAPTERS = {"Validation": validation, "Training": training, "Scores while training": scores,
            "Tasks": tasks, "Samples": samples, "Data": data,
            "Tokenizer": tokenizer, "Exported model": export, "Goodput": goodput, "Provenance": provenance}
TEMPLATES = Environment(loader=FileSystemLoader(Path(__file__).resolve().parent / "templates"), autoescape=True,
                        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
LEFT, RIGHT, TOP, BOTTOM = 46.0, 346.0, 18.0, 158.0
"""The edges of the plot. A phone shows the whole chart at about this size."""
MOST_POINTS = 1500
"""Points of a line; longer ones are thinned."""
MOST_DOTS = 40
"""Points of a line that are marked."""
TOO_LARGE = 1e300
"""Values from here on, and NaN, are not drawn."""
COLOURS = 6
DASHES = ("", "6 2", "2 2", "8 2 2 2", "4 1", "1 3", "8 2 2 2 2 2", "3 4", "12 3")
"""What distinguishes lines of the same colour: lengths that are drawn and left out, in turn."""


def compose(facts: Facts) -> ReportDocument:
    """The report's content."""
    name, finished = facts.config.name, facts.manifests["evaluate"].finished
    return ReportDocument(
        facts.config.report.title or name, f"Drover run {name}, evaluated {finished[:19].replace('T', ' ')} UTC",
        result(facts), list(notices(facts)), list(tiles(facts)),
        chapters_of({title: blocks(facts) for title, blocks in CHAPTERS.items()}))


def html(document: ReportDocument) -> str:
    """A self-contained page without scripts and network access. Everything except our own charts is escaped."""
    return _rendered("report.html.j2", document, autoescape=True)


def markdown(document: ReportDocument) -> str:
    """The same as Markdown, without the charts: a table next to each has its values."""
    return _rendered("report.md.j2", document, autoescape=False)


def _rendered(template: str, document: ReportDocument, autoescape: bool) -> str:
    environment = TEMPLATES.overlay(autoescape=autoescape)
    environment.filters.update(cell=lambda text: _plain(text).replace("|", "\\|"), draw=draw, fenced=_fenced,
                               kind=lambda block: type(block).__name__, plain=_plain)
    return environment.get_template(template).render(report=document)


def _plain(text: str) -> str:
    """Text without HTML and line breaks in Markdown."""
    return " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")


def _fenced(text: str) -> str:
    """`text` as a Markdown code block that its content cannot end."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}text\n{text}\n{fence}"


@dataclass(frozen=True)
class Axis:
    """Maps numbers from `low` to `high` to positions from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """The position of a number."""
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        """About five round numbers at equal distances."""
        span = self.high - self.low
        step = 10.0 ** math.floor(math.log10(span / 5))
        step *= next(factor for factor in (1, 2, 5, 10) if factor * step * 5 >= span * 0.999)
        return [step * number for number in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


def draw(chart: Lines) -> str:
    """The chart as an <svg> element for a page."""
    series = [replace(line, x=[*map(math.log10, line.x)]) for line in chart.series] if chart.log_x else chart.series
    curves = [spread([(x, y) for x, y in zip(line.x, line.y, strict=True) if abs(y) < TOO_LARGE], MOST_POINTS)
              for line in series]
    bands = [_band(line) for line in series]
    across = _axis([x for curve in curves for x, _ in curve], LEFT, RIGHT, 0.0)
    up = _axis([*(y for curve in [*curves, *bands] for _, y in curve), *([0.0] if chart.from_zero else [])],
               BOTTOM, TOP, 0.04)
    lines = [{"name": line.name, "points": [(across.at(x), up.at(y)) for x, y in curve],
              "band": [(across.at(x), up.at(y)) for x, y in band],
              "colour": 0 if line.faint else 1 + (number - chart.series[0].faint + chart.colour) % COLOURS,
              "dashes": DASHES[number // COLOURS % len(DASHES)], "dots": not line.faint and len(curve) <= MOST_DOTS}
             for number, (line, curve, band) in enumerate(zip(chart.series, curves, bands, strict=True))]
    x_ticks = ([(across.at(math.log10(tick)), compact(tick)) for tick in _log_ticks(across)] if chart.log_x else
               [(across.at(tick), compact(tick)) for tick in across.ticks() if tick % 1 == 0])  # steps, tokens
    y_ticks = [(up.at(tick), compact(tick)) for tick in up.ticks()]
    return TEMPLATES.get_template("lines.svg.j2").render(
        chart=chart, lines=lines, left=LEFT, right=RIGHT, bottom=BOTTOM, x_ticks=x_ticks, y_ticks=y_ticks)


def _log_ticks(axis: Axis) -> list[float]:
    """Numbers such as 1, 2, 5 and 10 on an axis of logarithms; of many, the powers of ten."""
    powers = range(math.floor(axis.low), math.ceil(axis.high) + 1)
    factors = (1, 2, 5) if axis.high - axis.low < 2.5 else (1,)
    return [tick for power in powers for factor in factors
            if axis.low <= math.log10(tick := factor * 10.0**power) <= axis.high]


def _band(line: Series) -> list[tuple[float, float]]:
    """The corners of the band around a line: its upper edge, then its lower one backwards."""
    points = [*zip(line.x, line.y, line.errors, strict=False)]
    return [*((x, y + error) for x, y, error in points), *((x, y - error) for x, y, error in reversed(points))]


def _axis(values: Sequence[float], start: float, end: float, margin: float) -> Axis:
    """An axis for these values, with some room above them."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    return Axis(low, high + margin * (high - low) if high > low else low + max(1.0, abs(low)), start, end)
