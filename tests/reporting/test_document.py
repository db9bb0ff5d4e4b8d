import pytest

from drover.pipeline.reporting.document import Bars, Table, filled, flat, pairs, spread, written

RECORD = {"steps": 1200, "text": {"train": 11_828_804, "gzip -9": 2.05}, "part": 3, "whole": 8, "nothing": 0,
          "kind": "bpe", "seconds": 172.4, "sha": "ab" * 32, "yes": True,
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
{seconds:s} -> 2 m 52 s
{steps:k} -> 1,200
{sha} -> abababababababab…
{yes} -> yes
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


@pytest.mark.parametrize("case", FILLED.split("\n")[1:-1])
def test_what_a_format_string_makes_of_a_record(case):
    template, text = case.split(" -> ")
    assert filled(template, RECORD) == text


@pytest.mark.parametrize("case", NUMBERS.split("\n")[1:-1])
def test_numbers_are_short_and_take_few_letters(case):
    value, text, compact = case.split(" -> ")
    number = float(value) if set(value) & set(".e") else int(value)
    assert (written(number), written(number, "k")) == (text, compact)


def test_a_table_stresses_sums_and_pairs_leave_out_what_is_absent():
    table = Table("", {"source": "{source}", "n": "{n:,}"}, [*flat({"web": {"n": 1}, "all": {"n": 2}}, "source"),
                                                             {"source": "x", "n": 3, "strong": True}])
    assert table.rows == [(False, ["web", "1"]), (True, ["all", "2"]), (True, ["x", "3"])]
    assert [row for _, row in pairs("", {"a": "{a}", "b": "{b}", "c": "{c}"}, {"a": 0, "b": "", "c": None}).rows] == [
        ["a", "0"]]
    assert not Table("", {}, []) and Bars("", "s", {"a": 2.0, "b": 0.0}, form="s").rows == [
        ("a", "2.0 s", 78.0), ("b", "0.0 s", 0.0)]


def test_nested_counts_become_records():
    assert flat({"a": {"x": {"n": 1}, "y": {"n": 2}}, "b": {}}, "source", "field") == [
        {"source": "a", "field": "x", "n": 1}, {"source": "a", "field": "y", "n": 2}]
    assert flat({"a": {"x": 5}}, "source", "reason") == [{"source": "a", "reason": "x", "value": 5}]


@pytest.mark.parametrize(("values", "most", "found"), [
    ([], 3, []), ([1], 3, [1]), ([1, 2], 4, [1, 2]), (list(range(100)), 3, [0, 50, 99]), (list(range(5)), 1, [0])])
def test_values_are_spread_evenly(values, most, found):
    assert spread(values, most) == found
