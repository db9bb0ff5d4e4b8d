"""What ranks tell each other, as bytes: plain values, numpy arrays, and the records and errors of one table.

A message is the length of a JSON text, that text, and the content of its bytes and arrays. In the text an object is a
dict whose keys are texts, and a list is [kind, ...] for all that JSON does not know. Whoever reads makes nothing else
of it, whoever has written it.
"""

from __future__ import annotations

import errno
import importlib
import io
import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.errors import UserError
from pipeline.signed import MessageError

MADE = {"Index": "pipeline.formats.shard_index", "Entry": "pipeline.formats.shard_index",
        "Run": "pipeline.formats.shard_index", "Job": "pipeline.training.copies.copier",
        "Rollback": "pipeline.records.rollbacks", "Damage": "pipeline.data.sampling.shard_checks",
        "ShardTable": "pipeline.data.shard_table", "Chosen": "pipeline.data.chosen_documents",
        "HeldoutText": "pipeline.evaluation.bits_per_byte", "DamagedCopyError": "pipeline.copies.transfer",
        "UserError": "pipeline.errors", "OSError": "builtins", "RuntimeError": "builtins"}
"""The classes of records and errors that ranks tell each other, and the module of each."""
_LENGTH, _NUMBERS = struct.Struct("<Q"), "biuf"


def encode(value: Any) -> bytes:
    """A value as bytes. An error is told as `portable` has it, a number of numpy's as Python's.

    Raises:
        TypeError: the value is, or holds, something that ranks do not tell each other.
    """
    parts = list[bytes]()
    text = json.dumps(_plain(value, parts), ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    return b"".join([_LENGTH.pack(len(text)), text, *parts])


def decode(message: bytes, sender: str) -> Any:
    """The value that `encode` made bytes of.

    Raises:
        MessageError: it did not make these.
    """
    try:
        parts = io.BytesIO(message)
        text = _read(parts, *_LENGTH.unpack(parts.read(_LENGTH.size)))
        value = _value(json.loads(text.decode("utf-8", "surrogatepass")), parts)
        if parts.read(1):
            raise ValueError("there is more than the message says")
        return value
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError, struct.error) as error:
        raise MessageError(f"What {sender} has told is no message between ranks ({type(error).__name__}: {error}). "
                           f"Either it runs other code, or somebody else has written it.") from error


def portable(error: Exception, place: object = "") -> Exception:
    """An error as other ranks are told: an OSError keeps its number (a full disk is the user's to mend), the rest its
    text.

    place: where it happened, for an OSError that does not say.
    """
    if isinstance(error, OSError):
        return OSError(error.errno or errno.EIO, error.strerror or str(error), str(error.filename or place))
    if MADE.get(type(error).__name__) == type(error).__module__:
        return error
    return UserError(str(error)) if isinstance(error, UserError) else RuntimeError(f"{type(error).__name__}: {error}")


def _plain(value: Any, parts: list[bytes]) -> Any:
    """What JSON holds of a value; the rest goes to `parts`."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return ["nan", struct.pack("<d", value).hex()] if math.isnan(value) else value
    if kind in (list, tuple):
        return [kind.__name__, *(_plain(one, parts) for one in value)]
    if kind is dict:
        if all(type(key) is str for key in value):
            return {key: _plain(one, parts) for key, one in value.items()}
        return ["dict", *([_plain(key, parts), _plain(one, parts)] for key, one in value.items())]
    if isinstance(value, Path):
        return ["path", str(value)]
    if kind is bytes:
        parts.append(value)
        return ["bytes", len(value)]
    if kind is np.ndarray and value.dtype.kind in _NUMBERS:
        parts.append(value.tobytes())
        return ["array", value.dtype.str, value.nbytes, *value.shape]
    if isinstance(value, np.generic) and type(value.item()) is not kind:
        return _plain(value.item(), parts)
    if isinstance(value, Exception):
        error = portable(value)
        given = [error.errno, error.strerror, error.filename] if isinstance(error, OSError) else [str(error)]
        return ["made", "OSError" if isinstance(error, OSError) else type(error).__name__, *given]
    if MADE.get(kind.__name__) == kind.__module__:
        return ["made", kind.__name__, *(_plain(getattr(value, name), parts) for name in kind.__match_args__)]
    raise TypeError(f"{kind.__module__}.{kind.__name__} is nothing that ranks tell each other; is it missing in MADE?")


def _value(plain: Any, parts: io.BytesIO) -> Any:
    """The value of which `_plain` made this."""
    match plain:
        case dict():
            return {key: _value(one, parts) for key, one in plain.items()}
        case ["list", *given]:
            return [_value(one, parts) for one in given]
        case ["tuple", *given]:
            return tuple(_value(one, parts) for one in given)
        case ["dict", *pairs]:
            return {_value(key, parts): _value(one, parts) for key, one in pairs}
        case ["nan", str(bits)]:
            return struct.unpack("<d", bytes.fromhex(bits))[0]
        case ["path", str(path)]:
            return Path(path)
        case ["bytes", int(size)]:
            return _read(parts, size)
        case ["array", str(dtype), int(size), *shape] if np.dtype(dtype).kind in _NUMBERS:
            return np.frombuffer(bytearray(_read(parts, size)), dtype).reshape(shape)
        case ["made", str(name), *given]:
            return getattr(importlib.import_module(MADE[name]), name)(*[_value(one, parts) for one in given])
        case list():
            raise ValueError(f"a list that begins with {str(plain[:1])[:40]}")
    return plain


def _read(parts: io.BytesIO, size: int) -> bytes:
    if len(found := parts.read(size)) != size:
        raise ValueError(f"of {size} bytes there are {len(found)}")
    return found
