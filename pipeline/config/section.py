"""The base of every configuration section, and the mark of a field that does not change what is computed."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A group of settings: strict types, unknown keys refused, advice in the text under each field."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False,
                              defer_build=True)


def added(default: Any = ..., **extra: Any) -> Any:
    """A field that decides what is computed and that older runs do not have.

    At its default, which computes what was computed before, it does not enter fingerprints: those runs stay valid.
    """
    return Field(default, json_schema_extra={"added": True}, **extra)


def execution(default: Any = ..., **extra: Any) -> Any:
    """A field that says how the work is done, not what is computed.

    Such fields never enter a stage's fingerprint: changing them makes nothing stale.
    """
    return Field(default, json_schema_extra={"execution": True}, **extra)


def is_execution(field: Any) -> bool:
    """Whether a pydantic field was declared with `execution`."""
    return isinstance(field.json_schema_extra, dict) and bool(field.json_schema_extra.get("execution"))


def _is_as_before(field: Any, value: Any) -> bool:
    """Whether a pydantic field was declared with `added` and computes what was computed before it was there."""
    added_later = isinstance(field.json_schema_extra, dict) and field.json_schema_extra.get("added")
    return bool(added_later) and value == field.default


def identity(value: Any) -> Any:
    """A JSON value of the settings that decide what is computed.

    Execution fields are left out, and so are fields that came later, as long as they have their default.
    """
    if isinstance(value, BaseModel):
        fields = ((name, field, getattr(value, name)) for name, field in type(value).model_fields.items())
        own = {name: identity(here) for name, field, here in fields
               if not is_execution(field) and not _is_as_before(field, here)}
        return own | identity(value.model_extra or {})
    if isinstance(value, (list, tuple)):
        return [identity(item) for item in value]
    if isinstance(value, dict):
        return {str(key): identity(item) for key, item in value.items()}
    return value


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries and lists as one level: `{"train.lr": 0.003, "shard.sources.0.name": "stdlib"}`."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None or not value:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, item in items:
        flat.update(flatten(item, f"{prefix}.{key}" if prefix else str(key)))
    return flat
