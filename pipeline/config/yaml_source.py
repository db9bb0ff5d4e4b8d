"""YAML text into values that remember the file and line they were written in."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from pipeline.errors import UserError

Path_ = tuple[str | int, ...]
"""Where a value stands in the tree: ("train", "lr") or ("shard", "sources", 0, "name")."""


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
            node: Any = self.tree
            for key in path[:-1]:
                node = node[key]
            node[path[-1]] = self.words.pop(path)
        return bool(taken)

    def set(self, dotted: str, text: str) -> None:
        """Apply an override `a.b=text`, `text` being read as YAML. Numbers in the path index lists."""
        keys: Path_ = tuple(int(key) if key.isdigit() else key for key in dotted.split("."))
        try:
            value = yaml.load(text, _Loader)
        except yaml.YAMLError as error:
            raise UserError(f"The override {dotted}={text} is not valid YAML: {error}. Quote the value.") from None
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


def read_yaml(path: Path) -> Values:
    """The values of one YAML file; UserError for a missing file, broken YAML or a key written twice."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"The configuration file {path} cannot be read: {error.strerror}. "
                        f"Give an existing file with --config.") from None
    values = Values()
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is not None:
            values.tree = _construct(loader, node, (), path, values.places)
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(values.tree, dict):
        raise UserError(f"{path} does not hold a mapping of settings, but a {type(values.tree).__name__}.")
    return values


def _construct(loader: _Loader, node: yaml.Node, at: Path_, path: Path, places: dict[Path_, str]) -> Any:
    places[at] = f"{path}:{node.start_mark.line + 1}"
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(loader.construct_object(key_node))
            if key in result:
                raise UserError(f"{path}:{key_node.start_mark.line + 1}: the key '{key}' is written twice. Keep one.")
            result[key] = _construct(loader, value_node, (*at, key), path, places)
            places[(*at, key)] = f"{path}:{key_node.start_mark.line + 1}"
        return result
    if isinstance(node, yaml.SequenceNode):
        return [_construct(loader, item, (*at, index), path, places) for index, item in enumerate(node.value)]
    return loader.construct_object(node)


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
