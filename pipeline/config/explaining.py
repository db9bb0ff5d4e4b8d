"""What a setting means: `drover explain train.lr`, `drover explain train`, or `drover explain` for everything."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from drover.pipeline.config.field_names import suggestion
from drover.pipeline.config.places import OUTSIDE
from drover.pipeline.config.section import is_execution, section_of
from drover.pipeline.config.tree import Config
from drover.pipeline.core.errors import UserError

LIMITS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "min_length": "of length >=", "pattern": "like"}


def explain(config: Config, key: str = "") -> str:
    """The documentation, type, default and current value of the setting or section `key` ("" for all).

    Raises:
        UserError: no such key; names the one that may be meant.
    """
    if key == "model.preset":  # gone from a configuration that is loaded: it spells the shape
        from drover.model.presets import PRESETS

        return (f"{key}\n  A shape, which the section's other keys override: a folder with weights (a run, a "
                f"checkpoint, a Hugging Face folder), or one of {', '.join(PRESETS)}.")
    entries = dict(_entries(Config, config, ""))
    chosen = [text for name, text in entries.items() if not key or name == key or name.startswith(f"{key}.")]
    if not chosen:
        section = key.rpartition(".")[0]
        known = [leaf for at, _, leaf in (name.rpartition(".") for name in entries) if at == section]
        raise UserError(f"There is no setting '{key}'; {suggestion(key, known)} `drover explain` without a name prints "
                        f"them all.")
    return "\n\n".join(chosen)


def field_texts(section: type[BaseModel]) -> dict[str, str]:
    """The text under each field of a section and of its base classes.

    Read here and not by pydantic (`use_attribute_docstrings`), which would parse the source in every process.
    """
    found: dict[str, str] = {}
    for owner in reversed(section.__mro__[:section.__mro__.index(BaseModel)]):
        [definition] = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        assert isinstance(definition, ast.ClassDef)
        for field, text in pairwise(definition.body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr) \
                    and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str):
                found[field.target.id] = text.value.value
    return found


def _entries(section: type[BaseModel], value: Any, prefix: str, execution: bool = False) -> Iterator[tuple[str, str]]:
    """execution: nothing in the section decides what is computed."""
    texts = field_texts(section)
    for name, field in section.model_fields.items():
        key, current, how = f"{prefix}{name}", getattr(value, name, None), execution or is_execution(field)
        nested = section_of(field)
        items = current if isinstance(current, list) and current and isinstance(current[0], BaseModel) else []
        text = " ".join((texts.get(name) or (nested and nested.__doc__) or "").split())
        if nested is not None:
            yield key, f"{key}: {text}"
            yield from _entries(nested, current, f"{key}.", how)
        else:
            default = "required" if field.is_required() else repr(field.get_default(call_default_factory=True))
            now = f"{len(items)} item(s), below" if items else repr(current)
            kind = _type_name(field.annotation, field.metadata)
            yield key, "\n".join([key, f"  {text}", f"  type: {kind}   default: {default}   now: {now}",
                                  *_stale(name, how)])
        for index, item in enumerate(items):
            yield from _entries(type(item), item, f"{key}.{index}.")


def _stale(name: str, execution: bool) -> list[str]:
    if name in OUTSIDE:
        return ["  (the path makes nothing stale; the content does)"]
    return ["  (how the work is done; never makes a finished stage stale)"] if execution else []


def _type_name(kind: Any, marks: Iterable[Any]) -> str:
    """A type in readable form: `int > 0 | null`. marks: pydantic's limits."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _type_name(inner[0], [*inner[1:], *marks])
    if origin is Literal:
        text = " | ".join(map(repr, inner))
    elif origin in (Union, UnionType):
        text = " | ".join(_type_name(part, ()) for part in inner)
    elif origin is not None:
        text = f"{origin.__name__}[{', '.join(_type_name(part, ()) for part in inner)}]"
    else:
        text = "null" if kind is NoneType else getattr(kind, "__name__", str(kind))
    return " ".join([text, *(f"{sign} {getattr(mark, limit)}" for mark in marks for limit, sign in LIMITS.items()
                             if hasattr(mark, limit))])
