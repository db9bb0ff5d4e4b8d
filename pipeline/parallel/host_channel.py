"""A channel between the hosts' processes for a thread that talks while training does: through the store in which ranks
found each other, over the connection that a rank has to it, without a group of its own.

A second process group beside NCCL's would be one of sockets, from every rank to every other (gloo): beyond some ten
thousand ranks starts fail for it (Megatron-LM's pull request 1006), and it would be made for a few messages a save.
Messages to rank 0 go up a tree and are joined on the way, so that no rank holds what all have said, and the store keeps
nothing of them.
"""

from __future__ import annotations

import itertools
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from drover.pipeline.contract.signed import sign, verified
from drover.pipeline.parallel.messages import decode, encode
from drover.pipeline.parallel.ranks import Ranks

T = TypeVar("T")
ARITY = 8
"""A rank of the tree hears so many: those of a node, most often."""
MOST_BYTES = 4 << 20
"""Of a message that is sent in one; torch's store takes 8 MiB."""
FIRST_LOOK_S, LONGEST_S, SHARE = 0.01, 5.0, 0.1
"""Seconds between two looks for a message: a share of the time that it has been waited for, within these."""

_numbers = itertools.count()


class HostChannel:
    """Every method is called on all ranks alike, and in the same order. For one thread.

    store: that all ranks have; by default the one in which they found each other.

    Raises:
        DistError: a rank was not heard for as long as `ranks.patience`, or the store is gone. Nothing more comes
            through the channel then.
        MessageError: what stands in the store was not told by a rank of this start.
    """

    def __init__(self, ranks: Ranks, store: Any = None) -> None:
        self.ranks, self._done, self._said = ranks, 0, list[str]()
        if ranks.world > 1:
            self._name = f"drover/hosts{next(_numbers)}"
            self._store: Any = dist.PrefixStore(self._name, store or _get_default_store())

    def same(self, value: T) -> T:
        """Rank 0's value, on every rank. What values may be: `messages`."""
        if self.ranks.world == 1:
            return value
        self._done += 1
        name = f"{self._done}"
        if not self.ranks.leads:
            found: T = self._hear(name, 0)
            return found
        self._said += self._say(name, value)
        return value

    def joined(self, value: T, join: Callable[[Sequence[T]], T]) -> T | None:
        """The values of all ranks as one, on rank 0; None elsewhere.

        join: of the values of neighbouring ranks, in order. It must not raise: others wait for what comes of it.
        """
        if self.ranks.world == 1:
            return join([value])
        self._done += 1
        rank, size = self.ranks.rank, 1
        while size < self.ranks.world:
            if rank % (size * ARITY):
                self._say(f"{self._done}.{rank}", value)
                return None
            others = range(rank + size, min(rank + size * ARITY, self.ranks.world), size)
            heard = [self._hear(f"{self._done}.{other}", other, forget=True) for other in others]
            value, size = join([value, *heard]), size * ARITY
        for key in self._said:  # what was told to all before: they have all heard it, or they had not answered
            self._store.delete_key(key)
        self._said = []
        return value

    def _say(self, name: str, value: Any) -> list[str]:
        """Leave a value in the store; its keys there."""
        data = zlib.compress(encode(value), 1)
        parts = [data[at:at + MOST_BYTES] for at in range(0, len(data), MOST_BYTES)]
        keys = [name, *(f"{name}+{number}" for number in range(1, len(parts)))]
        try:
            for key, part in zip(keys[1:], parts[1:], strict=True):
                self._set(key, part)
            self._set(name, len(keys).to_bytes(4, "little") + parts[0])  # last: who waits, waits for this one
        except dist.DistError as error:
            raise type(error)(f"Rank {self.ranks.rank} could not leave a message in the channel of the hosts, which "
                              f"saves of checkpoints use and whose store rank 0 has: {error}") from error
        return keys

    def _hear(self, name: str, rank: int, *, forget: bool = False) -> Any:
        """What a rank has left; forget: nobody else will ask for it."""
        try:
            self._wait(name)
            first = self._get(name)
            count = int.from_bytes(first[:4], "little")
            keys = [name, *(f"{name}+{number}" for number in range(1, count))]
            parts = [first[4:], *map(self._get, keys[1:])]
            for key in keys if forget else ():
                self._store.delete_key(key)
        except dist.DistError as error:
            raise type(error)(f"Rank {self.ranks.rank} waited for rank {rank} in the channel of the hosts, which saves "
                              f"of checkpoints use, in vain: {error}") from error
        return decode(zlib.decompress(b"".join(parts)), f"rank {rank}")

    def _wait(self, key: str) -> None:
        """Until it is there. Not in one call: that would keep the other threads of this rank from the store."""
        began, patience_s = time.monotonic(), self.ranks.patience.total_seconds()
        while not self._store.check([key]):
            waited = time.monotonic() - began
            if waited > patience_s:
                raise dist.DistStoreError(f"timeout after {waited:.0f} s")
            time.sleep(min(LONGEST_S, max(FIRST_LOOK_S, SHARE * waited)))

    def _set(self, key: str, content: bytes) -> None:
        self._store.set(key, sign(f"{self._name}/{key}", content))

    def _get(self, key: str) -> bytes:
        return verified(f"{self._name}/{key}", self._store.get(key))
