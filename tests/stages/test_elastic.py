"""One run on changing ranks, layouts and engines: the curve is that of the run that nobody disturbed."""

from __future__ import annotations

import math
import random
import signal
from itertools import pairwise

import pytest

from pipeline.contract.manifest import read_manifest
from pipeline.files import read_lines
from tests.conftest import run_stage
from tests.stages.training import curve, difference, events, lines, proven, train_and_kill, train_folder

ZERO = "parallel.engine=deepspeed"
SEQUENCES = 12
"""Of a batch in the test of many kills: 1, 2, 3 and 4 groups of ranks divide it."""
Layout = tuple[int, dict[str, int | str]]
"""Ranks, and what `parallel` says of them."""
ONE: Layout = (1, {})
TWO: Layout = (2, {})
FOUR: Layout = (4, {"tp": 2})
PIPELINE: Layout = (2, {"pp": 2})
GRID: Layout = (4, {"pp": 2, "cp": 2})
FEW = (TWO, TWO, PIPELINE, (3, {}), GRID, GRID, FOUR, ONE, ONE)
"""Layouts of one start after another, each killed; some twice in a row."""
LAYOUTS: tuple[Layout, ...] = (
    ONE, TWO, (3, {}), (4, {}), (2, {"tp": 2}), FOUR, PIPELINE, GRID, (2, {"cp": 2}), (4, {"pp": 2, "tp": 2}),
    (4, {"cp": 2, "tp": 2}), (4, {"pp": 2}), (3, {"pp": 3}), (2, {"pp": 2, "pp_schedule": "interleaved"}))
"""Of which many are chosen at random."""


def many(kills: int) -> tuple[Layout, ...]:
    """Layouts at random, in a quarter of the cases the one before."""
    chance, found = random.Random(3), [TWO]
    while len(found) < kills:
        found.append(found[-1] if chance.random() < 0.25 else chance.choice(LAYOUTS))
    return tuple(found)


def overrides(ranks: int, parallel: dict[str, int | str]) -> list[str]:
    """Settings of a layout: the largest micro-batch with which each pipeline has twice as many as stages."""
    shares = {key: size for key, size in parallel.items() if isinstance(size, int)}
    groups, pp = ranks // math.prod(shares.values()), shares.get("pp", 1)
    return [f"train.micro_batch={SEQUENCES // groups // (2 * pp if pp > 1 else 1)}",
            *(f"parallel.{key}={value}" for key, value in parallel.items())]


def test_a_run_changes_its_engine_at_checkpoints(fresh):
    """FSDP2 to ZeRO and back, by kill -9 and by request: losses, held-out figures and sample texts stay the same.

    Moments that got lost at a switch would show: the losses after it differ by percents, not by rounding.
    """
    settings = ["train.precision=fp32", "train.steps=36", "train.checkpoint.every_steps=3", "train.sample_every=6"]
    run_stage("train", fresh, "name=whole", *settings, "train.micro_batch=16")
    legs = ((2, 3, signal.SIGKILL, []),
            (2, 8, signal.SIGTERM, [ZERO, "parallel.zero_stage=3"]),
            (4, 13, signal.SIGKILL, ["parallel.tp=2"]),
            (2, 18, signal.SIGTERM, [ZERO, "parallel.zero_stage=1"]),
            (2, 23, signal.SIGKILL, ["parallel.pp=2", "train.micro_batch=4"]),
            (2, 28, signal.SIGKILL, [ZERO, "parallel.zero_stage=2", "train.micro_batch=8"]))
    for ranks, after, how, layout in legs:
        train_and_kill(fresh, *settings, *layout, ranks=ranks, after_step=after, how=how, log="events")
    run_stage("train", fresh, *settings)
    assert proven(fresh)
    assert len(events(fresh, "stop")) == 2 and read_manifest(train_folder(fresh)).counts["restarts"] == len(legs)
    assert [event["parallel"]["engine"] for event in events(fresh, "start") + events(fresh, "resume")] == \
        ["fsdp2", "deepspeed", "fsdp2", "deepspeed", "fsdp2", "deepspeed", "fsdp2"]
    whole = {record["step"]: record for record in curve(fresh, "whole")}
    assert difference(lines(fresh), whole) < 1e-4  # 5e-6 as a rule
    measured = [record for record in lines(fresh) if "heldout_bpb" in record]
    assert {record["step"] for record in measured} == set(range(4, 37, 4))
    for record in measured:
        assert record["heldout_bpb"] == pytest.approx(whole[record["step"]]["heldout_bpb"], rel=1e-5)
    texts = [{(record["step"], record["prompt"]): record["text"]
              for record in read_lines(train_folder(fresh, name) / "samples.jsonl")} for name in ("whole", "mini")]
    assert len(texts[0]) == 12 and texts[0] == texts[1]


@pytest.mark.parametrize("layouts", [FEW, pytest.param(many(20), marks=pytest.mark.soak)], ids=["9", "20"])
def test_kills_at_random_steps_on_random_ranks_leave_the_curve_as_it_was(fresh, layouts):
    """In float64, where other sums in another order differ by some 1e-15. On equal ranks no bit does."""
    chance, attempts = random.Random(3), []
    settings = ["train.precision=fp64", "model.layers=4", "train.lr=0.002", "train.steps=80",
                f"train.batch_tokens={64 * SEQUENCES}", "train.checkpoint.every_steps=3",
                "train.checkpoint.keep=1", "train.heldout_every=40", "train.sample_every=100"]
    for ranks, parallel in layouts:
        before = lines(fresh)
        done = max((record["step"] for record in before), default=0)
        train_and_kill(fresh, *settings, *overrides(ranks, parallel), ranks=ranks,
                       after_step=min(done + chance.randrange(4), 78))
        attempts.append(((ranks, parallel), {record["step"]: record for record in lines(fresh)[len(before):]}))
    run_stage("train", fresh, *settings, "train.micro_batch=12")
    run_stage("train", fresh, "name=whole", *settings, "train.micro_batch=12")
    assert proven(fresh)
    assert len(events(fresh, "start") + events(fresh, "resume")) == len(layouts) + 1
    whole = {record["step"]: record for record in curve(fresh, "whole")}
    assert {record["step"] for record in lines(fresh)} == set(whole)
    assert all(record["samples"] == whole[record["step"]]["samples"] for record in lines(fresh))
    assert difference(lines(fresh), whole) < 1e-12
    again = [(earlier[step], later[step]) for (one, earlier), (other, later) in pairwise(attempts) if one == other
             for step in earlier.keys() & later.keys()]
    assert again and all(one["loss"] == other["loss"] and one["grad_norm"] == other["grad_norm"]
                         for one, other in again)
