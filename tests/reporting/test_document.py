import json

import pytest

from drover.pipeline.reporting.document import Table, filled, written
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
