"""The base class of every configuration section, the types and marks of its fields, and functions for any section."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from drover.pipeline.core.errors import UserError, is_full_disk, meant
from drover.pipeline.storage.store import SCHEMES, WEB, Store, is_url

EXTERNAL = frozenset({"paths", "validation_paths", "path", "task_folders", "task_data", "init_from"})
"""Names of settings with paths of files outside of the run. The content decides what is computed, not the path."""
_ADDRESS = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*):/{1,2}(?=[^/])|^file://")
_LOGIN = re.compile(r"(?!abfs)[^:]+://[^/]*@")
"""A URL with a name or password in it; abfs://container@account has none."""


def local(text: str) -> str:
    """The text; ValueError if it is a URL (s3://..., https://...) and no path on this machine."""
    if _ADDRESS.match(text):
        raise ValueError(f"{text} is an address, but a path on this machine is needed, mounted file systems included. "
                         f"Mount it, or copy it here first, and give the path without file://. Of the Hugging Face "
                         f"Hub, models and tokenizers are named owner/name, and data sets are sources of the kind hf")
    return text


def readable(text: str) -> str:
    """The text; ValueError if it is neither a path nor a URL in an object store or on a web server."""
    if not is_url(text):
        return local(text)
    schemes = (*SCHEMES, *WEB)
    if text.partition("://")[0] not in schemes and not _LOGIN.match(text):
        raise ValueError(f"{text} is an address from which Drover does not read. Copy the files here first, and give "
                         f"their path. Data sets of the Hugging Face Hub are sources of the kind hf. Sources are also "
                         f"read from {', '.join(f'{name}://' for name in schemes)}")
    return usable_url(text)


def usable_url(url: str) -> str:
    """The URL; ValueError, without its secrets, if it cannot be used. Nothing is contacted."""
    if _LOGIN.match(url):
        raise ValueError("a URL has a name or password before @, which would be written to files. Give the URL without "
                         "it, and the credentials in the environment")
    try:
        Store(url)
    except UserError as error:
        raise ValueError(str(error)) from None
    return url


def written(url: str) -> str:
    """The URL; ValueError if it is signed, or of a web server."""
    if "?" in url or url.startswith(WEB):
        raise ValueError("a URL with a question mark is signed, and web servers take no files: neither works. Give the "
                         "URL of a prefix that begins with s3:// or the like")
    return url


def blocked(folder: Path, *, write: bool = False) -> str | None:
    """Why `folder` cannot exist, such as a file in its place, as a sentence; None if it can.

    write: also why nothing could be written into it, or into the folder where it would be made. Makes nothing.
    """
    made = f"runs_dir and name make the folder {folder}"
    folder = folder.absolute()
    nearest = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    if not nearest.is_dir():
        return f"{made}, but {nearest} is not a folder: set another runs_dir, or move it away."
    if write and not os.access(nearest, os.W_OK | os.X_OK):
        return (f"{made}, but you may not write into {nearest}: set runs_dir to a folder of yours, or have its "
                f"permissions changed.")
    return None


def make_folder(folder: Path) -> None:
    """Make a run's folder if it is missing; UserError if it cannot be made or written."""
    if problem := blocked(folder, write=True):
        raise UserError(problem)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if is_full_disk(error):
            raise
        raise UserError(f"runs_dir and name make the folder {folder}, which cannot be made: {error.strerror}."
                        ) from None


def local_path(text: str) -> str:
    """A path as it is written, but with the home folder for a `~` at its start."""
    return os.path.expanduser(text)  # noqa: PTH111 - Path would also change ./a, and fail for a user that is unknown


def _path(text: str) -> str:
    path = local_path(text)
    if "\0" in path or max(map(len, os.fsencode(path).split(b"/"))) > 255 or len(path) > 4000:
        raise ValueError("no file can have this name: it is too long, or has characters that names cannot have")
    return path


def in_form(pattern: str, form: str) -> AfterValidator:
    """A check that a text has a form, which the error says in words."""
    def checked(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"{text!r} must be {form}")
        return text

    return AfterValidator(checked)


Location = Annotated[str, AfterValidator(_path)]
"""A path on this machine, or anything else that a program takes in its place."""
LocalPath = Annotated[Location, AfterValidator(local)]
"""A path on this machine."""
SourcePath = Annotated[Location, AfterValidator(readable)]
"""A path on this machine, or a URL in an object store."""
StoreUrl = Annotated[str, AfterValidator(usable_url), AfterValidator(written)]
"""A URL in an object store."""


