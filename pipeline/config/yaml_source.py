"""YAML text into values that remember the file and line where they were written."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any, TypedDict

import yaml

from drover.pipeline.config.section import shortened
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import read_bytes, typed

Path_ = tuple[str | int, ...]
"""The place of a value in the tree: ("train", "lr") or ("shard", "sources", 0, "name")."""
Tree = dict[str, Any]
"""A mapping of settings, in which each key is a `Key`."""
HALF = re.compile("[\ud800-\udc7f\udd00-\udfff]")
"""Code points that no file can hold. Those between are bytes of names of files that are not UTF-8."""
MOST_VALUES = 100_000
"""The most values of a file or an override with its aliases expanded. Aliases of aliases can double the count on every
line."""
LARGEST = 1 << 22
"""Bytes of the largest file that is read. YAML is read slowly: of this size in half a minute."""
_OURS = {"bool": ("tTfF", r"true|false|True|False"), "int": ("-+0123456789", r"[-+]?[0-9][0-9_]*"),
         "float": ("-+.0123456789",
                   r"[-+]?(([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+)")}
"""Types that are read differently from PyYAML: the first characters of a value, and its form."""


PLAIN = {f"tag:yaml.org,2002:{kind}" for kind in ("map", "seq", "str", "int", "float", "bool", "null")}
"""YAML's tags of the values that a configuration may hold."""


class _Loader(yaml.SafeLoader):
    """YAML 1.1 as PyYAML reads it, with three changes: 1e-3 is a number; 'on', 'yes' and 12:30 are text; no key may be
    written twice."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """A mapping as it is written, before merge keys are applied."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for number, (key, _) in enumerate(node.value):
            if isinstance(key, yaml.ScalarNode) and key.value in keys[:number]:
                raise yaml.MarkedYAMLError(problem=f"the key '{key.value}' is written twice; keep one",
                                           problem_mark=key.start_mark)
        return node


class Dumper(yaml.SafeDumper):
    """Quotes every text that `_Loader` would read as another type: a run may be called 1e3."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in resolvers if tag.rpartition(":")[2] not in (*_OURS, "timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()}
for _type, (_first, _form) in _OURS.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_type}", re.compile(f"^({_form})$"), list(_first))
for _type in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_type}", lambda _, node: _number(str(node.value).replace("_", "")))
Dumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


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


def put(tree: Tree, key: str, value: Any) -> None:
    """Set a key, which has another place than the one that it replaces."""
    tree.pop(key, None)
    tree[key] = value


def keyed(value: Any, place: str) -> Any:
    """A value whose keys all have this place."""
    if not isinstance(value, dict):
        return value
    return {Key.at(key, place): keyed(inner, place) for key, inner in value.items()}


def place_of(tree: Any, path: Path_) -> str:
    """The place where the value at `path`, or its nearest enclosing part, was written."""
    found = Key.place
    for part in path:
        if isinstance(tree, list) and isinstance(part, int):
            tree = tree[part]
            key = next(iter(tree), None) if isinstance(tree, dict) else None  # an item begins with its first key
        else:
            key = next((key for key in tree if key == part), None) if isinstance(tree, dict) else None
            tree = tree[key] if key is not None else None
        found = getattr(key, "place", found)
    return found


def file_of(place: str) -> Path | None:
    """The file of a place; None for an override."""
    file, _, line = place.rpartition(":")
    return Path(file) if line.isdecimal() else None


def merge(below: Tree, above: Tree) -> Tree:
    """Let `above` override `below`: mappings are merged key by key, lists and single values are replaced."""
    for key, value in above.items():
        old = below.get(key)
        put(below, key, merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value)
    return below


def override(tree: Tree, dotted: str, text: str, *, as_text: bool = False) -> None:
    """Apply an override `a.b=text`. Numbers in the path index lists.

    as_text: take the text as typed, not as YAML. `name=20261101` is a number in YAML, but a name is needed.
    """
    said, place = f"The override {dotted}={text}", f"the command line ({dotted}={text})"
    value = text if as_text else \
        _built(text, said if len(said) < 200 else f"The override {dotted}", lambda _: place)
    *sections, last = dotted.split(".")
    node: Any = tree
    for number, key in enumerate([*sections, last]):
        listed = isinstance(node, list)
        if listed and not (key.isdigit() and int(key) < len(node)):
            raise UserError(f"{said} names an item that does not exist: the list {'.'.join(sections[:number])} has "
                            f"{len(node)} items, counted from 0.")
        inner = node[int(key)] if listed else node.get(key)
        if number == len(sections):
            inner = value
        elif not isinstance(inner, (dict, list)):
            inner = {}
        if listed:
            node[int(key)] = inner
        else:
            put(node, Key.at(key, place), inner)
        node = inner


def read_yaml(path: Path, advice: str = "Give an existing file.", *, piped: bool = False) -> Tree:
    """The values of one YAML file.

    Args:
        advice: what to do if the file is missing.
        piped: it may be a pipe, as the shell makes of `<(...)`.

    Raises:
        UserError: a missing file, one that is not UTF-8, broken YAML, a key written twice, an alias inside of itself.
    """
    found = _built(_decoded(path, advice, piped), str(path), lambda node: f"{path}:{node.start_mark.line + 1}")
    if not isinstance(found, dict | None):
        raise UserError(f"{path} does not hold a mapping of settings, but a {type(found).__name__}.")
    return found or {}


def _built(text: str, where: str, place: Callable[[yaml.Node], str]) -> Any:
    """The value of a YAML text, with aliases expanded. place: of a node, as messages name it."""
    def scalar(node: yaml.Node) -> Any:
        made = loader.construct_object(node)
        if isinstance(made, str) and HALF.search(made):
            raise UserError(f"{place(node)}: {shortened(ascii(made))} has half of a surrogate pair, which is no "
                            f"character. Write the character itself.")
        return made

    def value(node: yaml.Node) -> Any:
        if node.tag not in PLAIN:
            raise UserError(f"{place(node)}: the tag {node.tag} does not make a plain value. Write the value without "
                            f"a tag.")
        if isinstance(node, yaml.SequenceNode):
            return [value(item) for item in node.value]
        if not isinstance(node, yaml.MappingNode):
            return scalar(node)
        loader.flatten_mapping(node)  # merged keys come before its own
        found: Tree = {}
        for key, inner in node.value:
            put(found, Key.at(str(scalar(key)), place(key)), value(inner))
        return found

    try:
        loader = _Loader(text)
        node = _bounded(loader.get_single_node(), where)
        return None if node is None else value(node)
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{where} is not valid YAML: {_said(error, where)}") from None
    except RecursionError:
        raise UserError(f"{where} is nested too deeply to be read.") from None


def _said(error: Exception, name: str) -> str:
    """PyYAML's message, with the name of the file."""
    return str(error).replace('"<unicode string>"', name)


