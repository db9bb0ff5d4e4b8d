"""What the report reads of a run, apart from its records' own readers."""

from types import SimpleNamespace

import pytest

from drover.pipeline.contract.manifest import Manifest
from drover.pipeline.reporting.facts import earlier, shareable
from tests.refusal import table

MANIFEST = Manifest("encode", {}, [], {}, {}, wall_s=20.0, finished="2026-03-01T10:00:00+00:00")
"""Its last start began at 9:59:40."""


def attempt(began, ended, *, job="local", start=0, status="crashed", stage="encode"):
    """What the launcher logs of a start: minutes and seconds after nine o'clock."""
    names = {"stage": stage, "job": job, "start": start, "chain": "a"}
    found = [{**names, "event": "attempt", "at": f"2026-03-01T09:{began}+00:00"}]
    end = {**names, "event": "ended", "status": status, "at": f"2026-03-01T09:{ended}+00:00"}
    return [*found, *([end] if ended else [])]


LAST = attempt("59:39", "59:59", start=9, status="done")


@pytest.mark.parametrize(("attempts", "seconds"), [
    (LAST, []),
    (attempt("10:00", "10:30") + attempt("11:00", "12:00", start=1) + LAST, [30.0, 60.0]),
    (attempt("10:00", "10:30", stage="shard") + attempt("10:00", None, start=1) + LAST, []),  # another; ended unseen
    (attempt("10:00", "10:30", status="done") + attempt("20:00", "20:05", start=1) + LAST, [5.0]),  # rebuilt since
    (attempt("10:00", "10:30", job="7_0", status="done") + attempt("10:10", "10:40", job="7_1", status="done") + LAST,
     [30.0, 10.0]),  # shares of an array, which ran at once
])
def test_earlier_starts_count(attempts, seconds):
    assert earlier("encode", MANIFEST, sorted(attempts, key=lambda record: record["at"]), None) == seconds


def test_training_itself_says_when_it_ran():
    last = 1772359200.0 - 20
    spent = SimpleNamespace(starts=[SimpleNamespace(began=last - 100, end=last - 40),
                                    SimpleNamespace(began=last, end=last + 20)])
    assert earlier("train", MANIFEST, attempt("10:00", "10:30", stage="train"), spent) == [60.0]


@pytest.mark.parametrize(("text", "told"), [("runs_dir: /home/me/runs\n", "runs_dir: …/runs\n"), *table("""
    paths: [/home/me/data/notes/**/*.txt, data/x/y.txt] -> paths: […/**/*.txt, data/x/y.txt]
    "/Users/me/a/b/c" -> "…/b/c"
    (/data/web) -> (…/data/web)
    in /data/web. -> in …/data/web.
    /mnt/store/x/y -> …/x/y
    s3://bucket/a/b/c -> s3://bucket/a/b/c
    1/2/3 and a/b/c/d -> 1/2/3 and a/b/c/d""")])
def test_paths_are_cut_to_their_ends(text, told):
    assert shareable(text) == told
