"""What ranks find when they start: memory of GPUs, and groups that wait as long as is said and have names."""

import os
import re
import resource
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from drover.pipeline.config.training import ParallelConfig, TrainConfig
from drover.pipeline.config.tree import Config
from drover.pipeline.core.errors import UserError
from drover.pipeline.parallel import ranks
from drover.pipeline.parallel.ranks import ALLOCATOR, PATIENCE, allow_open_files, start_ranks
from drover.pipeline.training.watchdog import longest_wait
from tests.parallel.groups import run_case
from tests.parallel.train_steps import one_refuses, waits
from tests.refusal import refused


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    for name in ALLOCATOR:
        monkeypatch.setenv(name, "")  # so that it is put back as it was
        monkeypatch.delenv(name)


def test_ranks_on_gpus_let_segments_grow_before_they_touch_one(monkeypatch):
    seen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: seen.append(os.environ.get("PYTORCH_ALLOC_CONF")))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: seen.append(options["timeout"]))
    result = ranks.start_ranks(timedelta(minutes=7))
    assert seen == ["expandable_segments:True", timedelta(minutes=7)] and result.patience == timedelta(minutes=7)


@pytest.mark.parametrize(("last", "taken"), [
    ("Duplicate GPU detected : rank 5 and rank 4 both on CUDA device c1000", UserError),
    ("Bootstrap : no socket interface found", RuntimeError)])
def test_two_ranks_with_one_gpu_are_refused_in_words(monkeypatch, last, taken):
    def fail(*_, **__):
        raise RuntimeError(f"NCCL error, internal error\nLast error:\n{last}\n")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "init_process_group", fail)
    output = refused(taken, re.escape(last), ranks.start_ranks)
    assert (output.startswith("Two ranks have one GPU (Duplicate")) == (taken is UserError)


def test_what_one_rank_refuses_ends_all_in_its_words():
    assert run_case(2, one_refuses) == [
        "tensor x has values that are NaN"] * 2


def test_groups_have_names_and_wait_as_long_as_is_said():
    assert run_case(4, waits, seconds=2, parallel={"dp_replicate": 2, "tp": 2}) == {
        "replicate": ("mesh_replicate", 2.0), "shard": ("mesh_shard", 2.0), "tensor": ("mesh_tensor", 2.0)}


@pytest.mark.parametrize(("minutes", "hang", "expected"), [
    (None, 10.0, timedelta(minutes=40)), (None, None, PATIENCE), (12.0, 10.0, timedelta(minutes=12))])
def test_a_collective_waits_longer_than_the_watchdog_unless_told(minutes, hang, expected):
    config = Config(parallel=ParallelConfig(timeout_minutes=minutes),
                    train=TrainConfig(guards={"hang_minutes": hang}))
    assert longest_wait(config) == expected


@pytest.mark.parametrize(("soft", "hard", "expected"), [
    (1024, 4096, [(4096, 4096)]), (4096, 4096, []), (256, resource.RLIM_INFINITY, [(10_240, resource.RLIM_INFINITY)])])
def test_as_many_files_may_be_open_as_the_hard_limit_allows(monkeypatch, soft, hard, expected):
    """Where that is none, as on macOS, as many as it takes."""
    result = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: result.append(limits))
    allow_open_files()
    assert result == expected


def test_a_device_that_is_not_there_is_refused():
    refused(UserError, "launch.device xpu:99 cannot be used here", start_ranks, device="xpu:99")
