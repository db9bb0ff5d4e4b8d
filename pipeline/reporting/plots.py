"""Charts of lines as inline SVG that takes its colours from the page, so that it is readable in light, dark and on
paper."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from drover.pipeline.console import readable
from drover.pipeline.reporting.document import Lines, compact, spread

TEMPLATES = Environment(loader=FileSystemLoader(Path(__file__).resolve().parent / "templates"), autoescape=True,
                        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
LEFT, RIGHT, TOP, BOTTOM = 46.0, 346.0, 18.0, 158.0
"""The edges of the plot; a phone shows the whole chart at about this size."""
MOST_POINTS = 1500
"""Points of a line; longer ones are thinned."""
COLOURS = 6
Point = tuple[float, float]


@dataclass(frozen=True)
class Axis:
    """Where values are drawn. low, high: of the values at the edges `start` and `end`, or, where there is a base, of
    their logarithms."""

    low: float
    high: float
    start: float
    end: float
    base: int | None

    def at(self, value: float) -> float:
        """The position of a value."""
        scaled = math.log(value, self.base) if self.base else value
        return round(self.start + (scaled - self.low) / (self.high - self.low) * (self.end - self.start), 1)

    def ticks(self, most: int = 5) -> list[float]:
        """At most about so many round values."""
        span = self.high - self.low
        step = 10.0 ** math.floor(math.log10(span / most))
        step *= next(factor for factor in (1, 2, 5, 10) if factor * step * most >= span * 0.999)
        if self.base is None:
            return [step * number for number in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        powers = range(math.floor(self.low), math.ceil(self.high) + 1, math.ceil(step))
        marks = [self.base ** power * factor for power in powers for factor in ((1, 2, 5) if span < 3 else (1,))]
        return [mark for mark in marks if self.low - 1e-9 <= math.log(mark, self.base) <= self.high + 1e-9]


def draw(chart: Lines) -> str:
    """The chart as an <svg> element for a page."""
    log, histogram = chart.scale == "log", chart.histogram
    curves = [spread([(x, y) for x, y in zip(line.x, line.y, strict=True) if math.isfinite(y) and (y > 0 or not log)],
                     MOST_POINTS) for line in chart.series]
    if histogram:
        curves = [[(curve[0][0] / 2, 0.0), *(point for x, y in curve for point in ((x / 2, y), (x, y))),
                   (curve[-1][0], 0.0)] for curve in curves]
    bars = [[(x, y - error, y + error) for (x, y), error in zip(curve, line.errors or (), strict=False)]
            for curve, line in zip(curves, chart.series, strict=True)]
    heights = [y for curve in curves for _, y in curve] + [y for bar in bars for _, *ends in bar for y in ends]
    across = _axis((x for curve in curves for x, _ in curve), LEFT, RIGHT, 2 if histogram else None)
    up = _axis([*heights, *([0.0] if chart.scale == "from zero" else [])], BOTTOM, TOP, 10 if log else None, 0.04)
    colours = iter(range(1, len(curves) + 1))
    lines = [{"name": line.name, "dots": line.dots, "points": [(across.at(x), up.at(y)) for x, y in curve],
              "colour": 0 if line.faint else 1 + (next(colours) - 1) % COLOURS,
              "errors": [(across.at(x), up.at(low), up.at(high)) for x, low, high in bar]}
             for line, curve, bar in zip(chart.series, curves, bars, strict=True)]
    named = readable if histogram else compact
    return TEMPLATES.get_template("lines.svg.j2").render(
        chart=chart, lines=lines, left=LEFT, right=RIGHT, bottom=BOTTOM,
        x_ticks=[(across.at(tick), named(tick)) for tick in across.ticks() if tick % 1 == 0],  # steps, tokens, bytes
        y_ticks=[(up.at(tick), f"{100 * tick:.3g}%" if chart.percent else compact(tick)) for tick in up.ticks()])


def standalone(chart: Lines) -> str:
    """A chart as a file of its own: with the outside name that viewers ask for, on white, in fixed colours."""
    fixed = re.sub(r"var\(--[\w-]+, (#[0-9a-f]{6})\)", r"\1", draw(chart)).replace("inherit", "sans-serif")
    return fixed.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" style="background: #ffffff" ', 1) + "\n"


def _axis(values: Iterable[float], start: float, end: float, base: int | None, margin: float = 0.0) -> Axis:
    """An axis for these values, with some room above them."""
    scaled = [math.log(value, base) if base else value for value in values]
    low, high = min(scaled, default=0.0), max(scaled, default=1.0)
    return Axis(low, high + margin * (high - low) if high > low else low + 1, start, end, base)
