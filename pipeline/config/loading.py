"""A configuration file with its bases and overrides into a checked `Config`, or every problem at once."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from drover.model.config import ModelConfig
from drover.pipeline.config.checks import problems
from drover.pipeline.config.field_names import suggestion
from drover.pipeline.config.kinds import Kind
from drover.pipeline.config.plugins import left_out, load_plugins
from drover.pipeline.config.section import local_path, sections_in, sentence, shortened
from drover.pipeline.config.shapes import shape_in
from drover.pipeline.config.shipped import FILTERS, SINKS
from drover.pipeline.config.tree import Config
from drover.pipeline.config.yaml_source import Dumper, Key, Tree, folder_of, merge, override, place_of, read_yaml
from drover.pipeline.core.errors import REPOSITORY, UserError, listed
from drover.pipeline.core.files import sealed_text, sha256_json, write_text

CLUSTERS = REPOSITORY / "configs" / "clusters"
"""The folder of cluster profiles that are named without a folder."""
OF_A_STAGE = ("started.json", "manifest.json")
"""Files in a stage's folder. A folder with such folders is a run's."""
MOST_PROBLEMS = 40
"""Problems of a configuration that are listed."""


def load_config(path: str | Path, overrides: list[str] | tuple[str, ...] = (), *, check: bool = True) -> Config:
    """Read the user's configuration: `path` overrides its `base:` files, and `overrides` override both. Plugins are
    imported, and the result is validated.

    Args:
        path: YAML file. `base:` names one file or a list, relative to this file; later ones win. The section `launch`
            overrides the cluster profile that `launch.cluster` names; in the result that key is null. The section
            `model` overrides the shape that `model.preset` names, published or a folder's; the result has no such key.
        overrides: `dotted.key=value` strings, the value read as YAML. The config.yaml of a run folder means the run in
            that folder, wherever it was when it was written, unless they name another.
        check: also refuse combinations that cannot work (`drover.pipeline.config.checks`).

    Raises:
        UserError: naming every problem with its file, line and key.
    """
    path = Path(path)
    typed = dict(map(_parted, overrides))
    tree = _of_a_run(_with_bases(path, (), "Give an existing file with --config."), path)
    if "model.preset" in typed:
        tree.pop("model", None)
    for key, text in typed.items():
        tree = override(tree, key, text)
    for section, key, read in (("launch", "cluster", _profile), ("model", "preset", _shape)):
        if isinstance(given := tree.get(section), dict) and key in given:
            own = {name: value for name, value in given.items() if name != key}
            place = place_of(tree, (section, key))
            tree[section] = own if given[key] is None else read(local_path(str(given[key])), own, place, path)
    if plugins := tree.get("plugins"):
        place = place_of(tree, ("plugins",))
        tree["plugins"] = load_plugins(plugins, folder_of(place, path.parent), place)
    config = _validated(tree, path, typed)
    if check and (wrong := problems(config)):
        raise refusal(wrong, path)
    return config


def read_without_plugins(path: Path) -> Config:
    """The configuration in a run's folder, without importing anything; UserError as in `load_config`.

    It is complete as `save_config` writes it. So nobody who made the folder can name other files to read.
    """
    tree = read_yaml(path, "Put it back: a run is read by it.")
    try:
        return _validated(_of_a_run(tree, path), path, {})
    except UserError as error:
        raise UserError(f"{error}\n{left_out(tree.get('plugins'), path.parent)}".rstrip()) from None


def dump_config(config: Config) -> str:
    """The resolved configuration as YAML, which reads back as an equal `Config`."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100)


def save_config(config: Config, path: Path) -> None:
    """Write the resolved configuration and prove that it loads back equal, unless the file has this content already."""
    text = sealed_text(dump_config(config))
    if path.is_file() and path.read_bytes() == text.encode():
        return
    write_text(path, text)
    if read_without_plugins(path) != config:
        path.unlink()  # otherwise the next start would take it as saved
        raise AssertionError(f"{path} does not load back to the configuration it was written from")


def config_hash(config: Config) -> str:
    """Hex sha256 of the whole resolved configuration."""
    return sha256_json(config.model_dump(mode="json"))


def _parted(override: str) -> tuple[str, str]:
    key, sign, text = override.partition("=")
    if not sign or not key:
        raise UserError(f"'{override}' is not an override. Write it as section.key=value, e.g. train.steps=50.")
    return key.strip(), text


def _with_bases(path: Path, above: tuple[Path, ...], advice: str) -> Tree:
    """A file merged over its bases. above: the files that named it as a base."""
    own = read_yaml(path, advice, pipe=not above)
    chain = (*above, path.resolve())
    if chain[-1] in above:
        raise UserError(f"The configuration {path} is its own base: {' -> '.join(map(str, chain))}. Remove one "
                        f"`base:`.")
    place, given = place_of(own, ("base",)), own.pop("base", [])
    bases = [given] if isinstance(given, str) else given
    if not (isinstance(bases, list) and all(isinstance(base, str) for base in bases)):
        raise UserError(f"{place}: `base` is a file name or a list of them, not {given!r}.")
    tree: Tree = {}
    for part in [*(_with_bases(path.parent / local_path(base), chain, f"Correct `base:` in {place}.")
                   for base in bases), own]:
        if isinstance(shape := part.get("model"), dict) and "preset" in shape:
            tree.pop("model", None)  # a preset replaces the whole section of a base
        tree = merge(tree, part)
    return tree


