"""What each rank does in the tests of the hosts' channel."""

import os
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from pipeline.parallel import host_channel
from pipeline.parallel.host_channel import HostChannel
from pipeline.parallel.ranks import Ranks


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


def never_heard(ranks):
    """What rank 0 says where rank 1 does not come."""
    patient = Ranks(ranks.rank, ranks.world, ranks.device, timedelta(seconds=1))
    channel, said = HostChannel(patient), ""
    if ranks.leads:
        try:
            channel.joined(1, sum)
        except dist.DistError as error:
            said = str(error)
    ranks.barrier()
    return {"said": said}


def collectives_of_a_save(ranks, folder):
    """Which of torch's collectives the ranks call while a checkpoint is saved."""
    from pipeline.config.training import CheckpointConfig
    from pipeline.formats.sharded_tensors import CheckpointReader, TensorShard
    from pipeline.records.checkpoints import TrainingProgress
    from pipeline.training.async_saver import AsyncSaver
    from pipeline.training.checkpoint import Checkpoints
    called = []
    names = ("all_reduce", "all_gather_object", "gather_object", "broadcast_object_list", "barrier", "new_group",
             "broadcast", "all_gather", "gather", "send", "recv")

    def counted(name, collective):
        def call(*given, **named):
            called.append(name)
            return collective(*given, **named)
        return call
    checkpoints = Checkpoints(Path(folder), ranks, lambda text: None)
    with mock.patch.multiple(dist, **{name: counted(name, getattr(dist, name)) for name in names}):
        saver = AsyncSaver(checkpoints, ranks, CheckpointConfig(), {}, lambda text: None)
        mine = TensorShard(torch.full((2, 3), float(ranks.rank)), (2 * ranks.rank, 0), (2 * ranks.world, 3))
        saver.save({"model.w": [mine]}, TrainingProgress(step=1))
        saver.wait()
    ranks.barrier()
    with CheckpointReader(checkpoints.path(1)) as reader:
        rows, generators = reader.read("model.w")[:, 0].tolist(), reader.shape("random.cpu")
    return {"called": called, "rows": rows, "generators": generators[0],
            "files": sorted(path.name for path in checkpoints.path(1).iterdir())}
