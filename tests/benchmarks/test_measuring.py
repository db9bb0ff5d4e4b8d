"""The one way to measure: fair turns, ratios within a round, tables that say what is missing."""

import json
import os
import time
from multiprocessing import active_children

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks.apart import Apart, FailedError
from benchmarks.measuring import Record, Taken, alternated, compared
from tests.refusal import printed


def test_contenders_take_turns_and_the_order_turns_round():
    order = []
    taken = alternated({name: lambda name=name: order.append(name) or Taken(1.0, 1.0) for name in "ab"}, 3)
    assert order == [*"abbaab"] and [len(taken[name]) for name in "ab"] == [3, 3]


def test_a_ratio_is_the_median_of_ratios_within_a_round_and_tables_are_written(tmp_path):
    ours, theirs = [Taken(1, 1), Taken(10, 1), Taken(2, 1)], [Taken(3, 2), Taken(40, 2), Taken(4, 2)]
    rows = compared({"ours": ours, "theirs": theirs}, 20.0, "MB", "theirs")
    assert [rows[0][name] for name in ("rate", "cpu_rate", "cpu_ratio", "wall_ratio", "wall_least", "wall_most")] == [
        10, 20, 2, 3, 2, 4]
    record = Record("trial", tmp_path / "new")
    for row in rows:
        record.add("Speed", {"": "{name}", "{unit}/s": "{rate:.1f}", "ratio": "{wall_ratio:.1f}"}, row)
    text = (tmp_path / "new/results.md").read_text()
    assert "|  | MB/s | ratio |\n| --- | --- | --- |\n| ours | 10.0 | 3.0 |\n| theirs | 5.0 | - |\n" in text
    assert len(json.loads((tmp_path / "new/results.json").read_text())["rows"]) == 2


def fail(rank, how):
    """Fail on this rank; others wait for it for ever."""
    if os.environ["RANK"] != rank:
        time.sleep(3600)
    if how == "dies":
        os._exit(3)
    raise ValueError("no such thing")


@pytest.mark.parametrize(("rank", "how", "limit_s", "error", "told"), [
    ("1", "raises", 600.0, ValueError, "no such thing"), ("1", "dies", 600.0, FailedError, "a process died"),
    ("7", "hangs", 0.1, FailedError, "took too long; stopped")])
def test_a_rank_that_fails_or_hangs_is_an_error(tmp_path, rank, how, limit_s, error, told):
    ranks = Apart([{"RANK": "0"}, {"RANK": "1"}], tmp_path / "log")
    with pytest.raises(error, match=told):
        ranks.call(fail, rank, how, limit_s=limit_s)
    if how == "dies":
        with pytest.raises(error, match=told):  # for the next case, too
            ranks.call(fail, rank, how, limit_s=limit_s)
    ranks.end()
    assert not active_children()


def test_what_cannot_be_measured_is_said(capsys):
    said = printed(capsys, benchmarks.main, "train", "--only", "nope", expect=2)
    assert "No case of train contains nope. They are: ours; ours, selective checkpointing" in said
    said = printed(capsys, benchmarks.main, "train", "--rounds", "0", "--steps", "-1", expect=2)
    assert "--rounds must be above 0, not 0; --steps must be above 0, not -1" in said
