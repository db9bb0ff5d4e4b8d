"""Token shards are hashed when they are first used, by one rank, and again when they change."""

import hashlib
import os
import threading
from contextlib import ExitStack, closing

import numpy as np
import pytest

from drover.pipeline.contract.input_check import Expected
from drover.pipeline.data.sampling.shard_checks import ShardChecks
from tests.waiting import HANG_S, wait_for

ROWS = 6


@pytest.fixture
def files(tmp_path):
    """Six files, each the content of one row."""
    for row in range(ROWS):
        (tmp_path / str(row)).write_bytes(bytes([row]) * 100)
    return tmp_path, lambda row: Expected(tmp_path / str(row), hashlib.sha256(bytes([row]) * 100).hexdigest(),
                                          "is not what was committed", "Put it back")


@pytest.fixture
def checks(files):
    """Makes checks, closed after the test. Sample n is read from the row n."""
    with ExitStack() as stack:
        yield lambda rank=0, world=1, later=(), rows_of=np.unique: stack.enter_context(closing(
            ShardChecks(range(ROWS), files[1], rows_of, rank, world, later)))
    wait_for(lambda: not [thread for thread in threading.enumerate() if thread.name == "shard-checks"])


def test_what_is_used_is_compared_once_over_all_ranks(checks):
    ranks = [checks(rank, 2, [4]) for rank in range(2)]
    for one in ranks:
        one.use(1, 1, [(0, 2)])
        one.use(2, 2, [(1, 4)])
        assert one.wait(one.look_again(2), HANG_S) and one.damage is None and one.wait(None, HANG_S)
    assert [one.checked for one in ranks] == [3, 2]  # rows 0, 2 and 4, the last of no step; rows 1 and 3
    assert [one.seen for one in ranks] == [300, 200]


def test_damage_is_told_with_the_steps_that_read_it(files, checks):
    (files[0] / "3").write_bytes(b"x" * 100)
    one = checks()
    for step, samples in ((1, (0, 2)), (6, (2, 4)), (7, (3, 4))):
        one.use(step, step, [samples])
    assert not one.wait(one.look_again(7), HANG_S)
    assert one.damage.step == 6 and one.checked == 3
    assert f"{files[0]}/3" in one.damage.text and "It was read by the steps 6" in one.damage.text


def test_after_damage_nothing_more_is_done(files, checks):
    (files[0] / "0").write_bytes(b"x" * 100)
    asked = []

    def rows_of(samples):
        asked.extend(samples.tolist())
        return samples
    one = checks(rows_of=rows_of)
    one.use(1, 1, [(0, 1), (1, 2), (2, 3)])
    one.use(2, 2, [(3, 4)])
    assert not one.wait(None, HANG_S) and one.damage.step == 1 and 2 not in asked


@pytest.mark.parametrize("change", ["rewritten", "replaced", "time put back", "touched"])
def test_a_shard_that_changes_after_it_was_compared(files, checks, change):
    path, one, sound = files[0] / "1", checks(), change == "touched"
    one.use(1, 1, [(0, 3)])
    assert one.wait(one.look_again(1), HANG_S)
    one.use(2, 2, [(1, 2)])
    stat, written = path.stat(), files[0] / "new" if change == "replaced" else path
    written.write_bytes(path.read_bytes() if sound else b"y" * 100)
    written.replace(path)
    if change == "time put back":
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert one.wait(one.look_again(2), HANG_S) == sound and (one.damage is None) == sound and one.checked == 3
    assert sound or (one.damage.step == 2 and "It was read by the steps 2" in one.damage.text)


def test_a_read_that_does_not_come_back_is_left_to_itself(files, monkeypatch):
    answers = threading.Event()
    monkeypatch.setattr("drover.pipeline.data.sampling.shard_checks.LEFT_AFTER_S", 0.2)
    monkeypatch.setattr("drover.pipeline.data.sampling.shard_checks.compared", lambda *_: answers.wait() and None)
    one = ShardChecks(range(ROWS), files[1], np.unique, 0, 1, ())
    one.use(1, 1, [(0, 1)])
    assert not one.wait(one.look_again(1), 0.2)
    one.close()
    assert one.checked == 0 and one.damage is None
    answers.set()  # the reader goes on, and ends
    wait_for(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("shard-check")])
