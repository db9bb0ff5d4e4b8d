"""YAML text into values that remember the file and line they were written in."""

from __future__ import annotations

import codecs
import re
from pathlib import Path
from typing import Any, TypedDict

import yaml

from drover.pipeline.errors import UserError
from drover.pipeline.files import typed

Path_ = tuple[str | int, ...]
"""Where a value stands in the tree: ("train", "lr") or ("shard", "sources", 0, "name")."""


MOST_VALUES = 100_000
"""The most that a file or an override may hold once its aliases are written out. Aliases of aliases can double the
count on every line."""
MERGE = "tag:yaml.org,2002:merge"
"""What YAML calls the key `<<`."""


PLAIN = {f"tag:yaml.org,2002:{kind}" for kind in ("map", "seq", "str", "int", "float", "bool", "null")}
"""What YAML calls the values that a configuration is made of."""


class _Loader(yaml.SafeLoader):
    """YAML 1.1 as PyYAML reads it, except that 1e-3 is a number and 'on', 'yes', 12:30 are not."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers
            if tag not in ("tag:yaml.org,2002:float", "tag:yaml.org,2002:int", "tag:yaml.org,2002:bool",
                           "tag:yaml.org,2002:timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(true|false|True|False)$"), list("tTfF"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9][0-9_]*$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+)$"),
    list("-+.0123456789"))
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(str(node.value).replace("_", "")))
_Loader.add_constructor("tag:yaml.org,2002:float", lambda loader, node: float(str(node.value).replace("_", "")))


class Dumper(yaml.SafeDumper):
    """Quotes every text that `_Loader` would take for something else: a run may be called 1e3."""


Dumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


class TaskSettings(TypedDict, total=False):
    """What of a task's YAML file is read here; a list of files may be one."""

    include: str | list[str] | None
    dataset_kwargs: dict[str, Any] | None


class Values:
    """A nested value and the place (`file:line`) where each part of it was written."""

    def __init__(self) -> None:
        self.tree: dict[str, Any] = {}
        self.places: dict[Path_, str] = {}
        self.words: dict[Path_, str] = {}
        """Overrides as they were typed: `name=20261101` is a number in YAML, but a name where a text is wanted."""

    def place(self, path: Path_) -> str:
        """Where the value at `path`, or its nearest enclosing part, was written."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, "the defaults")

    def merge(self, other: Values) -> None:
        """Lay `other` over this: mappings join key by key, lists and single values are replaced whole."""
        _merge(self.tree, other.tree, (), self.places)
        self.places.update(other.places)

    def take_words(self, paths: list[Path_]) -> bool:
        """Where a text was wanted and an override's value is none, take what was typed; whether any was taken."""
        taken = [path for path in paths if path in self.words]
        for path in taken:
            self._parent(path)[path[-1]] = self.words.pop(path)
        return bool(taken)

    def take_whole_numbers(self, paths: list[Path_]) -> bool:
        """Where a whole number was wanted and the value is one with an exponent or a point (1e6), take it for that;
        whether any was taken."""
        taken = [path for path in paths if isinstance(value := self._parent(path)[path[-1]], float)
                 and value.is_integer()]
        for path in taken:
            parent = self._parent(path)
            parent[path[-1]] = int(parent[path[-1]])
        return bool(taken)

    def _parent(self, path: Path_) -> Any:
        node: Any = self.tree
        for key in path[:-1]:
            node = node[key]
        return node

    def set(self, dotted: str, text: str) -> None:
        """Apply an override `a.b=text`, `text` being read as YAML. Numbers in the path index lists."""
        keys: Path_ = tuple(int(key) if key.isdigit() else key for key in dotted.split("."))
        try:
            value = load_bounded(text, _Loader, f"The override {dotted}")
        except (yaml.YAMLError, ValueError) as error:
            raise UserError(f"The override {dotted}={text} is not valid YAML: {_said(error, 'it')}. Quote the value."
                            ) from None
        node: Any = self.tree
        for depth, key in enumerate(keys[:-1]):
            if isinstance(node, dict):
                if not isinstance(node.get(key), (dict, list)):
                    node[key] = {}
                    self.places[keys[:depth + 1]] = f"the command line ({dotted}={text})"
                node = node[key]
            elif isinstance(node, list) and isinstance(key, int) and key < len(node):
                node = node[key]
            else:
                raise UserError(f"The override {dotted}={text} names no place in the configuration: "
                                f"{'.'.join(map(str, keys[:depth + 1]))} does not exist.")
        last = keys[-1]
        if isinstance(node, list) and not (isinstance(last, int) and last < len(node)):
            raise UserError(f"The override {dotted}={text} names no place in the configuration: the list "
                            f"{'.'.join(map(str, keys[:-1]))} has {len(node)} items, counted from 0.")
        node[last] = value
        self.words[keys] = text
        _forget(self.places, keys)
        self.places[keys] = f"the command line ({dotted}={text})"


def read_yaml(path: Path, named_by: str = "") -> Values:
    """The values of one YAML file.

    Args:
        named_by: where the file's name stands, if that is not the command line.

    Raises:
        UserError: a missing file, one that is not UTF-8, broken YAML, a key written twice, an alias inside of itself.
    """
    text, values = _decoded(path, named_by), Values()
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is not None:
            values.tree = _Reader(loader, path, values.places).value(_bounded(node, str(path)), ())
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{path} is not valid YAML: {_said(error, str(path))}") from None
    except RecursionError:
        raise UserError(f"{path} is nested too deeply to be read.") from None
    if not isinstance(values.tree, dict):
        raise UserError(f"{path} does not hold a mapping of settings, but a {type(values.tree).__name__}.")
    return values


