"""What a setting means: `--explain train.lr`, `--explain train`, or `--explain` for everything."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from drover.pipeline.config.field_names import suggestion
from drover.pipeline.config.places import OUTSIDE
from drover.pipeline.config.section import is_execution, section_of
from drover.pipeline.config.tree import Config
from drover.pipeline.errors import UserError


def explain(config: Config, key: str = "") -> str:
    """The documentation, type, default and current value of the setting or section `key` ("" for all).

    Raises:
        UserError: no such key; names the one that may be meant.
    """
    if key == "model.preset":  # gone from a configuration that is loaded: it spells the shape
        from drover.model.presets import PRESETS

        return (f"{key}\n  A shape, over which the section's other keys are laid: a folder with weights (a run, a "
                f"checkpoint, Hugging Face's form), or one of {', '.join(PRESETS)}.")
    entries = dict(_entries(Config, config, ""))
    chosen = [text for name, text in entries.items() if not key or name == key or name.startswith(f"{key}.")]
    if not chosen:
        section = key.rpartition(".")[0]
        known = [leaf for at, _, leaf in (name.rpartition(".") for name in entries) if at == section]
        raise UserError(f"There is no setting '{key}'; {suggestion(key, known)[0]} `--explain` without a name prints "
                        f"them all.")
    return "\n\n".join(chosen)


def field_texts(section: type[BaseModel]) -> dict[str, str]:
    """What stands in the source under each field of a section and of the sections that it extends.

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


def _entries(section: type[BaseModel], value: Any, prefix: str) -> Iterator[tuple[str, str]]:
    texts = field_texts(section)
    for name, field in section.model_fields.items():
        key, current = f"{prefix}{name}", getattr(value, name, None)
        nested = section_of(field)
        items = current if isinstance(current, list) and current and isinstance(current[0], BaseModel) else []
        text = _flow(texts.get(name) or (nested and nested.__doc__) or "")
        if nested is not None:
            yield key, f"{key}: {text}"
            yield from _entries(nested, current, f"{key}.")
        else:
            default = "required" if field.is_required() else repr(field.get_default(call_default_factory=True))
            now = f"{len(items)} item(s), below" if items else repr(current)
            yield key, "\n".join([key, f"  {text}", f"  type: {_type_name(field)}   default: {default}   now: {now}",
                                  *_stale(name, field)])
        for index, item in enumerate(items):
            yield from _entries(type(item), item, f"{key}.{index}.")


def _stale(name: str, field: FieldInfo) -> list[str]:
    if name in OUTSIDE:
        return ["  (where files lie makes nothing stale; what is in them does)"]
    return ["  (how the work is done; never makes a finished stage stale)"] if is_execution(field) else []


def _type_name(field: FieldInfo) -> str:
    alone = inspect.isclass(field.annotation) and not get_args(field.annotation)
    text = re.sub(r"(typing|drover)\.([\w.]*\.)?", "", field.annotation.__name__ if alone and field.annotation else
                  str(field.annotation))
    limits = ", ".join(f"{type(limit).__name__.lower()} {next(iter(vars(limit).values()))}"
                       for limit in field.metadata if getattr(limit, "__dict__", None))
    text = re.sub(r"Annotated\[([^,\]]+), .*\]\]$", r"\1]", text)
    return f"{text} ({limits.replace('_pydanticgeneralmetadata', 'pattern')})" if limits else text


def _flow(text: str) -> str:
    return " ".join(text.split())
