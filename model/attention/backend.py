"""The interface of backends that compute attention inside documents (`Backend`, `Documents`, `Where`), and which one
does: as configured, or the best that can run (`choose`)."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from drover.model.attention import AUTOMATIC, BACKENDS


@dataclass(frozen=True)
class Where:
    """The conditions that decide whether a backend can run.

    Attributes:
        device: of the activations.
        dtype: of queries, keys and values.
        compiled: whether the blocks run under torch.compile.
        head_dim: width of a head.
        segmented: whether queries form segments with more keys than queries (`Keys`).
    """

    device: torch.device
    dtype: torch.dtype
    compiled: bool
    head_dim: int
    segmented: bool = False


class Keys(NamedTuple):
    """The keys of segments. A segment is a part of a document: its queries are the last tokens of its keys.

    lengths: keys of each segment, at least as many as it has queries. rows: of k and v in total: those of all segments,
    then padding, which no query sees and whose gradients are not read.
    """

    lengths: tuple[int, ...]
    rows: int


class Documents:
    """The documents of one forward pass.

    A document is contiguous and ends at its row's end at the latest. If the next row begins with the same number, that
    is another document.

    Args:
        numbers: (batch, length) ints, equal inside a document and different from one to the next.
        lengths: of the documents in tokens, row after row, from the loader. None: they are read from `numbers`, and the
            host waits for the device.
        keys: given for segments. `numbers` and the queries are then one row, and `attend` gets all k and v as another
            row. None: whole documents, with a key for each query.
    """

    def __init__(self, numbers: Tensor, lengths: Sequence[int] | None = None, keys: Keys | None = None) -> None:
        self.numbers, self.given, self.keys = numbers, lengths, keys

    @property
    def key_lengths(self) -> tuple[int, ...]:
        """Keys of each document or segment."""
        return self.lengths if self.keys is None else self.keys.lengths

    @property
    def key_rows(self) -> int:
        """Keys that `attend` gets, including padding."""
        return self.numbers.numel() if self.keys is None else self.keys.rows

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each document, row after row. Raises ValueError if their sum is not batch x length."""
        result = self._read() if self.given is None else tuple(self.given)
        if sum(result) != self.numbers.numel():
            raise ValueError(f"The documents have {sum(result)} tokens together; there are {self.numbers.numel()}.")
        return result

    @property
    def begins(self) -> Tensor:
        """Whether each token is the first of its document in its row: (batch, length) bool."""
        begins = torch.ones_like(self.numbers, dtype=torch.bool)
        begins[:, 1:] = self.numbers[:, 1:] != self.numbers[:, :-1]
        return begins

    def _read(self) -> tuple[int, ...]:
        places = self.begins.flatten().nonzero().flatten().tolist()
        return tuple(after - place for place, after in zip(places, [*places[1:], self.numbers.numel()], strict=True))


class Backend(ABC):
    """A way to compute causal attention inside documents. One object serves all passes and layers: it keeps no state.

    Attributes:
        name: for messages.
        operators: torch's operators whose results `attention` in `train.kept_activations` keeps, as a TorchDispatchMode
            sees them (`torch.ops.aten.mm.default`). Without any, attention is recomputed.
        segments: whether it supports `Documents.keys`. Without, it is refused under context parallelism.
    """

    name: ClassVar[str]
    segments: ClassVar[bool] = False
    operators: ClassVar[frozenset[Any]] = frozenset()

    def refusal(self, where: Where) -> str:
        """Why it cannot run there, as the rest of a sentence; empty if it can. Includes segments."""
        return "knows no context parallelism" if where.segmented and not self.segments else self.unsupported(where)

    @abstractmethod
    def unsupported(self, where: Where) -> str:
        """Why it cannot run there, as the rest of a sentence ("needs bfloat16, not float32"); empty if it can."""

    @abstractmethod
    def prepare(self, documents: Documents, dtype: torch.dtype) -> Any:
        """Prepare the documents for `attend`. Called once in a forward pass; never inside a compiled graph.

        dtype: of queries, keys and values. torch.compile treats integers and shapes in the result as constants: one
        that changes with every batch costs a compilation each time.
        """

    def offer(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Called in each layer before its queries are computed, with k and v as for `attend`. A backend that needs
        those of other ranks starts their exchange here. Returns the k and v for `attend`."""
        return k, v

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, prepared: Any) -> Tensor:
        """Called in each layer; differentiable.

        q: (batch, length, heads, head_dim), k and v: (batch, length, kv_heads, head_dim). Each kv head is shared by
        heads / kv_heads neighbouring heads. Under tensor parallelism a rank calls it with its own heads. For segments
        the batch is 1, and the length of k and v is `Documents.key_rows`. prepared: the result of `prepare`. Returns
        the shape of q.
        """


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A host's tensor on `device`, without waiting for the GPU."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@dataclass(frozen=True)
class Choice:
    """A backend. fallback: why it is not the preferred one of `auto`, to be printed once; empty otherwise."""

    backend: Backend
    fallback: str = ""


def choose(name: str, where: Where) -> Choice:
    """The backend with this name (of BACKENDS, or "module:class"), or for `auto` the first of AUTOMATIC that can run.

    Raises ValueError, with a message for the user, for an unknown name and for a backend that cannot run there.
    """
    if name == "auto":
        return _automatic(where)
    backend = load(name)
    if lack := backend.refusal(where):
        best = _automatic(where).backend.name
        raise ValueError(f"attention '{name}' {lack}. Take auto, which is {best} here.")
    return Choice(backend)


def load(name: str) -> Backend:
    """The backend with this name, of BACKENDS or as "module:class". Raises ValueError if there is none."""
    module, _, attribute = BACKENDS.get(name, name).partition(":")
    if not attribute:
        raise ValueError(f"attention '{name}' is not known. Take auto, {', '.join(BACKENDS)}, or another class as "
                         f"module:class.")
    try:
        result = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"attention '{name}' cannot be loaded: {error}.") from error
    if not (isinstance(result, type) and issubclass(result, Backend)):
        raise ValueError(f"attention '{name}' is no class derived from drover.model.attention.backend.Backend.")
    return result()


def _automatic(where: Where) -> Choice:
    """The first backend that can run, with a fallback's reason if it is not the best one for such a device."""
    wanted = "varlen" if where.device.type == "cuda" else "by_document"
    why = ""  # the wanted one cannot run
    for name in (wanted, *(name for name in AUTOMATIC if name != wanted)):  # varlen imports torch's compiler
        backend = load(name)
        lack = backend.refusal(where)
        if not lack:
            return Choice(backend, f"{wanted} {why}, so {name} computes attention inside documents" if why else "")
        why = why or lack
    raise ValueError(f"No attention can run on {where}.")  # sdpa lacks nothing
