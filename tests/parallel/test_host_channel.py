"""The channel of the hosts: a tree through the store, without a socket from every rank to every other."""

import os
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from pipeline import errors
from pipeline.parallel.host_channel import HostChannel
from pipeline.parallel.ranks import Ranks
from tests.formats.test_meta import Hostile
from tests.parallel.groups import run_case
from tests.refusal import refused


@pytest.mark.parametrize(("ranks", "arity"), [(5, 2), (5, 3), (5, 8)])
def test_what_all_say_arrives_in_order_and_nothing_is_left(ranks, arity):
    found = run_case(ranks, "channel", {"body": "tests.parallel.channel_case:talk", "arity": arity})
    assert found["joined"] == [list(range(ranks))] * 2 and found["alike"] and found["first"] == ("go", 0)
    assert found["opened"] <= 1, "to the store"
    assert found["widest"] == min(arity, ranks) and found["left"] == []


def test_a_rank_that_is_not_heard_is_named():
    found = run_case(5, "channel", {"body": "tests.parallel.channel_case:never_heard"})
    assert "Rank 0 waited for rank 1 in the channel of the hosts" in found["said"] and "timeout" in found["said"]


def test_a_save_calls_no_collective_and_writes_a_file_for_each_rank(tmp_path):
    found = run_case(5, "channel", {"body": "tests.parallel.channel_case:collectives_of_a_save",
                                    "folder": str(tmp_path)})
    assert found["called"] == []
    assert found["rows"] == [rank for rank in range(5) for _ in range(2)] and found["generators"] == 5
    assert found["files"] == ["COMPLETE.json", "index.json", *(f"rank-{rank:05}.safetensors" for rank in range(5))]


@pytest.mark.parametrize("parallel", [{"dp_replicate": 2}, {"dp_replicate": 2, "tp": 2}])
def test_a_step_has_one_sum_of_votes_and_one_of_loss_and_norm(parallel, tmp_path):
    """And comparing replicas has one, however many weights and ranks there are, until they differ."""
    found = run_case(4, "steps", {"body": "tests.parallel.channel_case:collectives_of_a_step", "parallel": parallel,
                                  "folder": str(tmp_path)})
    assert found["agree"] == found["step"] == found["replicas"] == ["all_reduce"]
    assert "tok_embeddings.weight: " in found["differ"] and "since step 2" in found["differ"]


@pytest.mark.parametrize("call", [open, os.mkfifo, errors.listed], ids=["open", "mkfifo", "a function beside errors"])
def test_what_somebody_else_wrote_into_the_store_is_not_executed(tmp_path, call):
    store = dist.HashStore()
    pair = [HostChannel(Ranks(rank, 2, torch.device("cpu")), SimpleNamespace(clone=lambda: store)) for rank in (0, 1)]
    for channel in pair:
        channel._store = store
    assert pair[0].same(OSError(28, "full", "x")).errno == 28
    assert isinstance(heard := pair[1].same(None), OSError) and (heard.errno, heard.filename) == (28, "x")
    pair[0]._say("2", Hostile(tmp_path / "executed", call, "w"))
    refused(pickle.UnpicklingError, "is nothing that ranks tell each other", pair[1].same, None)
    assert not (tmp_path / "executed").exists()


def test_one_rank_alone_needs_no_store():
    channel = HostChannel(Ranks(0, 1, torch.device("cpu")))
    assert channel.same("x") == "x" and channel.joined(3, lambda values: sum(values) + len(values)) == 4
