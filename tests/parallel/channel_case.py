"""What each rank does in the tests of the channel between hosts, and of the collectives of a step."""

import json
import os
from pathlib import Path
from unittest import mock

from drover.pipeline.parallel import host_channel
from drover.pipeline.parallel.host_channel import HostChannel
from drover.pipeline.training.hooks import Hook, HookSettings
from tests.parallel.train_steps import called


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


OVER_ALL = ("all_reduce", "barrier", "new_group", "broadcast", "all_gather", "gather", "send", "recv")


class Counting(HookSettings):
    """As `train.hooks`: notes which of torch's collectives rank 0 calls over all ranks, step by step."""

    def open(self, loop):
        return Calls(loop)


class Calls(Hook):
    def __init__(self, loop):
        self.steps = []

    def on_start(self, loop):
        self.watching = called(*OVER_ALL)
        self.seen = self.watching.__enter__()

    def after_step(self, loop):
        self.steps.append([name for name, group in self.seen if group is None])
        self.seen.clear()
        if loop.ranks.is_rank_zero:
            (loop.work.folder / "calls.json").write_text(json.dumps(self.steps))
