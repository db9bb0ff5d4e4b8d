"""What a setting means: `drover explain train.lr`, `drover explain train`, or `drover explain` for everything."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from pydantic import BaseModel

from drover.pipeline.config.field_names import suggestion
from drover.pipeline.config.places import EXTERNAL
from drover.pipeline.config.section import is_execution, section_of
from drover.pipeline.config.shipped import FILTERS, HOOKS, SINKS
from drover.pipeline.config.tree import Config, changed
from drover.pipeline.core.errors import UserError

LIMITS = ("gt", "ge", "lt", "le", "min_length", "max_length", "pattern")
"""Arguments of fields that are shown with their types."""


def explain(config: Config, key: str = "") -> str:
    """The documentation, type, default and current value of the setting or section `key` ("" for all).

    Raises:
        UserError: no such key; names the one that may be meant. Or `key` is of filters, loggers or hooks, and one of
            your own cannot be imported or has wrong settings.
    """
    if key == "model.preset":  # gone from a configuration that is loaded: it spells the shape
        from drover.model.presets import PRESETS

        return (f"{key}\n  A shape, which the section's other keys override: a folder with weights (a run, a "
                f"checkpoint, a Hugging Face folder), or one of {', '.join(PRESETS)}.")
    for kinds in (FILTERS, SINKS, HOOKS):
        if key.startswith(kinds.setting):  # only now is code of the user's own needed, and imported
            section, _, name = kinds.setting.partition(".")
            config = changed(config, {kinds.setting: kinds.made(getattr(config.part(section), name))})
    entries = dict(_entries(Config, config, ""))
    chosen = [text for name, text in entries.items() if not key or name == key or name.startswith(f"{key}.")]
    if not chosen:
        section = key.rpartition(".")[0]
        known = [leaf for at, _, leaf in (name.rpartition(".") for name in entries) if at == section]
        raise UserError(f"There is no setting '{key}'; {suggestion(key, known)} `drover explain` without a name prints "
                        f"them all.")
    return "\n\n".join(chosen)


def field_texts(section: type[BaseModel]) -> dict[str, tuple[str, str]]:
    """For each field of a section and of its base classes: its type with limits, and the text under it.

    Read here and not by pydantic (`use_attribute_docstrings`), which would parse the source in every process.
    """
    texts: dict[str, tuple[str, str]] = {}
    for owner in reversed(section.__mro__[:section.__mro__.index(BaseModel)]):
        [definition] = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        assert isinstance(definition, ast.ClassDef)
        for field, text in pairwise(definition.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                limits = field.value.keywords if isinstance(field.value, ast.Call) else []
                kind = ", ".join(map(ast.unparse, [field.annotation, *(one for one in limits if one.arg in LIMITS)]))
                texts[ast.unparse(field.target)] = kind, " ".join(str(text.value.value).split())
    return texts


def _entries(section: type[BaseModel], value: Any, prefix: str, execution: bool = False) -> Iterator[tuple[str, str]]:
    """execution: nothing in the section decides what is computed."""
    texts = field_texts(section)
    for name, field in section.model_fields.items():
        key = f"{prefix}{name}"
        current = getattr(value, name, None)
        how = execution or is_execution(field)
        kind, text = texts.get(name, (inspect.formatannotation(field.annotation), "(no text stands under it)"))
        if (nested := section_of(field)) is not None:
            yield key, f"{key}: {text}"
            yield from _entries(nested, current, f"{key}.", how)
            continue
        default = "required" if field.is_required() else repr(field.get_default(call_default_factory=True))
        items = current if isinstance(current, list) and current and isinstance(current[0], BaseModel) else []
        now = f"{len(items)} item(s), below" if items else repr(current)
        stale = "\n  (the path makes nothing stale; the content does)" if name in EXTERNAL else \
            "\n  (how the work is done; never makes a finished stage stale)" if how else ""
        yield key, f"{key}\n  {text}\n  type: {kind}   default: {default}   now: {now}{stale}"
        for index, item in enumerate(items):
            yield from _entries(type(item), item, f"{key}.{index}.")
