"""Which backend computes attention: as configured, or the best that can run."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from drover.model.attention import AUTOMATIC, BACKENDS
from drover.model.attention.backend import Backend, Where


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