def load_bounded(text: str | bytes, kind: Any, where: str) -> Any:
    """The value of YAML by a loader of PyYAML. UserError where its aliases make too much of it (MOST_VALUES)."""
    try:
        loader = kind(text)
        node = loader.get_single_node()
        return None if node is None else loader.construct_document(_bounded(node, where))
    except RecursionError:
        raise UserError(f"{where} is nested too deeply to be read.") from None


def _said(error: Exception, name: str) -> str:
    """What PyYAML says of a text, which it does not know the name of."""
    return str(error).replace('"<unicode string>"', name)


def read_task(path: Path, kind: Any, advice: str = "") -> dict[str, Any]:
    """The content of a task's YAML file by a loader of PyYAML. UserError, with the advice, where it is no task."""
    try:
        return dict(typed(load_bounded(path.read_text(encoding="utf-8"), kind, str(path)), TaskSettings))
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = error.strerror if isinstance(error, OSError) else _said(error, str(path))
        raise UserError(f"The task {path} cannot be read: {why}.{advice}") from None


def _bounded(node: yaml.Node, where: str) -> yaml.Node:
    """The node. UserError where aliases make more than MOST_VALUES values of what is written."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        if id(node) not in sizes:
            sizes[id(node)] = 0  # a value that contains its own alias is refused by the reader
            inner = ([part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else
                     node.value if isinstance(node, yaml.SequenceNode) else [])
            sizes[id(node)] = 1 + sum(size(part) for part in inner)
        return sizes[id(node)]

    if (count := size(node)) > MOST_VALUES and count > len(sizes):
        raise UserError(f"{where} stands for {count:,} values by its aliases; at most {MOST_VALUES:,} are read. Write "
                        f"out what is meant.")
    return node


def _decoded(path: Path, named_by: str) -> str:
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:  # a ValueError for a name with a NUL
        advice = f"Correct {named_by}" if named_by else "Give an existing file with --config"
        raise UserError(f"The configuration file {path} cannot be read: {getattr(error, 'strerror', error)} (looked in "
                        f"{path.absolute().parent}). {advice}.") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise UserError(f"{path} is UTF-16, not UTF-8. Save it as UTF-8 (iconv -f utf-16 -t utf-8).") from None
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: the byte 0x{data[error.start]:02x} is not UTF-8. Save the file as UTF-8 "
                        f"(iconv -f latin1 -t utf-8, where it is Latin-1).") from None


class _Reader:
    """One file's nodes into values, with the place of each."""

    def __init__(self, loader: _Loader, path: Path, places: dict[Path_, str]) -> None:
        self.loader, self.path, self.places = loader, path, places
        self._open: list[yaml.Node] = []

    def value(self, node: yaml.Node, at: Path_) -> Any:
        """The node's value, at this place of the tree."""
        if any(node is outer for outer in self._open):
            raise UserError(f"{self._line(node)}: an alias in the value of '{'.'.join(map(str, at))}' stands for a "
                            f"value that contains the alias itself. Write the value out.")
        self.places[at] = self._line(node)
        self._open.append(node)
        try:
            if node.tag not in PLAIN:
                raise UserError(f"{self._line(node)}: the tag {node.tag} makes something else than a plain value of "
                                f"'{'.'.join(map(str, at))}'. Write the value without a tag.")
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, at)
            if isinstance(node, yaml.SequenceNode):
                return [self.value(item, (*at, index)) for index, item in enumerate(node.value)]
            return self.loader.construct_object(node)
        finally:
            self._open.pop()

    def _mapping(self, node: yaml.MappingNode, at: Path_) -> dict[str, Any]:
        """Its own keys, over those that `<<` merges in; of several merged mappings earlier ones win."""
        result: dict[str, Any] = {}
        for source in reversed([source for key, value in node.value if key.tag == MERGE
                                for source in self._merged(value)]):
            result.update(self.value(source, at))
        self.places[at] = self._line(node)
        own: set[str] = set()
        for key_node, value_node in node.value:
            if key_node.tag == MERGE:
                continue
            key = str(self.loader.construct_object(key_node))
            if key in own:
                raise UserError(f"{self._line(key_node)}: the key '{key}' is written twice. Keep one.")
            own.add(key)
            _forget(self.places, (*at, key))
            result[key] = self.value(value_node, (*at, key))
            self.places[(*at, key)] = self._line(key_node)
        return result

    def _merged(self, node: yaml.Node) -> list[yaml.MappingNode]:
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        if not all(isinstance(source, yaml.MappingNode) for source in sources):
            raise UserError(f"{self._line(node)}: `<<` takes a mapping or a list of mappings, as in `<<: *name`.")
        return list(sources)

    def _line(self, node: yaml.Node) -> str:
        return f"{self.path}:{node.start_mark.line + 1}"


def _merge(below: dict[str, Any], above: dict[str, Any], at: Path_, places: dict[Path_, str]) -> None:
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            _merge(below[key], value, (*at, key), places)
        else:
            _forget(places, (*at, key))
            below[key] = value


def _forget(places: dict[Path_, str], at: Path_) -> None:
    for known in [known for known in places if known[:len(at)] == at]:
        del places[known]
