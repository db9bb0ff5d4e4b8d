"""What each rank does in the tests of the hosts' channel."""

import os
import re
import zlib
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

from drover.pipeline.contract.signed import SECRET, MessageError, sign
from drover.pipeline.core.errors import UserError
from drover.pipeline.parallel import host_channel
from drover.pipeline.parallel.host_channel import HostChannel
from drover.pipeline.parallel.messages import encode
from drover.pipeline.parallel.ranks import Ranks


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


def signed(ranks):
    """What rank 0 makes of what rank 1 puts into the store: with another secret, with its own, and with none."""
    channel, found, kept = HostChannel(ranks), {}, b""
    with mock.patch.dict(os.environ, {SECRET: "of the start"}):
        for number, how in enumerate(("no secret", "another", "the same", "again", "unsigned", "another attempt"), 1):
            key = f"{number}.1"
            if ranks.leads:
                try:
                    found[how] = str(channel.joined(1, sum))
                except MessageError as error:
                    found[how] = re.sub(r"hosts\d+", "hostsN", str(error).partition(". Either")[0])
            elif how == "again":
                channel._store.set(key, kept)
            elif how == "unsigned":
                channel._store.set(key, zlib.compress(encode(4)))
            else:
                other = {"no secret": {SECRET: ""}, "another": {SECRET: "of another start"},
                         "another attempt": {"TORCHELASTIC_RESTART_COUNT": "7"}}.get(how, {})
                with mock.patch.dict(os.environ, other):
                    kept = sign(f"{channel._name}/{key}", (1).to_bytes(4, "little") + zlib.compress(encode(4)))
                channel._store.set(key, kept)
    ranks.barrier()
    return found


@contextmanager
def counted():
    """The names of torch's collectives that are called over all ranks; FSDP2's are of groups of the mesh."""
    called = []

    def calling(name, collective):
        def call(*given, **named):
            if named.get("group") is None or name == "new_group":
                called.append(name)
            return collective(*given, **named)
        return call
    names = ("all_reduce", "barrier", "new_group", "broadcast", "all_gather", "gather", "send", "recv")
    with mock.patch.multiple(dist, **{name: calling(name, getattr(dist, name)) for name in names}):
        yield called


def collectives_of_a_step(ranks, parallel, folder):
    """What a step calls over all ranks, after the first of an attempt: by part of the loop."""
    from drover.pipeline.config.parallel import ParallelConfig
    from drover.pipeline.config.training import TrainConfig
    from drover.pipeline.config.tree import Config
    from drover.pipeline.data.exclusion import Excluded
    from drover.pipeline.data.sampling.batch import pack
    from drover.pipeline.parallel.grid import Grid
    from drover.pipeline.parallel.initial_values import drawn
    from drover.pipeline.records.checkpoints import TrainingProgress
    from drover.pipeline.training.data.token_check import TokenCheck
    from drover.pipeline.training.engines.build import build_engine
    from drover.pipeline.training.guards import StepLimits
    from drover.pipeline.training.housekeeping import Saving
    from drover.pipeline.training.loop import Loop
    from drover.pipeline.training.precision import DTYPES
    from drover.pipeline.training.replicas import ReplicaCheck
    from drover.pipeline.training.stop_agreement import StopAgreement
    from tests.parallel.train_steps import model_of, windows
    session, found = Loop.__new__(Loop), {}
    session.config = config = Config(model=model_of(), parallel=ParallelConfig(**parallel),
                                     train=TrainConfig(precision="fp32", compile=False))
    session.ranks, session.grid = ranks, Grid(ranks, config.parallel)
    session.saver = SimpleNamespace(failed=False, last_save=0.0, settle=lambda: None)
    tokens = TokenCheck.__new__(TokenCheck)
    tokens._checks = SimpleNamespace(use=lambda *given: None, damage=None, checked=1.0)
    session.progress, session.batch = TrainingProgress(), SimpleNamespace(sequences=4)
    session.hooks = [Saving(None), tokens, StopAgreement(ranks, Path(folder), None, 0.0)]
    engine = build_engine(config, config.model, session.grid, DTYPES["fp32"], 2, drawn(config.model, 0))
    replicas = ReplicaCheck(ranks, [str(rank) for rank in range(ranks.world)], 1)
    session.guards = SimpleNamespace(excluded=Excluded())
    for step in range(3):
        batch = pack(windows(step)[:4])
        with counted() as found["agree"]:
            targets, _ = session._agree(batch)
        with counted() as found["step"]:
            engine.step(batch.split(2), 2, targets, 1e-3, StepLimits())
        with counted() as found["replicas"]:
            replicas.compare(engine, step)
    with torch.no_grad():  # on one rank: then they tell what they hold
        weight = next(engine.replicated_weights()).tensor
        weight.view(-1)[0] += float(ranks.leads)
    try:
        replicas.compare(engine, 3)
    except UserError as error:
        found["differ"] = str(error)
    return found


def collectives_of_a_save(ranks, folder):
    """Which of torch's collectives the ranks call while a checkpoint is saved."""
    from drover.pipeline.config.training import CheckpointConfig
    from drover.pipeline.formats.sharded_tensors import CheckpointReader, TensorShard
    from drover.pipeline.records.checkpoints import TrainingProgress
    from drover.pipeline.training.async_saver import AsyncSaver
    from drover.pipeline.training.checkpoint import Checkpoints
    checkpoints = Checkpoints(Path(folder), ranks, lambda text: None)
    with counted() as called:
        saver = AsyncSaver(checkpoints, ranks, CheckpointConfig(), {}, lambda text: None, lambda *_, **more: None)
        mine = TensorShard(torch.full((2, 3), float(ranks.rank)), (2 * ranks.rank, 0), (2 * ranks.world, 3))
        saver.save({"model.w": [mine]}, TrainingProgress(step=1))
        saver.wait()
    ranks.barrier()
    with CheckpointReader(checkpoints.path(1)) as reader:
        rows, generators = reader.read("model.w")[:, 0].tolist(), reader.shape("random.cpu")
    return {"called": called, "rows": rows, "generators": generators[0],
            "files": sorted(path.name for path in checkpoints.path(1).iterdir())}
