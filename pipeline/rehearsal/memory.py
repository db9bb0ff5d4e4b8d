"""A rank's memory by kind: a log of storages as they are allocated and freed.

A storage is one piece of memory, however many tensors are views of it. Its kind often becomes known after its
allocation (a product is a gradient once it is reduced). So the log is evaluated at the end, when every storage has its
kind.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

from drover.pipeline.core.console import readable

if TYPE_CHECKING:
    import torch
    from torch import Tensor

KINDS = ("weights", "gradients", "optimizer state", "all-gathered", "activations", "pipeline buffers", "logits")
"""weights: this rank's part of the master weights. gradients: including whole ones before their reduction.
all-gathered: weights of other ranks, in the computing precision. pipeline buffers: for hidden states and their
gradients. logits: of the output head's chunk, with their gradients. activations: the rest.
"""


@dataclass
class MemoryPiece:
    """A storage. kind: empty while it is unknown."""

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class PeakItem:
    """Equal pieces at the peak. bytes: of all `count` of them."""

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
    """The most that was held at one time. bytes: in total. kinds: bytes of each kind. items: the largest first."""

    bytes: int
    kinds: dict[str, int]
    items: tuple[PeakItem, ...]


class Memory:
    """The log. Call `hold` for each tensor. Freed and resized storages are noticed automatically."""

    def __init__(self) -> None:
        self._pieces: list[MemoryPiece] = []
        self._numbers: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._log: list[tuple[int, int]] = []

    def knows(self, tensor: Tensor) -> bool:
        """Whether the tensor's storage is in the log."""
        return tensor.untyped_storage()._cdata in self._numbers

    def hold(self, tensor: Tensor, kind: str = "") -> None:
        """Add a tensor's storage to the log, and set its kind if it has none yet."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        number = self._numbers.get(key)
        if number is not None:
            self._pieces[number].kind = self._pieces[number].kind or kind
            return
        number = self._numbers[key] = len(self._pieces)
        self._pieces.append(MemoryPiece(kind, tuple(tensor.shape), tensor.dtype))
        self._resize(number, storage.nbytes())
        weakref.finalize(storage, self._gone, key, number)

    def name(self, tensor: Tensor, kind: str) -> None:
        """Set the kind of a tensor's storage, replacing an earlier one."""
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

    def following(self) -> AbstractContextManager[object]:
        """Notice within when FSDP2 frees gathered weights: it resizes their storages to zero, without any operator."""
        import torch

        resize: Any = torch.UntypedStorage.resize_

        def followed(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if (number := self._numbers.get(storage._cdata)) is not None:
                self._resize(number, size)
            return result

        return mock.patch.object(torch.UntypedStorage, "resize_", followed)

    def peak(self) -> Peak:
        """The most that was held since the beginning, by kind and item."""
        total = most = at = 0
        for place, (_, change) in enumerate(self._log):
            total += change
            if total > most:
                most, at = total, place
        held: Counter[int] = Counter()
        for number, change in self._log[:at + 1]:
            held[number] += change
        alike = defaultdict[tuple[str, tuple[int, ...], str], list[int]](list)
        for number, size in held.items():
            if size:
                piece = self._pieces[number]
                alike[piece.kind or "activations", piece.shape, str(piece.dtype).removeprefix("torch.")].append(size)
        items = sorted((PeakItem(*key, len(own), sum(own)) for key, own in alike.items()), key=lambda item: -item.bytes)
        kinds = {kind: sum(item.bytes for item in items if item.kind == kind) for kind in KINDS}
        return Peak(most, kinds, tuple(items))
