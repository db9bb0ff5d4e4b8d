"""The channel of the hosts: a tree through the store, without a socket from every rank to every other."""

import os
import zlib
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from drover.pipeline.contract.signed import SECRET, MessageError, sign
from drover.pipeline.parallel import host_channel
from drover.pipeline.parallel.host_channel import HostChannel
from drover.pipeline.parallel.messages import encode
from drover.pipeline.parallel.ranks import Ranks
from tests.parallel.groups import run_case
from tests.refusal import refused


def sockets():
    """How many this process has open."""
    result = (path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
    return sum(str(name).startswith("socket:") for name in result)


def talk(ranks, arity):
    """Asserts on each rank that all hear what rank 0 says, that it hears all in order, long values too, and that nobody
    opens a socket. The most values that were joined at once, and what was left in the store."""
    before = sockets()
    with mock.patch.object(host_channel, "ARITY", arity), mock.patch.object(host_channel, "MOST_BYTES", 1000):
        channel, widest = HostChannel(ranks), []

        def join(lists):
            widest.append(len(lists))
            return [value for part in lists for value in part]
        assert channel.same(("go", ranks.rank)) == ("go", 0)
        long = channel.joined([(ranks.rank, os.urandom(5000 * ranks.rank))], join)
        heard, short = channel.same(long), channel.joined([ranks.rank], join)
        assert sockets() <= before, "a rank has its connection to the store already"
        everyone = ranks.gather((heard, max(widest, default=0)))
    if ranks.is_rank_zero:
        assert [rank for rank, _ in long] == short == list(range(ranks.world))
        assert all(value == long for value, _ in everyone)
    left = [key for key in channel._store.list_keys() if "drover/hosts" in key]
    ranks.barrier()
    return {"widest": max(most for _, most in everyone), "left": left}


@pytest.mark.parametrize(("ranks", "arity"), [(5, 2), (5, 8)])
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


def test_one_rank_alone_needs_no_store():
    channel = HostChannel(Ranks(0, 1, torch.device("cpu")))
    assert channel.same("x") == "x" and channel.joined(3, lambda values: sum(values) + len(values)) == 4
