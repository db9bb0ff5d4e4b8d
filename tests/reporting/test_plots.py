import json
import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drover.pipeline.reporting.document import Lines, Series
from drover.pipeline.reporting.plots import LEFT, RIGHT, TOP, Axis, draw
from tests.refusal import table

STEPS = [1, 2, 3]
CHARTS = {
    "line": Lines("One", "step", "nats per token", [Series("x", STEPS, [3.0, 2.0, 1.0])]),
    "lines": Lines("Two", "step", "norm", [Series("a", STEPS, [5.0, 0.0, 1.0], faint=True),
                                           Series("b & <c>", STEPS, [4.0, math.inf, 1.0])], scale="log"),
    "one point": Lines("Three", "step", "share", [Series("x", [7], [0.0])], scale="from zero", percent=True),
    "errors": Lines("Four", "tokens", "acc", [Series("x", STEPS, [1.0, 2.0, 1.5], errors=[0.5, 0.25, 0.0])]),
    "histogram": Lines("Five", "bytes", "share", [Series("web", [64.0, 128.0], [0.75, 0.25])], histogram=True)}


def parsed(name):
    return ElementTree.fromstring(draw(CHARTS[name]))


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_is_a_labelled_svg_in_the_pages_colours(name):
    svg, chart = draw(CHARTS[name]), CHARTS[name]
    root = parsed(name)
    assert root.tag == "svg" and root.get("role") == "img" and root.get("aria-label").startswith(chart.title)
    assert not re.search(r"http|<style|<script|\bid=|nan|inf\b", svg)
    assert not re.findall(r"#[0-9a-f]{6}\b", re.sub(r"var\([^)]*\)", "", svg)), "a colour of its own"
    texts = [text.text for text in root.iter("text")]
    assert {chart.x_label, chart.y_label} <= set(texts)
    assert [line.name for line in chart.series if line.name in texts] == \
        [line.name for line in chart.series if len(chart.series) > 1]
    assert len(root.findall("polyline")) == len(chart.series)


def test_points_that_cannot_be_drawn_are_left_out_and_the_others_marked():
    points = [line.get("points").split() for line in parsed("lines").findall("polyline")]
    assert [len(line) for line in points] == [2, 2] and points[0][0].startswith(f"{LEFT},")
    assert len(parsed("lines").findall("circle")) == 2


def test_errors_are_within_the_plot_and_classes_end_where_they_are_told():
    bars = [path.get("d") for path in parsed("errors").iter("path") if "V" in path.get("d")]
    assert len(bars) == 3 and all(float(y) >= TOP for bar in bars for y in re.findall(r"V([\d.]+)", bar))
    [steps] = parsed("histogram").findall("polyline")
    assert len({point.split(",")[0] for point in steps.get("points").split()}) == 3
    assert CHARTS["histogram"].told == "web 75.0% up to 64 B, 25.0% up to 128 B" and not CHARTS["line"].told


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(3, 7))
def test_linear_ticks_are_few_even_and_within(low, span, most):
    axis = Axis(low, low + span, LEFT, RIGHT)
    ticks = axis.ticks(most)
    assert 1 <= len(ticks) <= most + 1
    assert all(low - 1e-6 * span <= tick <= low + span * 1.000001 for tick in ticks)
    assert all(LEFT - 0.1 <= axis.at(tick) <= RIGHT + 0.1 for tick in ticks)


@pytest.mark.parametrize(("low", "high", "ticks"), table("""
    0.5 -> 8 -> [0.5, 1, 2, 5]
    0.001 -> 100 -> [0.001, 0.01, 0.1, 1, 10, 100]
    0.4 -> 0.9 -> [0.5]""", float, float, json.loads))
def test_logarithmic_ticks(low, high, ticks):
    found = Axis(math.log10(low), math.log10(high), LEFT, RIGHT).decades()
    assert [10 ** tick for tick in found] == pytest.approx(ticks)