def _of_a_run(tree: Tree, path: Path) -> Tree:
    """If the file is a run's own configuration: the same with the run's present folder, which may have been moved, and
    without settings that Drover no longer has."""
    folder = path.parent if path.parent.name not in ("", "..") else path.parent.resolve()
    if path.name != "config.yaml" or not any(next(folder.glob(f"*/{name}"), None) for name in OF_A_STAGE):
        return tree
    config = _validated(tree, path, {}, extra="ignore")
    same = config.folder.resolve() == folder.resolve()
    place = f"the run folder {folder}"
    return merge(config.model_dump(mode="json"), {} if same else {
        Key.at("runs_dir", place): str(folder.parent), Key.at("name", place): folder.name})


def _profile(name: str, given: Tree, place: str, config: Path) -> Tree:
    """The section `launch`, over the profile of a cluster."""
    known = {path.stem: path for folder in (CLUSTERS, config.parent / "clusters") for path in folder.glob("*.yaml")}
    path = known.get(name) or folder_of(place, Path()) / name
    return merge(read_yaml(path, f"{place} names it as a cluster profile. Give a file, or one of {', '.join(known)}."),
                 given)


def _shape(name: str, given: Tree, place: str, config: Path) -> Tree:
    """The section `model`, over the shape of a preset or of the weights in a folder."""
    from drover.model.presets import preset

    try:
        model = shape_in(Path(name)) if os.path.isdir(name) else preset(name)  # noqa: PTH112 - of any length
    except (UserError, ValueError) as error:
        raise UserError(f"{place}: {shortened(str(error), 2000)}") from None
    shape = model.model_dump()
    if not {"ffn_dim_multiplier", "multiple_of"} & given.keys():  # store the width itself, not the rule for it
        shape |= {"ffn_dim": model.hidden, "ffn_dim_multiplier": None, "multiple_of": ModelConfig().multiple_of}
    scaling, own = given.get("rope_scaling"), shape["rope_scaling"]
    if isinstance(scaling, dict) and own is not None and ("kind" in scaling) != ("kind" in own):
        shape["rope_scaling"] = None  # another kind replaces it as a whole
    return merge(shape, given)


def _validated(tree: Tree, path: Path, typed: dict[str, str], extra: Literal["forbid", "ignore"] = "forbid") -> Config:
    """typed: the overrides as they were typed."""
    try:
        return Config.model_validate(tree, extra=extra)
    except ValidationError as error:
        wrong = [(*_located(problem, tree), problem) for problem in error.errors()]
    if texts := {key for key, _, _, problem in wrong if problem["type"] == "string_type" and key in typed}:
        for key in texts:  # a name may look like a number
            tree = override(tree, key, json.dumps(typed[key]))
        return _validated(tree, path, {})
    raise refusal([f"{place}: {sentence(problem, key or '(top level)', suggestion(key, known))}"
                   for key, place, known, problem in wrong], path)


def _located(problem: ErrorDetails, tree: Tree) -> tuple[str, str, list[str]]:
    """For one of pydantic's errors, whose locations also have names of members of unions: the setting, dotted; its
    place; and all keys of its section."""
    value: Any = tree
    path: list[Any] = []
    known: list[str] = []
    sections: list[type[BaseModel]] = [Config]
    for part in problem["loc"]:
        if isinstance(value, list) and isinstance(part, int):
            value = value[part]
        elif isinstance(value, dict) and (part in value or problem["type"] == "missing"):
            fields = _fields(sections, value.get("kind"))
            known = [*fields]
            sections = sections_in(fields[part].annotation) if part in fields else sections
            value = value.get(part)
        else:
            continue
        path.append(part)
    known += ["preset"] if path[:-1] == ["model"] else []
    return ".".join(map(str, path)), place_of(tree, path), known


def _fields(sections: list[type[BaseModel]], kind: Any) -> dict[str, FieldInfo]:
    """The fields of that one of the sections which is of a kind; else of the first."""
    sections = [FILTERS.shipped_class(kind) or SINKS.shipped_class(kind) or one if one is Kind else one
                for one in sections]
    fitting = [one for one in sections if "kind" in one.model_fields
               and kind in get_args(one.model_fields["kind"].annotation)]
    return next((one.model_fields for one in (*fitting, *sections)), {})


def refusal(wrong: list[str], path: Path | str) -> UserError:
    """The error that reports all problems of a configuration; of very many, the first."""
    count = f"{len(wrong):,} problem{'s' * (len(wrong) > 1)} in the configuration {path}"
    more = [f"and {len(wrong) - MOST_PROBLEMS:,} more"] if len(wrong) > MOST_PROBLEMS else []
    return UserError(f"{count}:\n{listed([*(shortened(problem, 2000) for problem in wrong[:MOST_PROBLEMS]), *more])}")
