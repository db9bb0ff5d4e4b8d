"""The table in the docstring of `stage_state` is the test."""

import pytest

from drover.pipeline.contract.manifest import Manifest
from drover.pipeline.contract.start_record import StartRecord
from drover.pipeline.contract.validity import stage_state

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


def test_the_table_is_small_and_has_every_combination():
    cases = {tuple(row[:3]) for row in ROWS[2:]}
    assert len(cases) == len(ROWS) - 2 <= 12
    assert {(record, changes) for record in ("start", "manifest") for changes in ("none", "some")} <= {
        case[:2] for case in cases}
    assert {case[2] for case in cases} == FURTHER.keys()
