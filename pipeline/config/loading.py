"""A configuration file with its bases and overrides into a checked `Config`, or every problem at once."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from pipeline.config.checks import problems
from pipeline.config.tree import Config
from pipeline.config.yaml_source import Dumper, Path_, Values, read_yaml
from pipeline.errors import UserError, listed
from pipeline.files import sha256_json, write_text

CLUSTERS = Path(__file__).resolve().parents[2] / "configs" / "clusters"
"""Where the profiles of clusters are that are named without a folder."""


def load_config(path: str | Path, overrides: list[str] | tuple[str, ...] = (), *, check: bool = True) -> Config:
    """Read `path`, lay it over its `base:` files, apply overrides `a.b=c`, and validate.

    Args:
        path: YAML file. `base:` names one file or a list, relative to this file; later ones win. The cluster profile
            that `launch.cluster` names is laid under the section `launch`; in the result that key is null.
        overrides: `dotted.key=value` strings, the value read as YAML.
        check: also refuse combinations that cannot work (`pipeline.config.checks`).

    Raises:
        UserError: naming every problem with its file, line and key.
    """
    values = _with_profile(_with_overrides(path, overrides), Path(path))
    config = _validated(values, path)
    if check and (found := problems(config)):
        raise UserError(f"{_count(found)} in the configuration {path}:\n{listed(found)}")
    return config


def cluster_profile(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> str | None:
    """The name or file of the cluster profile that a configuration takes in, if it names one; UserError as above."""
    name = _launch_section(_with_overrides(path, overrides)).get("cluster")
    return None if name is None else str(name)


def dump_config(config: Config) -> str:
    """The resolved configuration as YAML; `load_config` of it gives an equal `Config`."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100)


def save_config(config: Config, path: Path) -> None:
    """Write the resolved configuration and prove that it loads back equal."""
    write_text(path, dump_config(config))
    if load_config(path, check=False) != config:
        raise AssertionError(f"{path} does not load back to the configuration it was written from")


def config_hash(config: Config) -> str:
    """Hex sha256 of the whole resolved configuration."""
    return sha256_json(config.model_dump(mode="json"))


def _with_overrides(path: str | Path, overrides: list[str] | tuple[str, ...]) -> Values:
    values = _with_bases(Path(path), ())
    for override in overrides:
        key, sign, text = override.partition("=")
        if not sign or not key:
            raise UserError(f"'{override}' is not an override. Write it as section.key=value, e.g. train.steps=50.")
        values.set(key.strip(), text)
    return values


def _with_profile(values: Values, path: Path) -> Values:
    """Lay the configuration over the cluster profile that it names."""
    name = _launch_section(values).pop("cluster", None)
    if name is None:
        return values
    profile = read_yaml(_profile_path(str(name), path, values.place(("launch", "cluster"))))
    if not {"launch", "base"}.isdisjoint(profile.tree):
        raise UserError(f"{profile.place(())}: a cluster profile holds the keys of the section `launch` themselves "
                        f"(partition, setup, train: ...), no `launch:` or `base:` around them.")
    below = Values()
    below.tree = {"launch": profile.tree}
    below.places = {("launch", *at): place for at, place in profile.places.items()}
    below.merge(values)
    below.words = values.words
    return below


def _launch_section(values: Values) -> dict[str, Any]:
    launch = values.tree.get("launch")
    return launch if isinstance(launch, dict) else {}


def _profile_path(name: str, config: Path, place: str) -> Path:
    if "/" in name or name.endswith((".yaml", ".yml")):
        candidates = [Path(name), config.parent / name]
    else:
        candidates = [config.parent / "clusters" / f"{name}.yaml", CLUSTERS / f"{name}.yaml"]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    known = sorted({found.stem for folder in (config.parent / "clusters", CLUSTERS) for found in folder.glob("*.yaml")})
    raise UserError(f"{place}: there is no cluster profile '{name}' (looked for {candidates[0]}). Known here: "
                    f"{', '.join(known) or 'none'}; or give a file, such as --cluster ./ours.yaml.")


def _validated(values: Values, path: str | Path) -> Config:
    try:
        return Config.model_validate(values.tree)
    except ValidationError as error:
        texts = [_path(item["loc"], values.tree) for item in error.errors() if item["type"] == "string_type"]
        if values.take_words(texts):
            return _validated(values, path)
        found = [_sentence(item, values) for item in error.errors()]
        raise UserError(f"{_count(found)} in the configuration {path}:\n{listed(found)}") from None


def _with_bases(path: Path, seen: tuple[Path, ...]) -> Values:
    resolved = path.resolve()
    if resolved in seen:
        chain = " -> ".join(str(step) for step in (*seen, resolved))
        raise UserError(f"The configuration {path} is its own base: {chain}. Remove one `base:`.")
    own = read_yaml(path)
    bases = own.tree.pop("base", [])
    if not (isinstance(bases, str) or (isinstance(bases, list) and all(isinstance(base, str) for base in bases))):
        raise UserError(f"{own.place(('base',))}: `base` is a file name or a list of them, not {bases!r}.")
    values = Values()
    for base in [bases] if isinstance(bases, str) else bases:
        values.merge(_with_bases(path.parent / base, (*seen, resolved)))
    values.merge(own)
    return values


def _sentence(error: Any, values: Values) -> str:
    at = _path(error["loc"], values.tree)
    key, place = ".".join(map(str, at)) or "(top level)", values.place(at)
    given = error.get("input")
    if error["type"] == "extra_forbidden":
        known = _known_keys(at[:-1], values.tree)
        close = difflib.get_close_matches(str(at[-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean '{close[0]}'?" if close else f"known here: {', '.join(known)}."
        return f"{place}: unknown key '{key}'; {hint}"
    if error["type"] == "missing":
        return f"{place}: '{key}' is missing."
    message = error["msg"][0].lower() + error["msg"][1:]
    shown = repr(given) if not isinstance(given, (dict, list)) else f"a {type(given).__name__}"
    return f"{place}: '{key}' is {shown} ({type(given).__name__}): {message}."


def _path(location: tuple[Any, ...], tree: Any) -> Path_:
    """Pydantic's location without the names it adds for the members of a union."""
    path: list[Any] = []
    node = tree
    for index, part in enumerate(location):
        last = index == len(location) - 1
        if isinstance(node, dict) and (part in node or last):
            node = node.get(part)
        elif isinstance(node, list) and isinstance(part, int) and part < len(node):
            node = node[part]
        elif not last or (node is not None and not isinstance(node, (dict, list))):
            continue
        path.append(part)
    return tuple(path)


def _known_keys(at: Path_, tree: Any) -> list[str]:
    """The keys that the section at `at` knows."""
    section: Any = Config
    node = tree
    for part in at:
        node = node[part]
        if isinstance(section, type) and issubclass(section, BaseModel):
            section = section.model_fields[str(part)].annotation
        if isinstance(part, int) and isinstance(node, dict):
            section = _source_class(node.get("kind"))
    for candidate in [section, *getattr(section, "__args__", ())]:
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return list(candidate.model_fields)
    return []


def _source_class(kind: Any) -> Any:
    from pipeline.config.data import FilesSource, HubSource, StdlibSource
    return {"stdlib": StdlibSource, "files": FilesSource, "hf": HubSource}.get(kind)


def _count(found: list[str]) -> str:
    return "1 problem" if len(found) == 1 else f"{len(found)} problems"
