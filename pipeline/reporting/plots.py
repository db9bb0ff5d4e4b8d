"""Charts as inline SVG that takes its colours from the page, so that it is readable in light, dark and on paper."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

WIDTH, HEIGHT = 5.0, 2.9
"""Inches; at 72 units each the text keeps a readable size when a phone shows the chart 340 pixels wide."""

# Drawn with stand-in colours, which `_inline` replaces by the page's own.
INK, FAINT, GRID = "#010101", "#020202", "#030303"
SERIES = ("#040404", "#050505", "#060606", "#070707", "#080808", "#090909")
MUTED = "#0a0a0a"
_VARIABLES = {INK: "var(--ink, #1c2024)", FAINT: "var(--faint, #60646c)", GRID: "var(--rule, #d9d9e0)",
              MUTED: "var(--muted-bar, #b9bbc6)",
              **{colour: f"var(--series-{number}, {fallback})" for number, (colour, fallback) in enumerate(zip(
                  SERIES, ("#2563a8", "#c2410c", "#15803d", "#7c3aed", "#a16207", "#be185d"), strict=True), start=1)}}
_STYLE: Any = {
    "svg.fonttype": "none", "font.size": 9, "axes.edgecolor": GRID, "axes.labelcolor": FAINT, "text.color": INK,
    "xtick.color": GRID, "ytick.color": GRID, "xtick.labelcolor": FAINT, "ytick.labelcolor": FAINT,
    "axes.spines.top": False, "axes.spines.right": False, "grid.color": GRID, "grid.linewidth": 0.6,
    "axes.axisbelow": True, "path.simplify": True}


@dataclass(frozen=True)
class Series:
    """A line: its name, points, and whether it is the smoothed or main one of the chart; errors: of each y, a bar of
    that length up and down."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    faint: bool = False
    dots: bool = False
    errors: Sequence[float] | None = None


def line_chart(name: str, series: Sequence[Series], x_label: str, y_label: str, *, from_zero: bool = False,
               log: bool = False, percent: bool = False) -> str:
    """One chart of one or several lines; a legend only where there are several names to tell apart."""
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": name}):
        figure, axes = _axes(WIDTH, HEIGHT)
        axes.grid(True, axis="y")
        colours = iter(SERIES * (1 + len(series) // len(SERIES)))
        for line in series:
            colour = MUTED if line.faint else next(colours)
            axes.plot(line.x, line.y, color=colour, linewidth=0.8 if line.faint else 1.6, label=line.name,
                      marker="o" if line.dots else None, markersize=3, zorder=1 if line.faint else 2)
            if line.errors is not None:
                axes.errorbar(line.x, line.y, yerr=line.errors, fmt="none", ecolor=colour, elinewidth=1, capsize=2)
        if log:
            axes.set_yscale("log")
        if from_zero:
            axes.set_ylim(0, 1.12 * max(max(line.y) for line in series) or 1)
        axes.margins(x=0.01)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if log else MaxNLocator(5))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(
            (lambda value, _: f"{value:.3g} %") if percent else (lambda value, _: compact(value))))
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        if len(series) > 1:
            axes.legend(frameon=False, fontsize=8, labelcolor=FAINT, loc="best")
        return _inline(figure, name, f"{y_label} over {x_label}")


def bar_chart(name: str, bars: Sequence[tuple[str, float, bool]], x_label: str, *, digits: int = 3,
              labels: Sequence[str] | None = None) -> str:
    """Horizontal bars (label, value, whether it is ours), each with its value written beside it."""
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": name}):
        figure, axes = _axes(WIDTH, 0.75 + 0.36 * len(bars))
        places = range(len(bars))
        drawn = axes.barh(places, [value for _, value, _ in bars], height=0.62,
                          color=[SERIES[0] if ours else MUTED for _, _, ours in bars])
        written = labels or [f"{value:.{digits}f}" for _, value, _ in bars]
        axes.bar_label(drawn, written, padding=4, fontsize=9, color=INK)
        axes.set_yticks(places, [label for label, _, _ in bars])
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        axes.invert_yaxis()
        axes.spines["left"].set_visible(False)
        axes.set_xlim(0, max(value for _, value, _ in bars) * 1.22 or 1)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set_xlabel(x_label)
        described = ", ".join(f"{label} {text}" for (label, _, _), text in zip(bars, written, strict=True))
        return _inline(figure, name, f"{x_label}: {described}")


def standalone(svg: str) -> str:
    """A chart as a file of its own: with the outside name that viewers ask for, on white, in fixed colours."""
    fixed = re.sub(r"var\(--[\w-]+, (#[0-9a-f]{6})\)", r"\1", svg).replace("font-family: inherit",
                                                                       "font-family: sans-serif")
    return fixed.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(
        "stroke-linejoin: round", "stroke-linejoin: round; background: #ffffff", 1) + "\n"


def compact(value: float) -> str:
    """A number for an axis or a tile: 1,250; 12.5k; 3.21M; 0.0031."""
    size = abs(value)
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g}{unit}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and those before it, up to `window` of them."""
    result, total = [], 0.0
    for index, value in enumerate(values):
        total += value - (values[index - window] if index >= window else 0.0)
        result.append(total / min(index + 1, window))
    return result


def _axes(width: float, height: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0)
    return figure, axes


def _inline(figure: Figure, name: str, description: str) -> str:
    """The figure as an <svg> element for a page: no prolog, no outside names, ids of its own, the page's colours."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg"):]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text)
    text = re.sub(r'font-family: [^;"]*', "font-family: inherit", text)
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>\s*", "", text, flags=re.DOTALL)  # it would style the page
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", text).replace("xlink:href", "href")
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    escaped = description.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    box = re.search(r'viewBox="[^"]*"', text)
    assert box is not None
    head = f'<svg role="img" aria-label="{escaped}" {box.group()} style="stroke-linejoin: round">'
    return head + text[text.index(">") + 1:].strip()
