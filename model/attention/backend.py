"""What a way to compute attention inside documents is: `Backend`, with what it is given and asked about."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

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
        segmented: whether queries are those of segments that see more keys than their own (`Keys`).
    """

    device: torch.device
    dtype: torch.dtype
    compiled: bool
    head_dim: int
    windowed: bool = False
    segmented: bool = False


class Keys(NamedTuple):
    """The keys of segments: parts of documents whose queries are the last of what they see.

    lengths: of each segment, in keys; as many as it has queries at least. rows: of k and v in all: the segments', and
    behind them some without meaning, which nobody sees and whose gradients nobody reads.
    """

    lengths: tuple[int, ...]
    rows: int


class Documents:
    """The documents of one forward pass.

    A document lies in one piece, and ends at its row's end at the latest: a number that goes on in the next row is
    another document there.

    Args:
        numbers: (batch, length) ints, equal inside a document and different from one to the next.
        lengths: of the documents in tokens, row after row, as the loader knows them. None: they are read from
            `numbers`, for which the host waits for the device.
        window: how many tokens of its document a query sees at most, itself included; None: all before it.
        keys: these are segments; `numbers` and the queries then are one row, and `attend` is given all k and v as
            another. None: whole documents, with a key for each query.
    """

    def __init__(self, numbers: Tensor, lengths: Sequence[int] | None = None, window: int | None = None,
                 keys: Keys | None = None) -> None:
        self.numbers, self.given, self.window, self.keys = numbers, lengths, window, keys

    def within(self, window: int) -> Documents:
        """The same documents seen through a sliding window."""
        return Documents(self.numbers, self.given, window, self.keys)

    @property
    def key_lengths(self) -> tuple[int, ...]:
        """Keys of each document or segment."""
        return self.lengths if self.keys is None else self.keys.lengths

    @property
    def key_rows(self) -> int:
        """Keys that `attend` is given, with those that mean nothing."""
        return self.numbers.numel() if self.keys is None else self.keys.rows

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each document, row after row; their sum is batch x length. Raises ValueError where it is not."""
        found = self._read() if self.given is None else tuple(self.given)
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
        segments: whether it heeds `Documents.keys`. One that does not is not taken under context parallelism.
    """

    name: ClassVar[str]
    windows: ClassVar[bool] = False
    segments: ClassVar[bool] = False
    operators: ClassVar[frozenset[Any]] = frozenset()

    def refusal(self, where: Where) -> str:
        """What it `lacks` there, sliding windows and segments included."""
        if where.windowed and not self.windows:
            return "knows no sliding window"
        return "knows no context parallelism" if where.segmented and not self.segments else self.lacks(where)

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

    def offer(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Called in each layer before its queries are computed, with k and v as `attend` describes them: a backend that
        needs those of other ranks begins to exchange them. Returns what `attend` is given in their place."""
        return k, v

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, prepared: Any) -> Tensor:
        """Called in each layer; differentiable.

        q: (batch, length, heads, head_dim), k and v: (batch, length, kv_heads, head_dim), each kv head shared by
        heads / kv_heads neighbouring heads. Under tensor parallelism a rank calls it with its own heads. Of segments
        the batch is 1, and k and v have `Documents.key_rows` in their length's place. Returns the same shape as q.
        prepared: what `prepare` returned.
        """


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A host's tensor on `device`, without waiting for what a GPU is doing."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
