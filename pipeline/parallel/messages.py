"""Messages between ranks as bytes: plain values, numpy arrays, and the records and errors of one table.

A message is the length of a JSON text, that text, and the content of its bytes and arrays. An object {"!kind": [...]}
in the text represents a value that JSON does not have. `decode` creates nothing else, even from a forged message.
"""

from __future__ import annotations

import errno
import importlib
import io
import json
import struct
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from drover.pipeline.contract.signed import MessageError
from drover.pipeline.core.errors import UserError

MADE = {"Index": "drover.pipeline.formats.sharded_tensors", "Entry": "drover.pipeline.formats.sharded_tensors",
        "Rollback": "drover.pipeline.records.metrics", "Marker": "drover.pipeline.records.checkpoints",
        "TrainingProgress": "drover.pipeline.records.checkpoints",
        "DamagedTokensError": "drover.pipeline.training.data",
        "ShardTable": "drover.pipeline.data.token_shards", "Chosen": "drover.pipeline.data.token_shards",
        "ValidationText": "drover.pipeline.evaluation.bits_per_byte",
        "DamagedCopyError": "drover.pipeline.storage.mirror",
        "UserError": "drover.pipeline.core.errors", "OSError": "builtins", "RuntimeError": "builtins"}
"""The classes of records and errors that ranks send each other, and the module of each."""
_LENGTH, _NUMBERS = struct.Struct("<Q"), "biuf"


def encode(value: Any) -> bytes:
    """A value as bytes. Errors are encoded as `portable` makes them, numpy's numbers as Python's.

    Raises:
        TypeError: the value is, or contains, something that ranks do not send each other.
    """
    parts = list[bytes]()
    text = json.dumps(_plain(value, parts), ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    return b"".join([_LENGTH.pack(len(text)), text, *parts])


def decode(message: bytes, sender: str) -> Any:
    """The value that `encode` turned into bytes.

    Raises:
        MessageError: the bytes are not from `encode`.
    """
    try:
        parts = io.BytesIO(message)
        text = _read(parts, *_LENGTH.unpack(parts.read(_LENGTH.size)))
        value = json.loads(text.decode("utf-8", "surrogatepass"), object_hook=partial(_value, parts))
        if parts.read(1):
            raise ValueError("there are more bytes than the message announces")
        return value
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError, struct.error) as error:
        raise MessageError(f"The message from {sender} cannot be read ({type(error).__name__}: {error}). Either that "
                           f"process runs other code, or something else wrote the message.") from error


def portable(error: Exception, place: object = "") -> Exception:
    """An error as other ranks get it: an OSError keeps its number (a user can fix a full disk), other errors their
    text.

    place: the path, for an OSError that names none.
    """
    if isinstance(error, OSError):
        return OSError(error.errno or errno.EIO, error.strerror or str(error), str(error.filename or place))
    if MADE.get(type(error).__name__) == type(error).__module__:
        return error
    return UserError(str(error)) if isinstance(error, UserError) else RuntimeError(f"{type(error).__name__}: {error}")


def _plain(value: Any, parts: list[bytes]) -> Any:
    """A value as JSON; the content of bytes and arrays goes to `parts`."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (list, tuple):
        held = [_plain(one, parts) for one in value]
        return held if kind is list else {"!tuple": held}
    if kind is dict:
        if all(type(key) is str and key[:1] != "!" for key in value):
            return {key: _plain(one, parts) for key, one in value.items()}
        return {"!dict": [[_plain(key, parts), _plain(one, parts)] for key, one in value.items()]}
    if isinstance(value, Path):
        return {"!path": [str(value)]}
    if kind is bytes:
        parts.append(value)
        return {"!bytes": [len(value)]}
    if isinstance(value, np.ndarray) and value.dtype.kind in _NUMBERS:
        parts.append(value.tobytes())
        return {"!array": [value.nbytes, value.dtype.str, *value.shape]}
    if isinstance(value, np.generic) and type(value.item()) is not kind:
        return _plain(value.item(), parts)
    if isinstance(value, Exception):
        error = portable(value)
        given = [error.errno, error.strerror, error.filename] if isinstance(error, OSError) else [str(error)]
        return {f"!{'OSError' if isinstance(error, OSError) else type(error).__name__}": given}
    if MADE.get(kind.__name__) == kind.__module__:
        return {f"!{kind.__name__}": [_plain(getattr(value, name), parts) for name in kind.__match_args__]}
    raise TypeError(f"{kind.__module__}.{kind.__name__} cannot be sent to other ranks. Is it missing in MADE?")


def _value(parts: io.BytesIO, value: Mapping[str, Any]) -> Any:
    """The value that an object of the text represents. Its contents are decoded already."""
    name = next(iter(value), "")
    if name[:1] != "!":
        return value
    given = value[name]
    match name[1:]:
        case "tuple":
            return tuple(given)
        case "dict":
            return dict(given)
        case "path":
            return Path(*given)
        case "bytes":
            return _read(parts, *given)
        case "array" if np.dtype(given[1]).kind in _NUMBERS:
            return np.frombuffer(bytearray(_read(parts, given[0])), given[1]).reshape(given[2:])
        case kind:
            return getattr(importlib.import_module(MADE[kind]), kind)(*given)


def _read(parts: io.BytesIO, size: int) -> bytes:
    if len(result := parts.read(size)) != size:
        raise ValueError(f"of {size} bytes there are {len(result)}")
    return result
