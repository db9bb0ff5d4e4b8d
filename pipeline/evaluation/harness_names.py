"""The names of lm-evaluation-harness's own tasks, groups and tags, without an import of the harness.

Its 14,000 YAML files are searched as text for the keys that name something: under a second, where the harness's index
parses all of them in 15 to 30 seconds. Both find the same.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

NAMING = re.compile(rb"""^["']?(task|group|tag|include|class)["']?[ ]*:((?:.*)(?:\n(?:[ \t-].*)?)*)""", re.MULTILINE)
"""A key at the beginning of a line, and its value up to the next one."""
PLAIN = re.compile(rb"\s*[\"']?([\w./-]*[A-Za-z][\w./-]*)[\"']?\s*")
"""A value that is one name."""


class _Names(yaml.CSafeLoader):
    """Safe YAML, in which a function's name is its text."""


_Names.add_constructor("!function", lambda _, node: str(node.value))


@dataclass(frozen=True)
class HarnessName:
    """path: the YAML file of a task or group; None for a tag, which names `tasks`."""

    path: Path | None
    tasks: tuple[str, ...] = ()


@cache
def harness_names() -> Mapping[str, HarnessName]:
    """What each name means; nothing if the harness is not installed."""
    package = find_spec("lm_eval")
    if package is None or not package.submodule_search_locations:
        return {}
    root = Path(package.submodule_search_locations[0]) / "tasks"
    heads = dict[str, dict[str, Any]]()
    names = dict[str, HarnessName]()
    tagged = dict[str, list[str]]()
    for path in sorted(root.glob("**/*.yaml"), key=Path.as_posix):  # the harness's order: of two the first counts
        head = _head(str(path), heads)
        name = head.get("task") if "class" in head else head.get("group") or head.get("task")
        if not isinstance(name, str) or name in names:
            continue
        names[name] = HarnessName(path)
        if "group" not in head:
            tags = head.get("tag") or []
            for tag in [tags] if isinstance(tags, str) else tags:
                tagged.setdefault(tag, []).append(name)
    return {**{tag: HarnessName(None, tuple(sorted(tasks))) for tag, tasks in tagged.items()}, **names}


def _head(path: str, heads: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The naming keys of a YAML file, included ones merged. heads: of the files that were read."""
    if path not in heads:
        heads[path] = {}  # a file that includes itself ends here
        own = dict[str, Any]()
        for key, value in NAMING.findall(Path(path).read_bytes()):
            plain = PLAIN.fullmatch(value)
            own[key.decode()] = plain[1].decode() if plain else yaml.load(b"x:" + value, _Names)["x"]
        included = own.pop("include", None) or []
        merged = dict[str, Any]()
        for entry in [included] if isinstance(included, str) else included:
            merged.update(_head(os.path.normpath(Path(path).parent / entry), heads))
        heads[path] = {**merged, **own}
    return heads[path]
