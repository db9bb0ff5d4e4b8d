"""The channel of the hosts: a tree through the store, without a socket from every rank to every other."""

import json

import pytest
import torch

from drover.pipeline.parallel.host_channel import HostChannel
from drover.pipeline.parallel.ranks import Ranks
from tests.conftest import run_stage
from tests.parallel.groups import run_case
from tests.stages.training import train_folder


@pytest.mark.parametrize(("ranks", "arity"), [(5, 2), (5, 3), (5, 8)])
def test_what_all_say_arrives_in_order_and_nothing_is_left(ranks, arity):
    found = run_case(ranks, "channel", {"body": "tests.parallel.channel_case:talk", "arity": arity})
    assert found["joined"] == [list(range(ranks))] * 2 and found["alike"] and found["first"] == ("go", 0)
    assert found["opened"] == 0, "a rank has its connection to the store already"
    assert found["widest"] == min(arity, ranks) and found["left"] == []


def test_a_rank_that_is_not_heard_is_named():
    found = run_case(5, "channel", {"body": "tests.parallel.channel_case:never_heard"})
    assert "Rank 0 waited for rank 1 in the channel of the hosts" in found["said"] and "timeout" in found["said"]


def test_a_step_has_one_sum_of_votes_and_one_of_loss_and_norm(fresh):
    """However many weights and ranks there are; a comparison of replicas has one more. The saves after the second and
    fourth step are written during the next ones, and what ranks say of them goes through the channel."""
    run_stage("train", fresh, "train.hooks=[tests.parallel.channel_case:Counting]", "train.steps=6",
              "train.heldout_every=6", "train.sample_every=6", "train.checkpoint.every_steps=2",
              "train.guards.replica_hash_every=3", "parallel.dp_replicate=2", "parallel.tp=2", ranks=4)
    steps = json.loads((train_folder(fresh) / "calls.json").read_text())
    assert steps[2] == ["all_reduce"] * 3 and steps[4] == ["all_reduce"] * 2


def test_who_has_not_the_secret_of_the_start_is_not_heard():
    """Nor is what the others have said, once more in another place."""
    found = run_case(2, "channel", {"body": "tests.parallel.channel_case:signed"})
    refused = {how: f"The message drover/hostsN/{number}.1 in the ranks' store is refused: its signature is wrong"
               for number, how in enumerate(("no secret", "another", "the same", "again", "unsigned",
                                             "another attempt"), 1)}
    assert found == {**refused, "the same": "5"}


def test_one_rank_alone_needs_no_store():
    channel = HostChannel(Ranks(0, 1, torch.device("cpu")))
    assert channel.same("x") == "x" and channel.joined(3, lambda values: sum(values) + len(values)) == 4
