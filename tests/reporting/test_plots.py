import re
from xml.etree import ElementTree

import pytest

from drover.pipeline.reporting.plots import Series, bar_chart, compact, line_chart, smoothed

CHARTS = {"line": line_chart("one", [Series("x", [1, 2, 3], [3.0, 2.0, 1.0])], "step", "nats per token"),
          "lines": line_chart("two", [Series("a", [1, 2], [5.0, 1.0], faint=True),
                                      Series("b & <c>", [1, 2], [4.0, 1.0])], "step", "norm", log=True),
          "one point": line_chart("three", [Series("x", [7], [0.0])], "step", "share", from_zero=True, percent=True),
          "bars": bar_chart("four", [("ours", 2.0625, True), ("gzip -9", 2.5, False)], "bits per byte")}


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_is_a_labelled_svg_in_the_pages_colours(name):
    svg = CHARTS[name]
    root = ElementTree.fromstring(svg)
    assert root.tag == "svg" and root.get("role") == "img" and root.get("aria-label")
    assert "http" not in svg and "<style" not in svg and "<script" not in svg
    assert set(re.findall(r"#[0-9a-f]{6}\b", re.sub(r"var\([^)]*\)", "", svg))) == set(), "a colour of its own"
    assert "font-family: inherit" in svg


def test_axes_are_labelled_and_values_written():
    for word in ("step", "nats per token"):
        assert f">{word}</text>" in CHARTS["line"]
    for word in ("bits per byte", "ours", "gzip -9", "2.062", "2.500"):
        assert f">{word}</text>" in CHARTS["bars"]
    assert "b &amp; &lt;c&gt;" in CHARTS["lines"]


def test_charts_on_one_page_share_no_ids():
    ids = [set(re.findall(r'\bid="([^"]+)"', svg)) for svg in CHARTS.values()]
    assert sum(map(len, ids)) == len(set().union(*ids))
    for svg, own in zip(CHARTS.values(), ids, strict=True):
        assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg)) <= own


@pytest.mark.parametrize(("value", "text"), [
    (0, "0"), (0.0031, "0.0031"), (950, "950"), (1250, "1,250"), (12500, "12.5k"), (3_210_000, "3.21M"),
    (8.03e9, "8.03B"), (1.5e13, "15T")])
def test_compact(value, text):
    assert compact(value) == text


def test_smoothed_is_the_mean_of_the_last_values():
    assert smoothed([4.0, 2.0, 6.0, 8.0], 2) == [4.0, 3.0, 4.0, 7.0]
    assert smoothed([4.0, 2.0], 1) == [4.0, 2.0]
