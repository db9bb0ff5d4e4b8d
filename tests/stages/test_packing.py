"""Training on documents that are packed by best fit: planned once, honest in its figures, the same on any ranks."""

from __future__ import annotations

import shutil

import pytest
import yaml

from pipeline.contract.manifest import read_manifest
from pipeline.records.metrics import read_metrics
from tests.conftest import run_stage, write_config
from tests.stages.training import curve, events, lines, proven, train_and_kill, train_folder
from tools.where import __main__ as where

SETTINGS = ["train.packing=best_fit", "train.precision=fp64", "train.steps=16"]


@pytest.fixture(scope="module")
def short_documents(tmp_path_factory, corpus):
    """Config of a run with token shards of short documents and some longer than a sequence: paragraphs of code."""
    source = {"kind": "files", "name": "code", "paths": [f"{corpus}/*.txt"], "separator": "\n\n"}
    config = write_config(tmp_path_factory.mktemp("short"), corpus, shard={"sources": [source]})
    for stage in ("shard", "tokenizer", "encode"):
        run_stage(stage, config)
    return config


@pytest.fixture
def fresh(tmp_path, short_documents):
    """Config of a new run that reuses those shards."""
    config = yaml.safe_load(short_documents.read_text())
    config["train"]["micro_batch"] = 8
    config.update(runs_dir=str(tmp_path / "runs"), reuse=str(short_documents.parent / "runs/mini"))
    path = tmp_path / "mini.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def test_a_packed_run_says_its_waste_and_goes_on_on_other_ranks(fresh, capsys):
    first = run_stage("train", fresh, "name=whole", *SETTINGS, ranks=2)
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

    train_and_kill(fresh, *SETTINGS, ranks=2, after_step=4, log="events")
    plan = train_folder(fresh) / "packing/64"
    files = {path: path.stat().st_mtime_ns for path in plan.rglob("*") if path.is_file()}
    assert len(files) > 2
    damaged = next(path for path in files if path.suffix == ".bins")
    damaged.write_bytes(damaged.read_bytes()[:-8])
    said = run_stage("train", fresh, *SETTINGS).stdout
    assert "planned the best-fit packing of 1 of " in said and "continuing after step" in said
    assert {path for path in files if path.stat().st_mtime_ns != files[path]} == {damaged}
    for one, two in zip(curve(fresh, "whole"), curve(fresh), strict=True):
        assert one["samples"] == two["samples"] and one["targets"] == two["targets"]
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-11)
        assert one.get("heldout_bpb", {}) == pytest.approx(two.get("heldout_bpb", {}), rel=1e-11)
    assert proven(fresh)
    assert [record["tokens"] for record in read_metrics(train_folder(fresh) / "metrics.jsonl")] == \
        [record["tokens"] for record in metrics]

    capsys.readouterr()
    assert where.main(["--run", str(train_folder(fresh).parent), "--step", "3"]) == 0
    told = capsys.readouterr().out
    shutil.rmtree(plan)
    assert where.main(["--run", str(train_folder(fresh).parent), "--step", "3"]) == 0
    assert capsys.readouterr().out == told and not plan.exists(), "a tool only reads"


def test_a_run_is_not_packed_otherwise_in_its_midst(fresh):
    train_and_kill(fresh, ranks=1, after_step=4, log="events")
    assert "train.packing" in run_stage("train", fresh, "train.packing=best_fit", expect=2).stderr
    run_stage("train", fresh)
    assert all("padding_share" not in record for record in lines(fresh))
    assert "packing" not in read_manifest(train_folder(fresh)).counts
    assert not (train_folder(fresh) / "packing").exists()


@pytest.mark.parametrize("parallel", [["parallel.cp=2"], ["parallel.pp=2", "train.micro_batch=4"],
                                      ["parallel.tp=2"], ["train.across_documents=true"]],
                         ids=lambda settings: settings[0])
def test_a_packed_batch_is_the_same_however_it_is_spread(fresh, parallel):
    settings = ["train.packing=best_fit", "train.precision=fp64", "train.steps=3"]
    same = [setting for setting in parallel if "across" in setting]
    run_stage("train", fresh, "name=whole", *settings, *same)
    run_stage("train", fresh, *settings, *parallel, ranks=2)
    for one, two in zip(curve(fresh, "whole"), curve(fresh), strict=True):
        assert one["targets"] == two["targets"] and one["loss"] == pytest.approx(two["loss"], rel=1e-10)
    assert [record["tokens"] for record in lines(fresh)] == [record["tokens"] for record in lines(fresh, "whole")]