def read_task(path: Path, kind: Any, advice: str = "") -> dict[str, Any]:
    """The content of a task's YAML file, by a loader of PyYAML. UserError, with the advice, if it is no task."""
    try:
        loader = kind(read_bytes(path, LARGEST).decode())
        node = _bounded(loader.get_single_node(), str(path))
        return dict(typed(node and loader.construct_document(node), TaskSettings))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        why = error.strerror if isinstance(error, OSError) else _said(error, str(path))
        raise UserError(f"The task {path} cannot be read: {why}.{advice}") from None


def _bounded(node: yaml.Node | None, where: str) -> yaml.Node | None:
    """The node. UserError if its aliases expand to more than MOST_VALUES values, or endlessly."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        if id(node) not in sizes:
            sizes[id(node)] = 0  # until all that is in it is counted
            inner = chain(*node.value) if isinstance(node, yaml.MappingNode) else node.value
            sizes[id(node)] = 1 + sum(map(size, inner if isinstance(node, yaml.CollectionNode) else ()))
        if not sizes[id(node)]:
            raise UserError(f"{where}:{node.start_mark.line + 1}: the value of an alias contains the alias itself. "
                            f"Write the value out.")
        return sizes[id(node)]

    if node is not None and (count := size(node)) > MOST_VALUES and count > len(sizes):
        raise UserError(f"{where} has {count:,} values with its aliases expanded; at most {MOST_VALUES:,} are "
                        f"allowed. Use fewer aliases.")
    return node


def _decoded(path: Path, advice: str, piped: bool) -> str:
    try:
        if piped and path.is_fifo():
            with open(path, "rb") as pipe:
                data = pipe.read(LARGEST)
        else:
            data = read_bytes(path, LARGEST)
    except (OSError, ValueError) as error:  # a ValueError for a name with a NUL
        raise UserError(f"The configuration file {shortened(str(path))} cannot be read: "
                        f"{getattr(error, 'strerror', error)} (looked in {shortened(str(path.absolute().parent))}). "
                        f"{advice}") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise UserError(f"{path} is UTF-16, not UTF-8. Save it as UTF-8 (iconv -f utf-16 -t utf-8).") from None
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: the byte 0x{data[error.start]:02x} is not UTF-8. Save the file as UTF-8 "
                        f"(iconv -f latin1 -t utf-8, where it is Latin-1).") from None
