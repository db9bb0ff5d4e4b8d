"""What crosses the stages: kill -9 anywhere in the chain, and a disk that fills up in any stage that writes data."""

from __future__ import annotations

import os
import random
import resource
import shutil
import subprocess
import sys
import time

import pytest

from launch.processes import kill_tree
from pipeline.contract.manifest import read_manifest
from pipeline.records.metrics import read_metrics
from tests.conftest import REPOSITORY, environment, run_stage, stage_command, write_config
from tests.waiting import HANG_S, wait_for

SAME_BYTES = ("shard", "tokenizer", "encode", "evaluate")
"""Stages whose outputs hold nothing that a clock measured."""


def chain(config):
    return [sys.executable, "launch/submit.py", "--stage", "all", "--config", str(config), "--cluster", "local"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, corpus):
    """The run folder of a chain that nobody disturbed."""
    config = write_config(tmp_path_factory.mktemp("undisturbed"), corpus)
    subprocess.run(chain(config), cwd=REPOSITORY, env=environment(), check=True, capture_output=True, timeout=HANG_S)
    return config.parent / "runs/mini"


def files(run):
    """How many files a run has: it grows from the first stage to the last, so it tells how far a chain has come."""
    return sum(len(names) for _, _, names in os.walk(run))  # which passes over folders that vanish meanwhile


@pytest.mark.parametrize("seed, kills", [(0, 4), pytest.param(1, 20, marks=pytest.mark.soak)])
def test_kill_9_anywhere_in_the_chain_changes_nothing(tmp_path, corpus, undisturbed, seed, kills):
    """The launcher and everything below it is killed at random moments; the same command continues each time."""
    config, chance, run, landed = write_config(tmp_path, corpus), random.Random(seed), tmp_path / "runs/mini", 0
    moments = sorted(chance.sample(range(1, files(undisturbed)), kills))
    for moment in moments:
        process = subprocess.Popen(chain(config), cwd=REPOSITORY, env=environment(), stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL)
        wait_for(lambda moment=moment, process=process: files(run) >= moment or process.poll() is not None)
        kill_tree(process.pid)
        landed += process.wait() < 0
    assert landed >= 3
    subprocess.run(chain(config), cwd=REPOSITORY, env=environment(), check=True, capture_output=True, timeout=HANG_S)
    for stage in SAME_BYTES:
        assert read_manifest(run / stage).digest == read_manifest(undisturbed / stage).digest, stage
    ours, theirs = (read_metrics(folder / "train/metrics.jsonl") for folder in (run, undisturbed))
    assert [(line["step"], line["loss"], line["grad_norm"]) for line in ours] == \
        [(line["step"], line["loss"], line["grad_norm"]) for line in theirs]
    for name in ("model-00001-of-00001.safetensors", "config.json", "tokenizer.json"):
        assert (run / "convert/hf" / name).read_bytes() == (undisturbed / "convert/hf" / name).read_bytes()
    assert (run / "report.html").is_file() and not list(run.rglob("*.tmp"))


@pytest.mark.parametrize("stage, limit", [("shard", 20_000), ("tokenizer", 10_000), ("encode", 5_000),
                                          ("convert", 50_000)])
def test_a_full_disk_stops_any_stage_with_a_paragraph(tmp_path, corpus, undisturbed, stage, limit):
    """The process's file size limit stands in for the disk. Once there is room, the same command goes on."""
    config, stages = write_config(tmp_path, corpus), ("shard", "tokenizer", "encode", "train", "convert")
    for earlier in stages[:stages.index(stage)]:
        shutil.copytree(undisturbed / earlier, tmp_path / "runs/mini" / earlier)
    result = run_stage(stage, config, expect=2, limits={resource.RLIMIT_FSIZE: limit})
    assert "full" in result.stderr, result.stdout + result.stderr
    assert read_manifest(tmp_path / "runs/mini" / stage) is None
    run_stage(stage, config)
    if stage in SAME_BYTES:
        assert read_manifest(tmp_path / "runs/mini" / stage).digest == read_manifest(undisturbed / stage).digest


def test_a_stage_that_is_killed_at_once_has_done_no_harm(tmp_path, corpus):
    config = write_config(tmp_path, corpus)
    for delay in (0.05, 0.2, 0.4):
        process = subprocess.Popen(stage_command("shard", config), cwd=REPOSITORY, env=environment(),
                                   stdout=subprocess.DEVNULL)
        time.sleep(delay)
        kill_tree(process.pid)
        process.wait()
    run_stage("shard", config)
    assert read_manifest(tmp_path / "runs/mini/shard").counts["documents_in"] > 0
