"""Validation of JSON values from untrusted files."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

Record = dict[str, Any]
"""A JSON object: a line of a log, a manifest's record of a file, a marker."""
Make = Callable[[Any], Any]


def typed(value: Any, kind: Any) -> Any:
    """A JSON value as `kind`: a dataclass, TypedDict, list, tuple, dict, Literal, union, or one of JSON's own types.

    Numbers must be finite and fit into 64 bits. Further arguments of `Annotated` are called with the value and may
    raise ValueError. A TypedDict may have undeclared keys, a dataclass may not. ValueError, naming the place, if the
    value does not fit.
    """
    try:
        return _as(kind)(value)
    except ValueError as error:
        raise ValueError(f"it{error}" if str(error).startswith(" ") else str(error).removeprefix(".")) from None


@cache
def _as(kind: Any) -> Make:
    """The function that converts a value to `kind`. Its error messages begin with a blank if the value itself is wrong,
    and with a point if something in it is."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda value: value
    if kind in (str, bool, NoneType):
        return lambda value: value if type(value) is kind else _refuse(value)
    if kind in (int, float):
        return lambda value: value if type(value) in (int, kind) and abs(value) < 2**63 else _refuse(value)
    if origin is Literal:
        return lambda value: value if value in inner else _refuse(value)
    if origin is Annotated:
        return _checked(_as(inner[0]), inner[1:])
    if origin in (Union, UnionType):
        return _one_of([_as(one) for one in inner])
    if origin is dict:
        return lambda value: _entries(value.items(), {}, _as(inner[1])) if type(value) is dict else _refuse(value)
    if origin is list or (origin is tuple and ... in inner):
        return _sequence(origin, _as(inner[0]))
    if origin is tuple:
        by_number = {number: _as(one) for number, one in enumerate(inner)}
        return lambda value: tuple(_entries(enumerate(value), by_number).values()) if type(value) is list and \
            len(value) == len(inner) else _refuse(value)
    return _record(kind)


def _checked(make: Make, checks: Iterable[Callable[[Any], Any]]) -> Make:
    def read(value: Any) -> Any:
        result = make(value)
        for check in checks:
            check(result)
        return result
    return read


def _one_of(makes: list[Make]) -> Make:
    def read(value: Any) -> Any:
        for make in makes:
            with suppress(ValueError):
                return make(value)
        _refuse(value)
    return read


def _sequence(kind: Any, make: Make) -> Make:
    def read(value: Any) -> Any:
        return kind(_entries(enumerate(value), {}, make).values()) if type(value) is list else _refuse(value)
    return read


def _record(kind: Any) -> Make:
    """A dataclass or TypedDict."""
    makes = {name: _as(one) for name, one in get_type_hints(kind, include_extras=True).items()}
    is_class = is_dataclass(kind)
    needed = {field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING} \
        if is_class else kind.__required_keys__

    def read(value: Any) -> Any:
        if type(value) is not dict:
            _refuse(value)
        for name in sorted(needed - value.keys()):
            raise ValueError(f" has no {name}")
        for name in sorted(value.keys() - makes.keys()) if is_class else ():
            raise ValueError(f" has {reprlib.repr(name)}, which is not known")
        result = _entries(value.items(), makes, _as(Any))
        return kind(**result) if is_class else result
    return read


def _refuse(value: Any) -> NoReturn:
    raise ValueError(f" is {reprlib.repr(value)}")


def _entries(items: Iterable[tuple[Any, Any]], makes: dict[Any, Make], otherwise: Make = _refuse
             ) -> dict[Any, Any]:
    """Convert each value by the function for its key, or else by `otherwise`."""
    result, key = {}, None
    try:
        for key, item in items:
            result[key] = makes.get(key, otherwise)(item)
    except ValueError as error:
        text = str(error)
        raise ValueError(f".{key}{text if text[:1] in ' .' else f': {text}'}") from None
    return result


def is_inside(text: str) -> None:
    """ValueError unless a relative path stays inside its folder."""
    parts = os.fsencode(text).split(b"/")
    if not parts[0] or b".." in parts or "\0" in text or max(map(len, parts)) > 255 or len(text) > 4000:
        raise ValueError(f"{text[:100]!r} is no path inside the folder")


def is_count(number: float) -> None:
    """ValueError for a negative number."""
    if number < 0:
        raise ValueError(f"{number} is below 0")


def like(kind: Any) -> Callable[[Any], Any]:
    """For `Annotated`: checks that a JSON value is of a kind (`typed`), without changing its static type."""
    return lambda value: typed(value, kind)


Inside = Annotated[str, is_inside]
Count = Annotated[int, is_count]
