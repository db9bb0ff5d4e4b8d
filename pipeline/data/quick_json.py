"""JSON by orjson where it gives what Python's own library gives, to the byte and to the number; else by that."""

from __future__ import annotations

import json
from typing import Any

import orjson

UNSURE = object()
"""In place of a value that Python's own parser may read otherwise, or refuse."""
DEEPEST = 500
"""Levels up to which both libraries surely agree; Python's gives up at about 1,000."""
SHALLOW = 20
"""Levels of a value that are looked through before it is written."""
_SURE = frozenset((str, int, bool, type(None)))
_CONTAINERS = (dict, list)


def parsed(data: bytes) -> Any:
    """The value that `json.loads` gives for UTF-8 without surrogates, or UNSURE.

    orjson refuses what it cannot hold, so only what it takes has to be looked through: it makes floats of whole numbers
    of more than 64 bits, and has another limit of depth.
    """
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        return UNSURE
    if type(value) is dict and _SURE.issuperset(map(type, value.values())):
        return value
    level = [value]
    for _ in range(DEEPEST):
        below = []
        for item in level:
            for inner in item.values() if type(item) is dict else item if type(item) is list else (item,):
                kind = type(inner)
                if kind in _CONTAINERS:
                    below.append(inner)
                elif kind is float and not -2.0**63 < inner < 2.0**63:
                    return UNSURE
        if not below:
            return value
        level = below
    return UNSURE


def compact(value: dict[str, Any], doubtful: Any) -> bytes:
    """The bytes of `json.dumps` without spaces and with all characters as they are.

    doubtful: the part of `value` that may hold other things than strings.

    Raises:
        UnicodeEncodeError: half of a surrogate pair. TypeError, ValueError, RecursionError: as `json.dumps`.
    """
    if _is_plain(doubtful, SHALLOW):
        try:
            return orjson.dumps(value)
        except orjson.JSONEncodeError:  # a surrogate, or a number of more than 64 bits
            pass
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def _is_plain(value: Any, depth: int) -> bool:
    """Whether a value has no floats, which the two write otherwise, and nothing but JSON's own types."""
    kind = type(value)
    if kind is dict:
        return not value or (depth > 0 and all(type(key) is str for key in value)
                             and all(_is_plain(item, depth - 1) for item in value.values()))
    return kind in _SURE or (kind is list and depth > 0 and all(_is_plain(item, depth - 1) for item in value))
