"""Line charts as inline SVG with the page's colours, so that they are readable in light and dark mode and on paper."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from drover.pipeline.core.console import readable
from drover.pipeline.reporting.document import Lines, Series, compact, spread

TEMPLATES = Environment(loader=FileSystemLoader(Path(__file__).resolve().parent / "templates"), autoescape=True,
                        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
LEFT, RIGHT, TOP, BOTTOM = 46.0, 346.0, 18.0, 158.0
"""The edges of the plot. A phone shows the whole chart at about this size."""
MOST_POINTS = 1500
"""Points of a line; longer ones are thinned."""
MOST_DOTS = 40
"""Points of a line that are marked."""
COLOURS = 6


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

    def ticks(self, most: int = 5) -> list[float]:
        """About `most` round numbers at equal distances."""
        span = self.high - self.low
        step = 10.0 ** math.floor(math.log10(span / most))
        step *= next(factor for factor in (1, 2, 5, 10) if factor * step * most >= span * 0.999)
        return [step * number for number in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]

    def decades(self) -> list[float]:
        """Logarithms of powers of ten and, if those are few, of 2 and 5 times them."""
        factors = (1, 2, 5) if self.high - self.low < 3 else (1,)
        marks = [power + math.log10(factor) for power in range(math.floor(self.low), math.ceil(self.high) + 1)
                 for factor in factors]
        return [mark for mark in marks if self.low <= mark <= self.high]


def draw(chart: Lines) -> str:
    """The chart as an <svg> element for a page."""
    log = chart.scale == "log"
    curves = [_points(line, log, chart.histogram) for line in chart.series]
    heights = [height for curve in curves for _, y, error in curve for height in (y - error, y + error)]
    across = _axis([x for curve in curves for x, _, _ in curve], LEFT, RIGHT, 0.0)
    up = _axis([*heights, *([0.0] if chart.scale == "from zero" else [])], BOTTOM, TOP, 0.04)
    coloured = accumulate(not line.faint for line in chart.series)
    lines = [{"name": line.name, "points": [(across.at(x), up.at(y)) for x, y, _ in curve],
              "colour": 0 if line.faint else 1 + (number - 1) % COLOURS,
              "dots": not line.faint and not chart.histogram and len(curve) <= MOST_DOTS,
              "errors": [(across.at(x), up.at(y - error), up.at(y + error)) for x, y, error in curve if line.errors]}
             for line, curve, number in zip(chart.series, curves, coloured, strict=True)]
    x_ticks = [(across.at(tick), readable(2 ** tick) if chart.histogram else compact(tick))
               for tick in across.ticks() if tick % 1 == 0]  # steps, tokens, powers of two
    y_ticks = [(up.at(tick), f"{100 * tick:.3g}%" if chart.percent else compact(10 ** tick if log else tick))
               for tick in (up.decades() if log else up.ticks())]
    return TEMPLATES.get_template("lines.svg.j2").render(
        chart=chart, lines=lines, left=LEFT, right=RIGHT, bottom=BOTTOM, x_ticks=x_ticks, y_ticks=y_ticks)


def standalone(chart: Lines) -> str:
    """A chart as a separate file: with the XML namespace that viewers need, on white, in fixed colours."""
    fixed = re.sub(r"var\(--[\w-]+, (#[0-9a-f]{6})\)", r"\1", draw(chart)).replace("inherit", "sans-serif")
    return fixed.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" style="background: #ffffff" ', 1) + "\n"


def _points(line: Series, log: bool, histogram: bool) -> list[tuple[float, float, float]]:
    """The points that can be drawn, with their errors; for a histogram the corners of its classes."""
    errors = line.errors or [0.0] * len(line.x)
    points = [(x, math.log10(y) if log else y, error) for x, y, error in zip(line.x, line.y, errors, strict=True)
              if math.isfinite(y) and (y > 0 or not log)]
    if histogram:
        ends = [math.log2(x) for x, _, _ in points]
        corners = [(end - before, share, 0.0) for end, (_, share, _) in zip(ends, points, strict=True)
                   for before in (1, 0)]
        points = [(ends[0] - 1, 0.0, 0.0), *corners, (ends[-1], 0.0, 0.0)]
    return spread(points, MOST_POINTS)


def _axis(values: Sequence[float], start: float, end: float, margin: float) -> Axis:
    """An axis for these values, with some room above them."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    return Axis(low, high + margin * (high - low) if high > low else low + 1, start, end)
