"""What a setting means: `--explain train.lr`, `--explain train`, or `--explain` for everything."""

from __future__ import annotations

import ast
import difflib
import inspect
import re
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from drover.pipeline.config.field_names import suggestion
from drover.pipeline.config.places import OUTSIDE
from drover.pipeline.config.section import is_execution
from drover.pipeline.config.tree import Config
from drover.pipeline.errors import UserError


def explain(config: Config, key: str = "") -> str:
    """The documentation, type, default and current value of the setting or section `key` ("" for all).

    Raises:
        UserError: no such key; names the nearest.
    """
    if key == "model.preset":  # gone from a configuration that is loaded: it spells the shape
        from drover.model.presets import PRESETS

        return (f"{key}\n  A shape, over which the section's other keys are laid: a folder with weights (a run, a "
                f"checkpoint, Hugging Face's form), or one of {', '.join(PRESETS)}.")
    entries = list(_entries(Config, config, ""))
    chosen = [text for name, text in entries if not key or name == key or name.startswith(key + ".")]
    if not chosen:
        names = [name for name, _ in entries]
        section, _, leaf = key.rpartition(".")
        meant = suggestion(section, leaf, [name.rpartition(".")[2] for name in names
                                           if name.rpartition(".")[0] == section])[1]
        close = difflib.get_close_matches(key, names, n=3, cutoff=0.4)
        close += [name for name in names if name.rpartition(".")[2] == key.rpartition(".")[2] and name not in close]
        if meant in names:
            close = [meant, *(name for name in close if name != meant)]
        raise UserError(f"There is no setting '{key}'. " + (f"Nearest: {', '.join(close)}." if close else
                        "`--explain` without a name prints them all."))
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
        key = f"{prefix}{name}"
        current = getattr(value, name, None)
        nested = _section_of(field)
        if nested is not None:
            yield key, f"{key}: {_flow(texts.get(name) or nested.__doc__ or '')}"
            yield from _entries(nested, current, f"{key}.")
            continue
        yield key, _entry(key, field, texts.get(name, ""), current)
        if isinstance(current, list) and current and isinstance(current[0], BaseModel):
            for index, item in enumerate(current):
                yield from _entries(type(item), item, f"{key}.{index}.")


def _entry(key: str, field: FieldInfo, text: str, current: Any) -> str:
    default = "required" if field.is_required() else repr(field.get_default(call_default_factory=True))
    if isinstance(current, list) and current and isinstance(current[0], BaseModel):
        current_text = f"{len(current)} item(s), below"
    else:
        current_text = repr(current)
    lines = [key, f"  {_flow(text)}",
             f"  type: {_type_name(field)}   default: {default}   now: {current_text}"]
    if key.rpartition(".")[2] in OUTSIDE:
        lines.append("  (where files lie makes nothing stale; what is in them does)")
    elif is_execution(field):
        lines.append("  (how the work is done; never makes a finished stage stale)")
    return "\n".join(lines)


def _section_of(field: FieldInfo) -> type[BaseModel] | None:
    for candidate in () if get_origin(field.annotation) is list else (field.annotation, *get_args(field.annotation)):
        if inspect.isclass(candidate) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _type_name(field: FieldInfo) -> str:
    text = field.annotation.__name__ if inspect.isclass(field.annotation) and not get_args(field.annotation) \
        else str(field.annotation)
    limits = ", ".join(f"{type(limit).__name__.lower()} {next(iter(vars(limit).values()))}"
                       for limit in field.metadata if getattr(limit, "__dict__", None))
    text = re.sub(r"(typing|drover)\.([\w.]*\.)?", "", text)
    text = re.sub(r"Annotated\[([^,\]]+), .*\]\]$", r"\1]", text)
    limits = limits.replace("_pydanticgeneralmetadata", "pattern")
    return f"{text} ({limits})" if limits else text


def _flow(text: str) -> str:
    return " ".join(text.split())
