import json
import math
import re
from xml.etree import ElementTree

import pytest

from drover.pipeline.reporting.document import Lines, Series, Table, filled, written
from drover.pipeline.reporting.facts import shareable
from drover.pipeline.reporting.render import LEFT, RIGHT, TOP, draw
from tests.refusal import table

RECORD = {"steps": 1200, "text": {"train": 11_828_804, "gzip -9": 2.05}, "part": 3, "whole": 8, "nothing": 0,
          "kind": "bpe", "seconds": 172.4, "odd": "nan",
          "years": {"2024": 5, "of": [{"n": 7}, None]}, "list": [1, "a"], "deep": {"a_b": {"c": 0.5}}}
FILLED = """
{steps:,} steps -> 1,200 steps
{text[train]:B} -> 11.8 MB
{text[gzip -9]:.3f} -> 2.050
{part / whole:.1%} -> 37.5%
{part / nothing:.1%} -> –
{absent / whole:n} -> –
{absent} -> –
{text[absent]:,} -> –
{absent[more]} -> –
{kind:,} -> bpe
{odd:.4f} -> nan
{text:,} -> train 11,828,804, gzip -9 2.05
{list:,} -> 1, a
{seconds:s} -> 2 m 52 s
{steps:k} -> 1,200
{list} -> 1, a
{deep} -> a b c 0.5
{whole / part:n} -> 2.667
{years[2024]:,} -> 5
{years[of][0][n]:,} -> 7
{years[of][1][n]:,} -> –
"""
NUMBERS = """
12345 -> 12,345 -> 12.3k
9321.2 -> 9,321 -> 9,321
12345.6 -> 12,346 -> 12.3k
0 -> 0 -> 0
0.0 -> 0 -> 0
0.0321 -> 0.0321 -> 0.0321
1.62e-05 -> 1.62e-05 -> 1.62e-05
950 -> 950 -> 950
3210000 -> 3,210,000 -> 3.21M
8.03e9 -> 8,030,000,000 -> 8.03B
1.5e13 -> 15,000,000,000,000 -> 15T
"""


@pytest.mark.parametrize(("template", "text"), table(FILLED))
def test_what_a_format_string_makes_of_a_record(template, text):
    assert filled(template, RECORD) == text


@pytest.mark.parametrize(("number", "text", "compact"), table(NUMBERS, json.loads))
def test_numbers_are_short_and_take_few_letters(number, text, compact):
    assert (written(number), written(number, "k")) == (text, compact)


def test_columns_without_values_are_omitted():
    table = Table("", {"a": "{a}", "b": "{b:,}", "c": "{c:,}"}, [{"a": "all"}, {"c": 10 ** 9}])
    assert table.columns == {"a": ["all", "–"], "c": ["–", "1,000,000,000"]} and table.numbers == [False, True]
    assert table.rows == [(True, ("all", "–")), (False, ("–", "1,000,000,000"))]


@pytest.mark.parametrize(("text", "shared"), [("runs_dir: /home/me/runs\n", "runs_dir: …/runs\n"), *table("""
    paths: [/home/me/data/notes/**/*.txt, data/x/y.txt] -> paths: […/**/*.txt, data/x/y.txt]
    "/srv/my/old notes/**/*.md" -> "…/my/old notes/**/*.md"
    "/Users/me/a/b/c" -> "…/b/c"
    (/data/web) -> (…/data/web)
    in /data/web. -> in …/data/web.
    /mnt/store/x/y -> …/x/y
    s3://bucket/a/b/c -> s3://bucket/a/b/c
    1/2/3 and a/b/c/d -> 1/2/3 and a/b/c/d""")])
def test_paths_are_cut_to_their_ends(text, shared):
    assert shareable(text) == shared


STEPS = [1, 2, 3]
CHARTS = {
    "flat": Lines("One", "nats per token", [Series("x", [7], [1e18])]),
    "lines": Lines("Two", "norm", [Series("a", STEPS, [5.0, 1e-300, 1.0], faint=True),
                                   Series("b & <c>", STEPS, [4.0, math.inf, math.nan])], from_zero=True),
    "bands": Lines("Four", "", [Series("chance", STEPS, [0.25] * 3, faint=True),
                                Series("score", STEPS, [0.2, 0.5, 0.9], errors=[0.1, 0.0, 0.3])], over="step"),
    "rates": Lines("Six", "loss", [Series("a", [1e-3, 3e-3, 1e-2, 0.03], [3.0, 2.5, 2.0, 4.0]),
                                   Series("law", [2e-3, 0.05], [2.0, 1.0], faint=True),
                                   Series("", [1e-3, 0.5], [1.0, 2.0], faint=True)], log_x=True),
    "huge": Lines("Three", "tokens", [Series("x", [1, 10 ** 15], [1e299, -1e299])]),
    "nothing finite": Lines("Five", "nats", [Series("x", STEPS, [math.nan, math.inf, 1e308])])}


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_is_a_labelled_svg_in_the_pages_colours(name):
    svg, chart = draw(CHARTS[name]), CHARTS[name]
    root = ElementTree.fromstring(svg)
    assert root.get("aria-label") == chart.title
    assert not re.search(r"http|<style|<script|\bid=|nan|inf\b|#[0-9a-f]{6}\b", svg)
    texts = [text.text for text in root.iter("text")]
    names = [line.name for line in chart.series if line.name] if len(chart.series) > 1 else []
    assert {chart.unit or None, "step", *names} <= set(texts) and 2 <= len(texts) - len(names) <= 15
    points = [line.get("points").split() for line in root.findall("polyline")]
    assert [len(line) for line in points] == [sum(abs(y) < 1e300 for y in line.y) for line in chart.series]
    bands = [band.get("points").split() for band in root.findall("polygon")]
    assert [len(band) for band in bands] == [2 * len(line.errors) for line in chart.series if line.errors]
    for x, y in (point.split(",") for line in [*points, *bands] for point in line):
        assert LEFT <= float(x) <= RIGHT and float(y) >= TOP
