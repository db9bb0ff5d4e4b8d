"""What a check of a file says where it fails; and seals, by which a record is known to be what was written."""

import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from drover.pipeline.core.files import Ledger, read_sealed, seal_of, write_sealed
from drover.tools.verify.__main__ import verify
from drover.tools.verify.checks import Check, Findings, check_ledger, check_source
from tests.mutations import OTHERWISE


@pytest.mark.parametrize("filename, expected", [(None, ["run/a.tar", "run/b.arrow"]), ("run/b.arrow", ["run/b.arrow"])])
def test_what_cannot_be_read_is_named_by_its_path(filename, expected):
    fails = Mock(side_effect=OSError(5, "Input/output error", filename))
    found = Check(fails, (Path("run/a.tar"), "x", Path("run/b.arrow")))()
    assert [problem.file for problem in found.problems] == expected


def test_seals(tmp_path):
    """Any byte, also of the seal itself; what was sealed reads back as it was."""
    path, value = tmp_path / "a.json", {"a": [1, {"b": "ä\udce9"}], "c": {}}
    write_sealed(path, {**value, "seal": "old"})
    assert seal_of(path) == "sealed" and read_sealed(path) == value
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 6]) + data[at + 1:])
        assert seal_of(path) == "damaged", at


def test_a_changed_byte_of_a_ledger_is_found_and_a_torn_line_is_none(tmp_path):
    ledger = Ledger(tmp_path)
    for name in "ab":
        ledger.add(name, "k", {"text": name * 50})
    [path] = tmp_path.iterdir()
    data = path.read_bytes()

    def problems(content):
        path.write_bytes(content)
        found = Findings()
        check_ledger(found, path, "Delete it")
        return len(found.problems)
    for at in range(len(data)):
        assert problems(data[:at] + bytes([data[at] ^ 1 << at % 6]) + data[at + 1:]), at
    whole = data.index(b"\n") + 1
    assert not any(problems(data[:cut] + torn) for cut in range(whole, len(data) - 3) for torn in (b"", b"\n"))


@pytest.mark.parametrize(("make", "size", "expected"), [
    (lambda path: path.symlink_to("/dev/zero"), 0, "it is not a regular file"),
    (lambda path: path.symlink_to("/dev/zero"), 9, "it is not a regular file"),
    (os.mkfifo, 0, "it is not a regular file"),
    (lambda path: path.write_bytes(b"x" * 10), 9, "has 10 bytes instead of the 9 that the stage shard read (as a/b)"),
    (OTHERWISE["hole"], 9, "it has 4,398,046,511,104 bytes instead of the 9 that")])
def test_an_input_that_cannot_be_what_was_read_is_not_hashed(tmp_path, make, size, expected):
    path = tmp_path / "source"
    make(path)
    record = {"name": "a/b", "bytes": size, "sha256": "0" * 64, "mtime_ns": 0}
    problem, = Check(check_source, (path, record, "shard"))().problems
    assert problem.file == str(path) and expected in problem.what


@pytest.mark.parametrize(("kind", "expected"), [
    ("hole", "it has 4,398,046,511,104 bytes; at most"), ("endless", "it is not a regular file"),
    ("folder", "it is not a regular file"), ("loop", "Too many levels"), ("missing", "No such file")])
def test_a_configuration_that_is_not_read_is_one_of_the_problems(tmp_path, kind, expected):
    OTHERWISE[kind](tmp_path / "config.yaml")
    (tmp_path / "shard").mkdir()
    report = verify(tmp_path, processes=1)
    assert [expected in problem.what for problem in report.problems] == [True], report.problems
