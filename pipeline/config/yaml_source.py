"""YAML text into values whose keys remember the file and line where they were written."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypedDict

import yaml

from drover.pipeline.config.section import shortened
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import read_bytes, typed

Tree = dict[str, Any]
"""A mapping of settings, in which each key is a `Key`. Aliases share their value, so trees are never changed."""
HALF = re.compile("[\ud800-\udc7f\udd00-\udfff]")
"""Code points that no file can hold. Those between are bytes of names of files that are not UTF-8."""
LARGEST = 1 << 22
"""Bytes of the largest file that is read. YAML is read slowly: of this size in half a minute."""
MOST_VALUES = 1 << 20
"""Most values in a file or override, those of an alias counted wherever it stands. Nested aliases could make more than
any memory holds."""

TYPED = "the command line"
"""Start of the place of an override."""


class Key(str):
    """A key of a mapping.

    Attributes:
        place: where it was written: `file:line`, or the override that set it.
    """

    place = "the defaults"

    @classmethod
    def at(cls, text: str, place: str) -> Key:
        """A key that was written at this place."""
        key = cls(text)
        key.place = place
        return key


class _MarkedLoader(yaml.SafeLoader):
    """YAML with numbers, booleans and null as in YAML 1.2, where 1e-3 is a number, and on, yes and 12:30 are text.
    Every key is a text, and no key may be written twice."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}

    def place(self, node: yaml.Node) -> str:
        """The place of a node, as messages name it."""
        return self.name if self.name.startswith(TYPED) else f"{self.name}:{node.start_mark.line + 1}"

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        """A single value."""
        value = super().construct_scalar(node)
        if HALF.search(value):
            raise UserError(f"{self.place(node)}: {shortened(ascii(value))} has half of a surrogate pair, which is no "
                            f"character. Write the character itself.")
        return value


def _mapping(loader: _MarkedLoader, node: yaml.MappingNode) -> Tree:
    """A mapping, with merge keys applied before its own."""
    keys = [key.value for key, _ in node.value]
    for number, (key, _) in enumerate(node.value):
        if key.value in keys[:number]:
            raise UserError(f"{loader.place(key)}: the key '{key.value}' is written twice; keep one.")
    loader.flatten_mapping(node)
    tree: Tree = {}
    for key, value in node.value:
        name = Key.at(str(loader.construct_object(key, deep=True)), loader.place(key))
        tree.pop(name, None)  # whose place is another
        tree[name] = loader.construct_object(value, deep=True)
    return tree


class Dumper(yaml.SafeDumper):
    """Quotes every text that `_MarkedLoader` would read as another type: a run may be called 1e3."""


for _type, _first, _form in (
        ("null", ["~", "n", "N", ""], "~|null|Null|NULL|"), ("bool", ["t", "T", "f", "F"], "true|True|false|False"),
        ("int", [*"-+0123456789"], "[-+]?[0-9][0-9_]*"), ("merge", ["<"], "<<"),
        ("float", [*"-+.0123456789"],
         r"[-+]?(([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+)")):
    _MarkedLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_type}", re.compile(f"^({_form})$"), _first)
_MarkedLoader.add_constructor("tag:yaml.org,2002:map", _mapping)
for _type in ("int", "float"):
    _MarkedLoader.add_constructor(f"tag:yaml.org,2002:{_type}",
                                  lambda _, node: _number(str(node.value).replace("_", "")))
Dumper.yaml_implicit_resolvers = _MarkedLoader.yaml_implicit_resolvers


def _number(text: str) -> float:
    """A number; a whole one (3, 1e6) is an integer, unless it is beyond 64 bits: no setting counts so far, and plans
    compute with all of them."""
    number = float(text)
    if not number.is_integer() or abs(number) >= 2**63:
        return number
    return int(text) if text.lstrip("-+").isdecimal() else int(number)


class TaskSettings(TypedDict, total=False):
    """The parts of a task's YAML file that are used here; a single file may replace a list of files."""

    include: str | list[str] | None
    dataset_kwargs: dict[str, Any] | None


