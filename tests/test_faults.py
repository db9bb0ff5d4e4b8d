"""What crosses the stages: kill -9 anywhere in the chain, and a disk that fills up in any stage that writes data."""

from __future__ import annotations

import random
import resource
import subprocess
import sys
import time

import pytest

from launch.processes import kill_tree
from pipeline.manifest import read_manifest
from pipeline.training.metrics import read_metrics
from tests.conftest import REPOSITORY, environment, run_stage, stage_command, write_config

SAME_BYTES = ("shard", "tokenizer", "encode", "evaluate")
"""Stages whose outputs hold nothing that a clock measured."""


def chain(config):
    return [sys.executable, "launch/submit.py", "--stage", "all", "--config", str(config), "--cluster", "local"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, corpus):
    """The run folder of a chain that nobody disturbed."""
    config = write_config(tmp_path_factory.mktemp("undisturbed"), corpus)
    subprocess.run(chain(config), cwd=REPOSITORY, env=environment(), check=True, capture_output=True, timeout=300)
    return config.parent / "runs/mini"


@pytest.mark.parametrize("seed", [0, 1])
def test_kill_9_anywhere_in_the_chain_changes_nothing(tmp_path, corpus, undisturbed, seed):
    """The launcher and everything below it is killed at random moments; the same command continues each time."""
    config, chance, kills = write_config(tmp_path, corpus), random.Random(seed), 0
    for patience in range(40):
        process = subprocess.Popen(chain(config), cwd=REPOSITORY, env=environment(), stdout=subprocess.DEVNULL,
                                   stderr=subprocess.PIPE, text=True)
        try:
            # Ever longer, so that the chain gets through however slow the machine is.
            _, said = process.communicate(timeout=chance.uniform(0.5, 5.0) + patience)
        except subprocess.TimeoutExpired:
            kill_tree(process.pid)
            process.communicate()
            kills += 1
            continue
        assert process.returncode == 0, said
        break
    assert kills >= 3
    run = tmp_path / "runs/mini"
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
    config = write_config(tmp_path, corpus)
    for earlier in ("shard", "tokenizer", "encode", "train")[:["shard", "tokenizer", "encode", "", "convert"]
                                                             .index(stage)]:
        run_stage(earlier, config, ranks=2 if earlier == "train" else 1)
    result = subprocess.run(stage_command(stage, config), cwd=REPOSITORY, env=environment(), capture_output=True,
                            text=True, check=False,
                            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    assert result.returncode == 2 and "full" in result.stderr, result.stdout + result.stderr
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
