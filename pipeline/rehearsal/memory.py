"""What lies in a rank's memory, by kind: a log of storages as they come and go, sorted once all is known.

A storage is one piece of memory, whatever tensors look at it. Its kind often shows later than it is made (a product is
a gradient once it is reduced), so the log is gone through at the end, when every storage has its kind.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

from drover.pipeline.core.console import readable

if TYPE_CHECKING:
    import torch
    from torch import Tensor

KINDS = ("weights", "gradients", "moments", "gathered", "activations", "received", "logits")
"""weights: this rank's part of the masters. gradients: also whole ones that wait to be reduced. moments: the
optimizer's states. gathered: weights of other ranks, in the computing precision. received: what a pipeline keeps room
for, hidden states and their gradients. logits: of the output head's chunk, with their gradients. activations: all else.
"""


@dataclass
class Piece:
    """A storage. kind: empty while nothing says so; first, last: of the log, between which it is there."""

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Item:
    """Pieces that are alike, at the peak. bytes: of all `count` of them."""

    kind: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    bytes: int

    def __str__(self) -> str:
        shape = " x ".join(map(str, self.shape)) or "1"
        return f"{self.kind}, {self.count} x ({shape}) in {self.dtype}, {readable(self.bytes)}"


@dataclass(frozen=True)
class Peak:
    """The most that was held at a time. bytes: in all. kinds: of each kind then. items: the largest first."""

    bytes: int
    kinds: dict[str, int]
    items: tuple[Item, ...]


class Memory:
    """The log. `hold` tells it of tensors; that a storage is gone, or has another size, it sees by itself."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._numbers: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._log: list[tuple[int, int]] = []

    def knows(self, tensor: Tensor) -> bool:
        """Whether its storage is noted."""
        return tensor.untyped_storage()._cdata in self._numbers

    def hold(self, tensor: Tensor, kind: str = "") -> None:
        """Note a tensor's storage, and its kind where it has none yet."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        number = self._numbers.get(key)
        if number is not None:
            self._pieces[number].kind = self._pieces[number].kind or kind
            return
        number = self._numbers[key] = len(self._pieces)
        self._pieces.append(Piece(kind, tuple(tensor.shape), tensor.dtype))
        self._resize(number, storage.nbytes())
        weakref.finalize(storage, self._gone, key, number)

    def name(self, tensor: Tensor, kind: str) -> None:
        """Say of what kind a tensor's storage is, whatever was said before."""
        self.hold(tensor)
        self._pieces[self._numbers[tensor.untyped_storage()._cdata]].kind = kind

    def _resize(self, number: int, size: int) -> None:
        if change := size - self._sizes.get(number, 0):
            self._sizes[number] = size
            self._log.append((number, change))

    def _gone(self, key: int, number: int) -> None:
        self._resize(number, 0)
        if self._numbers.get(key) == number:
            del self._numbers[key]

    @contextmanager
    def following(self) -> Iterator[None]:
        """While FSDP2 lets go of gathered weights by giving their storages no size, which no operator does."""
        import torch

        resize: Any = torch.UntypedStorage.resize_
        memory = self

        def followed(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if (number := memory._numbers.get(storage._cdata)) is not None:
                memory._resize(number, size)
            return result

        with mock.patch.object(torch.UntypedStorage, "resize_", followed):
            yield

    def peak(self) -> Peak:
        """The most that was held since the beginning, and of what."""
        total = most = at = 0
        for place, (_, change) in enumerate(self._log):
            total += change
            if total > most:
                most, at = total, place
        held: Counter[int] = Counter()
        for number, change in self._log[:at + 1]:
            held[number] += change
        kinds = dict.fromkeys(KINDS, 0)
        alike: dict[tuple[str, tuple[int, ...], str], tuple[int, int]] = {}
        for number, size in held.items():
            if not size:
                continue
            piece = self._pieces[number]
            kind = piece.kind or "activations"
            kinds[kind] += size
            key = (kind, piece.shape, str(piece.dtype).removeprefix("torch."))
            count, before = alike.get(key, (0, 0))
            alike[key] = (count + 1, before + size)
        items = sorted((Item(*key, *found) for key, found in alike.items()), key=lambda item: -item.bytes)
        return Peak(most, kinds, tuple(items))