def place_of(tree: Any, path: Sequence[str | int]) -> str:
    """The place where the value at `path`, or its nearest enclosing part, was written."""
    place = Key.place
    for part in path:
        if isinstance(tree, list) and isinstance(part, int):
            tree = tree[part]
            key = next(iter(tree), None) if isinstance(tree, dict) else None  # an item begins with its first key
        else:
            key = next((key for key in tree if key == part), None) if isinstance(tree, dict) else None
            tree = tree[key] if key is not None else None
        place = getattr(key, "place", place)
    return place


def folder_of(place: str, otherwise: Path) -> Path:
    """The folder of the file that a place is in; of an override, another one."""
    file, _, line = place.rpartition(":")
    return Path(file).parent if line.isdecimal() else otherwise


def merge(below: Tree, above: Tree) -> Tree:
    """`above` over `below`: mappings are merged key by key, lists and single values are replaced."""
    tree = dict(below)
    for key, value in above.items():
        old = tree.pop(key, None)
        tree[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return tree


def override(tree: Tree, dotted: str, text: str) -> Tree:
    """The tree with an override `a.b=text`. Numbers in the path index lists."""
    place = f"{TYPED} ({shortened(f'{dotted}={text}', 200)})"
    value = _parsed(text, place)

    def placed(old: Any, path: list[str]) -> Any:
        """The old value, with the new one at a path in it."""
        if not path:
            return value
        key, *rest = path
        if isinstance(old, list):
            if not (key.isdigit() and int(key) < len(old)):
                raise UserError(f"{place} names an item that does not exist: the list "
                                f"{dotted.removesuffix('.'.join(path))[:-1]} has {len(old)} items, counted from 0.")
            return [placed(item, rest) if number == int(key) else item for number, item in enumerate(old)]
        old = dict(old) if isinstance(old, dict) else {}
        inner = placed(old.pop(key, None), rest)
        return {**old, Key.at(key, place): inner}

    return dict(placed(tree, dotted.split(".")))


def read_yaml(path: Path, advice: str = "Give an existing file.", *, pipe: bool = False) -> Tree:
    """The values of one YAML file.

    Args:
        advice: what to do if the file is missing.
        pipe: whether it may be a pipe, as the shell makes of `<(...)`. In a foreign folder it would never end.

    Raises:
        UserError: a missing file, one that is not UTF-8, broken YAML, a key written twice, an alias inside of itself.
    """
    try:
        data = path.open("rb").read(LARGEST) if pipe and path.is_fifo() else read_bytes(path, LARGEST)
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: the byte 0x{data[error.start]:02x} is not UTF-8. Save the file as UTF-8 "
                        f"(iconv -f latin1 -t utf-8, if it is Latin-1).") from None
    except (OSError, ValueError) as error:  # a ValueError for a name with a NUL
        raise UserError(f"The configuration file {shortened(str(path))} cannot be read: "
                        f"{getattr(error, 'strerror', error)} (looked in {shortened(str(path.absolute().parent))}). "
                        f"{advice}") from None
    tree = _parsed(text, str(path))
    if not isinstance(tree, dict | None):
        raise UserError(f"{path} does not hold a mapping of settings, but a {type(tree).__name__}.")
    return tree or {}


def _parsed(text: str, name: str) -> Any:
    """The value of a YAML text. name: of its file, or the override that it is in."""
    try:
        loader = _MarkedLoader(text)
        loader.name = name  # of the marks of all nodes
        node = loader.get_single_node()
        value = None if node is None else loader.construct_object(node, deep=True)
        for _ in islice(json.JSONEncoder(default=str).iterencode(value), MOST_VALUES, None):
            raise ValueError(f"with its aliases it has more than {MOST_VALUES:,} values")
        return value
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{name} is not valid YAML: {error}") from None
    except RecursionError:
        raise UserError(f"{name} is nested too deeply to be read.") from None


def read_task(path: Path, kind: Any, advice: str = "") -> dict[str, Any]:
    """The content of a task's YAML file, by a loader of PyYAML. UserError, with the advice, if it is no task."""
    try:
        return dict(typed(kind(read_bytes(path, LARGEST).decode()).get_single_data(), TaskSettings))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error).replace('"<unicode string>"', str(path))
        raise UserError(f"The task {path} cannot be read: {why}.{advice}") from None
