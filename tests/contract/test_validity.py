"""The table in the docstring of `stage_state` is the test."""

import pytest

from drover.pipeline.contract.manifest import Manifest, StartRecord, differences, stage_state

OLD = {"config": {"shard": {"seed": 1}}, "inputs": {}, "files": {"a": "00"}}
NEW = {"config": {"shard": {"seed": 2}}, "inputs": {}, "files": {"a": "00"}}
RECORDS = {"none": None, "start": StartRecord(OLD), "manifest": Manifest("shard", OLD, [], {}, "")}
FURTHER = {"": {}, "something is missing": {"missing": ["a.tar is missing"]},
           "results that fit are kept": {"keeps": True}, "no finished work is of use": {"useful": False}}
ROWS = [[cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in stage_state.__doc__.splitlines() if line.strip().startswith("|")]


@pytest.mark.parametrize(("record", "changes", "further", "kind"), ROWS[2:])
def test_table(record, changes, further, kind):
    state = stage_state(RECORDS[record], NEW if changes == "some" else OLD, **FURTHER[further])
    assert state.kind == kind
    assert list(map(str, state.differences)) == ["shard.seed: 1 -> 2"] * (changes == "some")
    if further == "something is missing":
        assert state.reasons == ["a.tar is missing"]


def test_a_filter_that_is_put_between_others_changes_none_of_them():
    length, quality, language = ({"kind": kind, "name": None, "share": 0.5}
                                 for kind in ("length", "quality", "language"))
    old, new = ({"config": {"shard": {"filters": filters}}} for filters in (
        [length, quality], [length, language, {**quality, "share": 0.25}]))
    assert [*map(str, differences(old, new))] == [
        'shard.filters.(order): "length, quality" -> "length, language, quality"',
        'shard.filters.language.kind: not set -> "language"', "shard.filters.language.share: not set -> 0.5",
        "shard.filters.quality.share: 0.5 -> 0.25"]
    assert differences(old, {"config": {"shard": {"filters": [quality, length]}}}), "the order counts"
