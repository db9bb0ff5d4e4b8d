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
    found = (path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
    return sum(str(name).startswith("socket:") for name in found)


def talk(ranks, arity):
    """Values of all ranks joined, rank 0's told, long ones too; what was left in the store, and sockets opened."""
    before = sockets()
    with mock.patch.object(host_channel, "ARITY", arity), mock.patch.object(host_channel, "MOST_BYTES", 1000):
        channel, widest = HostChannel(ranks), []

        def join(lists):
            widest.append(len(lists))
            return [value for part in lists for value in part]
        told = [channel.same(("go", ranks.rank))]
        joined = [channel.joined([(ranks.rank, os.urandom(5000 * ranks.rank))], join)]
        told.append(channel.same(joined[0]))
        joined.append(channel.joined([ranks.rank], join))
        opened = sockets() - before
        everyone = ranks.gather((told, opened, max(widest, default=0)))
    left = [key for key in channel._store.list_keys() if "drover/hosts" in key] if ranks.world > 1 else []
    ranks.barrier()
    return {"joined": [[rank if isinstance(rank, int) else rank[0] for rank in found or ()] for found in joined],
            "alike": all(one[0] == everyone[0][0] for one in everyone), "first": told[0],
            "opened": max(one[1] for one in everyone), "widest": max(one[2] for one in everyone), "left": left}


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
        if loop.ranks.leads:
            (loop.work.folder / "calls.json").write_text(json.dumps(self.steps))
