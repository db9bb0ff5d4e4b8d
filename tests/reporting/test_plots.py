import math
import re
from xml.etree import ElementTree

import pytest

from drover.pipeline.reporting.document import Lines, Series
from drover.pipeline.reporting.plots import LEFT, RIGHT, TOP, draw

STEPS = [1, 2, 3]
CHARTS = {
    "flat": Lines("One", "nats per token", [Series("x", [7], [1e18])]),
    "lines": Lines("Two", "norm", [Series("a", STEPS, [5.0, 1e-300, 1.0], faint=True),
                                   Series("b & <c>", STEPS, [4.0, math.inf, math.nan])], from_zero=True),
    "huge": Lines("Three", "tokens", [Series("x", [1, 10 ** 15], [1e299, -1e299])]),
    "nothing finite": Lines("Five", "nats", [Series("x", STEPS, [math.nan, math.inf, 1e308])])}


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_is_a_labelled_svg_in_the_pages_colours(name):
    svg, chart = draw(CHARTS[name]), CHARTS[name]
    root = ElementTree.fromstring(svg)
    assert root.get("aria-label") == chart.title
    assert not re.search(r"http|<style|<script|\bid=|nan|inf\b|#[0-9a-f]{6}\b", svg)
    texts = [text.text for text in root.iter("text")]
    names = [line.name for line in chart.series] if len(chart.series) > 1 else []
    assert {chart.unit, "step", *names} <= set(texts) and 2 <= len(texts) - len(names) <= 15
    points = [line.get("points").split() for line in root.findall("polyline")]
    assert [len(line) for line in points] == [sum(abs(y) < 1e300 for y in line.y) for line in chart.series]
    for x, y in (point.split(",") for line in points for point in line):
        assert LEFT <= float(x) <= RIGHT and float(y) >= TOP
