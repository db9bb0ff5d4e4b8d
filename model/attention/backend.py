"""What a way to compute attention inside documents is: `Backend`, with what it is given and asked about."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class Where:
    """What decides whether a backend can run.

    Attributes:
        device: of the activations.
        dtype: of queries, keys and values.
        compiled: whether the blocks run under torch.compile.
        head_dim: width of a head.
        windowed: whether any layer has a sliding window.
    """

    device: torch.device
    dtype: torch.dtype
    compiled: bool
    head_dim: int
    windowed: bool = False


class Documents:
    """The documents of one forward pass.

    A document lies in one piece, and ends at its row's end at the latest: a number that goes on in the next row is
    another document there.

    Args:
        numbers: (batch, length) ints, equal inside a document and different from one to the next.
        lengths: of the documents in tokens, row after row, as the loader knows them. None: they are read from
            `numbers`, for which the host waits for the device.
        window: how many tokens of its document a query sees at most, itself included; None: all before it.
    """

    def __init__(self, numbers: Tensor, lengths: Sequence[int] | None = None, window: int | None = None) -> None:
        self.numbers, self.window = numbers, window
        self._lengths = lengths

    def within(self, window: int) -> Documents:
        """The same documents seen through a sliding window."""
        return Documents(self.numbers, self._lengths, window)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each document, row after row; their sum is batch x length. Raises ValueError where it is not."""
        found = self._read() if self._lengths is None else tuple(self._lengths)
        if sum(found) != self.numbers.numel():
            raise ValueError(f"The documents have {sum(found)} tokens together; there are {self.numbers.numel()}.")
        return found

    def _read(self) -> tuple[int, ...]:
        begins = torch.ones_like(self.numbers, dtype=torch.bool)
        begins[:, 1:] = self.numbers[:, 1:] != self.numbers[:, :-1]
        places = begins.flatten().nonzero().flatten().tolist()
        return tuple(after - place for place, after in zip(places, [*places[1:], self.numbers.numel()], strict=True))


class Backend(ABC):
    """A way to compute causal attention inside documents. One object serves all passes and layers: it keeps no state.

    Attributes:
        name: for messages.
        operators: those of torch whose results `attention` in `train.kept_activations` keeps, as a
            TorchDispatchMode sees them (`torch.ops.aten.mm.default`). Without them it is computed again.
        windows: whether it heeds `Documents.window`. One that does not is not taken for a model with sliding windows.
    """

    name: ClassVar[str]
    windows: ClassVar[bool] = False
    operators: ClassVar[frozenset[Any]] = frozenset()

    def refusal(self, where: Where) -> str:
        """What it `lacks` there, sliding windows included."""
        return "knows no sliding window" if where.windowed and not self.windows else self.lacks(where)

    @abstractmethod
    def lacks(self, where: Where) -> str:
        """Why it cannot run there, as the rest of a sentence ("needs bfloat16, not float32"); empty where it can."""

    @abstractmethod
    def prepare(self, documents: Documents, dtype: torch.dtype) -> Any:
        """What `attend` needs to know of the documents. Called once in a forward pass, and once more for layers with a
        sliding window; never under torch.compile.

        dtype: of queries, keys and values. Under torch.compile whole numbers and shapes in the result are compiled in:
        one that changes with every batch costs a compilation each time.
        """

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, prepared: Any) -> Tensor:
        """Called in each layer; differentiable.

        q: (batch, length, heads, head_dim), k and v: (batch, length, kv_heads, head_dim), each kv head shared by
        heads / kv_heads neighbouring heads. Under tensor parallelism a rank calls it with its own heads. Returns the
        same shape as q. prepared: what `prepare` returned.
        """