class Section(BaseModel):
    """A group of settings: strict types, no unknown keys, an explanation under each field."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False,
                              defer_build=True)


def added(default: Any = ..., **extra: Any) -> Any:
    """A field that decides what is computed and that older runs do not have.

    Its default computes what older runs computed. At its default it is not part of fingerprints, so those runs stay
    valid.
    """
    return Field(default, json_schema_extra={"added": True}, **extra)


def execution(default: Any = ..., **extra: Any) -> Any:
    """A field that decides how the work is done, not what is computed.

    Such fields are never part of a stage's fingerprint: changing them makes nothing stale.
    """
    return Field(default, json_schema_extra={"execution": True}, **extra)


def nested(mark: Any = Field) -> Any:
    """A section inside of a section, with its own defaults. It is built when the outer one first is: sections are not
    built while they are imported. mark: `execution` or `added`."""
    return mark({}, validate_default=True)


def is_execution(field: FieldInfo) -> bool:
    """Whether a pydantic field was declared with `execution`."""
    return field.json_schema_extra == {"execution": True}


def identity(value: Any) -> Any:
    """The settings that decide what is computed, as a JSON value.

    Execution fields are left out, and so are `added` fields at their default.
    """
    if isinstance(value, BaseModel):
        own = {name: identity(getattr(value, name)) for name, field in type(value).model_fields.items()
               if not (is_execution(field)
                       or (field.json_schema_extra == {"added": True} and getattr(value, name) == field.default))}
        return own | identity(value.model_extra or {})
    if isinstance(value, (list, tuple)):
        return [identity(item) for item in value]
    if isinstance(value, dict):
        return {str(key): identity(item) for key, item in value.items()}
    return value


def flatten(value: Any, prefix: str = "") -> dict[str, object]:
    """Nested dictionaries and lists as one level: `{"train.lr": 0.003, "shard.sources.0.name": "stdlib"}`."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    flat = dict[str, object]()
    for key, item in items:
        flat |= flatten(item, f"{prefix}.{key}".removeprefix("."))
    return flat or {prefix: value}


def by_kind(value: Any) -> Any:
    """A JSON value in which a list of items with kinds, such as filters, is a mapping by their names or kinds. An item
    that is added then changes no other, only the order."""
    if isinstance(value, dict):
        return {key: by_kind(item) for key, item in value.items()}
    if not (isinstance(value, list) and all(isinstance(item, dict) and "kind" in item for item in value)):
        return value
    items = {str(item.get("name") or item["kind"]): item for item in value}
    return {"(order)": ", ".join(items), **items} if items and len(items) == len(value) else value


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """The sections that a field may hold: directly, in a union, or as items of a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in get_args(annotation) for section in sections_in(part)]


def keys_of(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every setting and section, dotted, without those of items of lists and mappings."""
    for name, field in section.model_fields.items():
        yield prefix + name
        if (nested := section_of(field)) is not None:
            yield from keys_of(nested, f"{prefix}{name}.")


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a field holds; None for a single setting or a list."""
    return None if get_origin(field.annotation) in (list, dict) else next(iter(sections_in(field.annotation)), None)


def advice(name: str, known: Iterable[str]) -> str:
    """A hint for a name that is not among the known ones."""
    return meant(name, known := list(known), f"known here: {', '.join(known) or 'none'}.")


def shortened(text: str, most: int = 300) -> str:
    """A text for a message: of a very long one, the beginning."""
    return text if len(text) <= most else f"{text[:most - 3]}..."


COMMA = {"float_type": ".", "int_type": ""}
"""By the kind of pydantic's error, what replaces the comma in a number."""
HINTS = {"string_type": "; write it in quotes", "list_type": "; write [a, b]"}
"""By the kind of pydantic's error, what helps."""


def sentence(problem: Any, key: str, instead: str) -> str:
    """One of pydantic's errors as a sentence. key: the setting, dotted. instead: the hint if the key is unknown."""
    kind, given = problem["type"], problem.get("input")
    key = shortened(key)
    if kind == "extra_forbidden":
        return f"unknown key '{key}'; {instead}"
    if kind == "missing":
        return f"'{key}' is missing."
    message = shortened(problem["msg"].removeprefix("Value error, "), 1000).rstrip(".")
    if kind == "model_type":
        message = "this is a section; write its settings below it, indented, or leave it out"
    message += HINTS.get(kind, "") * (not isinstance(given, dict))
    if kind in ("literal_error", "union_tag_invalid"):
        tag = problem["ctx"].get("tag")
        choices = re.findall("'(.*?)'", message.rpartition(":")[2])
        message += f"; {meant(tag or str(given), choices, setting=f'{key}.kind=' if tag else f'{key}=')}".rstrip("; ")
    if kind in COMMA and re.fullmatch(r"-?\d+(,\d+)+", str(given)):
        message += f"; write {given.replace(',', COMMA[kind])}"
    if given == 0 and re.search("(?<!log_)every", key):
        message += "; null switches it off"
    if kind == "value_error":
        return f"'{key}': {message}{'' if message.endswith('?') else '.'}"
    end = "" if message.endswith("?") else "."
    return f"'{key}' is {shortened(repr(given))} ({type(given).__name__}): {message[0].lower()}{message[1:]}{end}"


def sentences(error: ValidationError, at: str, known: Iterable[str]) -> list[str]:
    """All of pydantic's errors in a section. at: its setting, dotted. known: its keys."""
    keys = [".".join([at, *map(str, problem["loc"])]) for problem in error.errors()]
    return [sentence(problem, key, advice(key.rpartition(".")[2], known))
            for key, problem in zip(keys, error.errors(), strict=True)]
