"""Runs that the tests of several files share, made once a session."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.conftest import run_stage, write_config
from tests.stages.small_run import copy_of, make_small_run
from tests.stages.training import reusing, run_with_faults


@pytest.fixture(scope="session")
def two_sources(tmp_path_factory, corpus) -> Path:
    """Config of a run with token shards of short documents and some longer than a sequence, from two sources."""
    files = sorted(corpus.glob("*.txt"))
    sources = [{"kind": "files", "name": name, "paths": [str(path) for path in part], "separator": "\n\n"}
               for name, part in (("code", files[::2]), ("more", files[1::2]))]
    config = write_config(tmp_path_factory.mktemp("two"), corpus, shard={"sources": sources},
                          train={"mixture": {"code": 1, "more": 2}, "checkpoint": {"every_steps": 2}})
    for stage in ("shard", "tokenizer", "encode"):
        run_stage(stage, config)
    return config


@pytest.fixture(scope="session")
def begun_once(tmp_path_factory, encoded) -> Path:
    """Config of two runs of 16 steps: `whole` is done, `mini` was killed in step 11, checkpoints 4 and 8 are there."""
    config = reusing(encoded, tmp_path_factory.mktemp("begun"), train={"steps": 16, "precision": "fp64"})
    run_stage("train", config, "name=whole")
    run_with_faults(config, "kill:rank=0,step=11", "train.checkpoint.background=false", expect=-9)
    return config


@pytest.fixture
def begun(tmp_path, begun_once, encoded) -> Path:
    """The same for a test alone."""
    shutil.copytree(begun_once.parent / "runs", tmp_path / "runs")
    return reusing(encoded, tmp_path, train={"steps": 16, "precision": "fp64"})


@pytest.fixture(scope="session")
def small_run(tmp_path_factory) -> Path:
    """The configuration of a run with everything up to convert, around a model of random weights."""
    return make_small_run(tmp_path_factory.mktemp("small"))


@pytest.fixture
def copied(small_run, tmp_path) -> list[str]:
    """Arguments for a stage of another run that is at the same point, before evaluate."""
    return copy_of(small_run, tmp_path)
