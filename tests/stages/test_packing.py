"""Training on documents that are packed by best fit: planned once, honest in its figures, the same on any ranks."""

from __future__ import annotations

import pytest

from pipeline.contract.manifest import read_manifest
from pipeline.records.metrics import read_metrics
from tests.conftest import run_stage
from tests.stages.training import curve, difference, events, lines, proven, reusing, run_with_faults, train_folder

SETTINGS = ["train.packing=best_fit", "train.precision=fp64", "train.steps=16"]


@pytest.fixture
def fresh(tmp_path, two_sources):
    """Config of a new run on short documents and some longer than a sequence."""
    return reusing(two_sources, tmp_path, train={"mixture": None, "checkpoint": {"every_steps": 4}, "micro_batch": 8})


def test_a_packed_run_says_its_waste_and_is_the_same_however_it_is_spread(fresh):
    first = run_stage("train", fresh, "name=whole", *SETTINGS)
    assert "they were not planned before" in first.stdout and "best-fit packing: " in first.stdout
    folder = train_folder(fresh, "whole")
    metrics, packing = read_metrics(folder / "metrics.jsonl"), read_manifest(folder).counts["packing"]
    assert 0 < packing["padding_share"] < 0.2 and 0 < packing["documents_cut"] < packing["documents"]
    [start] = events(fresh, "start", "whole")
    assert start["packing"] == packing
    shares = [record["padding_share"] for record in metrics]
    assert all(0 <= share < 0.3 for share in shares) and any(shares)
    assert metrics[-1]["tokens"] == read_manifest(folder).counts["tokens"] == pytest.approx(
        sum(1024 * (1 - share) for share in shares), abs=0.1)
    assert all(record["targets"] <= 1024 * (1 - record["padding_share"]) for record in metrics)
    assert proven(fresh, "whole")

    spread = ["parallel.cp=2", "parallel.pp=2", "train.micro_batch=4"]
    run_with_faults(fresh, "kill:rank=0,step=7", *SETTINGS, *spread, "train.checkpoint.background=false", ranks=4,
                    expect=1)
    plan = train_folder(fresh) / "packing/64"
    files = {path: path.stat().st_mtime_ns for path in plan.rglob("*") if path.is_file()}
    damaged = next(path for path in files if path.suffix == ".bins")
    damaged.write_bytes(damaged.read_bytes()[:-8])
    said = run_stage("train", fresh, *SETTINGS).stdout
    assert "planned the best-fit packing of 1 of " in said and "continuing after step" in said
    assert {path for path in files if path.stat().st_mtime_ns != files[path]} == {damaged} and len(files) > 2
    assert proven(fresh) and difference(lines(fresh), {record["step"]: record for record in metrics}) < 1e-10
    for one, two in zip(curve(fresh, "whole"), curve(fresh), strict=True):
        assert one["samples"] == two["samples"] and one["targets"] == two["targets"]
        assert one.get("heldout_bpb", {}) == pytest.approx(two.get("heldout_bpb", {}), rel=1e-10)
    assert [record["tokens"] for record in read_metrics(train_folder(fresh) / "metrics.jsonl")] == \
        [record["tokens"] for record in metrics]
