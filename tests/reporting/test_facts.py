"""What the report reads of a run, apart from its records' own readers."""

import json
from types import SimpleNamespace

import pytest

from drover.pipeline.contract.manifest import Manifest
from drover.pipeline.reporting.facts import earlier, shareable
from tests.refusal import table

MANIFEST = Manifest("encode", {}, [], {}, {}, wall_s=20.0, finished="2026-03-01T10:00:00+00:00")
"""Its last start began at 9:59:40."""


def attempts(starts, stage="encode"):
    """What the launcher logs of starts, each told by minutes and seconds after nine o'clock, `-` for an end that nobody
    saw; last of the one that finished."""
    found = []
    for began, ended, *more in map(str.split, [*starts.split("; "), "59:39 59:59 start=9 status=done"]):
        given = {"stage": stage, "job": "local", "start": "0", "chain": "a", **dict(word.split("=") for word in more)}
        status = {"status": given.pop("status", "crashed")}
        found += [{**given, **about, "event": event, "at": f"2026-03-01T09:{at}+00:00"}
                  for event, at, about in (("attempt", began, {}), ("ended", ended, status)) if at != "-"]
    return sorted(found, key=lambda record: record["at"])


@pytest.mark.parametrize(("starts", "seconds"), table("""
    59:00 - -> []
    10:00 10:30; 11:00 12:00 start=1 -> [30, 60]
    10:00 10:30 stage=shard; 10:00 - start=1 -> []
    10:00 10:30 status=done; 20:00 20:05 start=1 -> [5]
    10:00 10:30 job=7_0 status=done; 10:10 10:40 job=7_1 status=done -> [30, 10]""", str, json.loads))
def test_earlier_starts_count(starts, seconds):
    """Not those of another stage, nor those before it was done once and then made again; shares of an array, which run
    at once, as the time that they took together."""
    assert earlier("encode", MANIFEST, attempts(starts), None) == seconds


def test_training_itself_says_when_it_ran():
    last = 1772359200.0 - 20
    spent = SimpleNamespace(starts=[SimpleNamespace(began=last - 100, end=last - 40),
                                    SimpleNamespace(began=last, end=last + 20)])
    assert earlier("train", MANIFEST, attempts("10:00 10:30", "train"), spent) == [60.0]


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
