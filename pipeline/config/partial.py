"""A configuration of which some settings are wrong: the others can be judged all the same."""

from __future__ import annotations

import copy
import types
from collections.abc import Iterable
from typing import Any, cast

from pydantic import BaseModel, ValidationError

from drover.pipeline.config.tree import Config


class UnknownSettingError(Exception):
    """A setting was asked for that has no valid value."""


class _Partial:
    """Stands for a section; where a setting has no valid value, asking for it raises UnknownSettingError."""

    def __init__(self, value: BaseModel, at: str, unknown: frozenset[str]) -> None:
        self._value, self._at, self._unknown = value, at, unknown

    def __getattr__(self, name: str) -> Any:
        at = f"{self._at}.{name}" if self._at else name
        if at in self._unknown:
            raise UnknownSettingError(at)
        own = getattr(type(self._value), name, None)
        if isinstance(own, property) and own.fget is not None:
            return own.fget(self)
        if isinstance(own, types.FunctionType):
            return types.MethodType(own, self)
        value = getattr(self._value, name)
        beneath = isinstance(value, BaseModel) and any(key.startswith(f"{at}.") for key in self._unknown)
        return _Partial(value, at, self._unknown) if beneath else value


def known_part(tree: dict[str, Any], wrong: Iterable[tuple[str | int, ...]], unknown: Iterable[str] = ()) -> Config:
    """What can be said of a tree of values with wrong ones in it.

    Args:
        wrong: paths of the wrong values.
        unknown: settings, dotted, that are not to be believed though nothing is wrong with them.

    Raises:
        UnknownSettingError: nothing of it can be judged.
    """
    pruned, cuts = copy.deepcopy(tree), set(unknown)
    for path in wrong:
        cuts.add(".".join(map(str, _cut(pruned, path))))
    try:
        return cast(Config, _Partial(Config.model_validate(pruned), "", frozenset(cuts)))
    except ValidationError:
        raise UnknownSettingError("") from None


def _cut(tree: dict[str, Any], path: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """Take the value at a path out, or the whole list that it is in; where it was taken out."""
    node: Any = tree
    for depth, key in enumerate(path):
        if not isinstance(node, dict) or key not in node:
            break  # it is gone with another, or it is what is missing
        if depth == len(path) - 1 or isinstance(node[key], list):
            del node[key]
            return path[:depth + 1]
        node = node[key]
    return path
