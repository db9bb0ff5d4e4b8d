"""The channel of the hosts: a tree through the store, without a socket from every rank to every other."""

import json
import os
import zlib
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from drover.pipeline.contract.signed import SECRET, MessageError, sign
from drover.pipeline.parallel import host_channel
from drover.pipeline.parallel.host_channel import HostChannel
from drover.pipeline.parallel.messages import encode
from drover.pipeline.parallel.ranks import Ranks
from tests.conftest import run_stage
from tests.parallel.channel_case import talk
from tests.parallel.groups import run_case
from tests.refusal import refused
from tests.stages.training import train_folder


@pytest.mark.parametrize(("ranks", "arity"), [(5, 2), (5, 3), (5, 8)])
def test_what_all_say_arrives_in_order_and_nothing_is_left(ranks, arity):
    assert run_case(ranks, talk, arity=arity) == {"widest": min(arity, ranks), "left": []}


@pytest.fixture
def channel(monkeypatch):
    """That of rank 0 of two; the test plays the other one."""
    monkeypatch.setenv(SECRET, "of the start")
    monkeypatch.setattr(host_channel, "_get_default_store", dist.HashStore)
    return HostChannel(Ranks(0, 2, torch.device("cpu"), timedelta(seconds=0.1)))


def test_a_rank_that_is_not_heard_is_named(channel):
    refused(dist.DistError, "Rank 0 waited for rank 1 in the channel of the hosts.*timeout", channel.joined, 1, sum)


CONTENT = (1).to_bytes(4, "little") + zlib.compress(encode(4))


@pytest.mark.parametrize(("place", "start"), [
    ("1.1", {SECRET: ""}), ("1.1", {SECRET: "of another start"}), ("1.1", {"TORCHELASTIC_RESTART_COUNT": "7"}),
    ("2.1", {})], ids=["no secret", "another secret", "another attempt", "another message, once more"])
def test_only_this_starts_message_for_this_place_is_read(channel, place, start):
    with mock.patch.dict(os.environ, start):
        channel._store.set("1.1", sign(f"{channel._name}/{place}", CONTENT))
    refused(MessageError, r"The message drover/hosts\d+/1.1 in the ranks' store is refused: its signature is wrong",
            channel.joined, 1, sum)
    channel._store.set("2.1", CONTENT)
    refused(MessageError, "its signature is wrong", channel.joined, 1, sum)
    channel._store.set("3.1", sign(f"{channel._name}/3.1", CONTENT))
    assert channel.joined(1, sum) == 5


@pytest.mark.slow
def test_a_step_has_one_sum_of_votes_and_one_of_loss_and_norm(fresh):
    """However many weights and ranks there are; a comparison of replicas has one more. The saves after the second and
    fourth step are written during the next ones, and what ranks say of them goes through the channel."""
    run_stage("train", fresh, "train.hooks=[tests.parallel.channel_case:Counting]", "train.steps=6",
              "train.validation_every=6", "train.sample_every=6", "train.checkpoint.every_steps=2",
              "train.guards.replica_hash_every=3", "parallel.dp_replicate=2", "parallel.tp=2", ranks=4)
    steps = json.loads((train_folder(fresh) / "calls.json").read_text())
    assert steps[2] == ["all_reduce"] * 3 and steps[4] == ["all_reduce"] * 2


def test_one_rank_alone_needs_no_store():
    channel = HostChannel(Ranks(0, 1, torch.device("cpu")))
    assert channel.same("x") == "x" and channel.joined(3, lambda values: sum(values) + len(values)) == 4
