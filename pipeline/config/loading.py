"""A configuration file with its bases and overrides into a checked `Config`, or every problem at once."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from drover.model.config import ModelConfig
from drover.pipeline.config.checks import problems
from drover.pipeline.config.plugins import left_out, load_plugins, warn
from drover.pipeline.config.section import local_path, sections_in, sentence, shortened
from drover.pipeline.config.shapes import shape_in
from drover.pipeline.config.shipped import FILTERS, HOOKS, SINKS
from drover.pipeline.config.tree import Config
from drover.pipeline.config.yaml_source import (
    Dumper,
    Key,
    Path_,
    Tree,
    file_of,
    keyed,
    merge,
    override,
    place_of,
    put,
    read_yaml,
)
from drover.pipeline.core.errors import REPOSITORY, UserError, listed
from drover.pipeline.core.files import sealed_text, sha256_json, write_text

CLUSTERS = REPOSITORY / "configs" / "clusters"
"""The folder of cluster profiles that are named without a folder."""
OF_A_STAGE = ("started.json", "manifest.json")
"""Files in a stage's folder. A folder with such folders is a run's."""
MOST_PROBLEMS = 40
"""Problems of a configuration that are listed."""
KINDS = {kinds.setting: kinds for kinds in (FILTERS, HOOKS, SINKS)}


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
    typed = [_parted(override) for override in overrides]
    tree = _read(Path(path), typed, "Give an existing file with --config.")
    if plugins := tree.get("plugins"):
        place = place_of(tree, ("plugins",))
        tree["plugins"] = load_plugins(plugins, file_of(place) or Path(path), place)
    config = _validated(tree, path, dict(typed))
    if check and (found := problems(config)):
        raise refusal(found, path)
    return config


def read_without_plugins(path: Path) -> Config:
    """The configuration in a run's folder, without importing anything; UserError as in `load_config`.

    It is complete as `save_config` writes it. So nobody who made the folder can name other files to read.
    """
    tree = read_yaml(path, "Put it back: a run is read by it.")
    for at in (("base",), ("launch", "cluster"), ("model", "preset")):
        section = tree.get(at[0]) if at[1:] else tree
        if isinstance(section, dict) and section.get(at[-1]) is not None:
            raise UserError(f"{place_of(tree, at)}: `{'.'.join(at)}` is in no run's configuration: Drover writes that "
                            f"complete. Put the run's own file back, or give yours with --config.")
    _find_itself(tree, path)
    try:
        return _validated(tree, path, {})
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


def _read(path: Path, overrides: Iterable[tuple[str, str]], advice: str) -> Tree:
    """The values of the files and overrides, on top of the cluster profile and the shape that they name."""
    tree = _with_bases(path, (), advice)
    _find_itself(tree, path)
    if "model.preset" in dict(overrides):
        tree.pop("model", None)
    for key, text in overrides:
        override(tree, key, text)
    for section, key, named in (("launch", "cluster", _profile), ("model", "preset", _shape)):
        given, place = tree.get(section), place_of(tree, (section, key))
        if isinstance(given, dict) and (name := given.pop(key, None)) is not None:
            try:
                tree[section] = merge(named(local_path(str(name)), given, place, path), given)
            except OSError as error:  # the name is too long for a path
                raise UserError(f"{place}: {section}.{key} names {str(name)[:50]!r}, which cannot be opened "
                                f"({error.strerror}).") from None
    return tree


def _with_bases(path: Path, above: tuple[Path, ...], advice: str) -> Tree:
    """A file merged over its bases. above: the files that named it as a base."""
    own, chain = read_yaml(path, advice, piped=not above), (*above, path.resolve())
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
        if isinstance(own_shape := part.get("model"), dict) and "preset" in own_shape:
            tree.pop("model", None)  # a preset replaces the whole section of a base
        merge(tree, part)
    return tree


def _find_itself(tree: Tree, path: Path) -> None:
    """If the file is a run's own configuration, let it name the run's present folder: it may have been moved or copied.
    An earlier Drover may have written it, so settings that were removed since are dropped."""
    folder = path.parent if path.parent.name not in ("", "..") else path.parent.resolve()
    if path.name != "config.yaml" or not any(next(folder.glob(f"*/{name}"), None) for name in OF_A_STAGE):
        return
    _drop_deleted(tree, path)
    if Path(str(tree.get("runs_dir")), str(tree.get("name"))).resolve() != folder.resolve():
        for key, value in (("runs_dir", str(folder.parent)), ("name", folder.name)):
            put(tree, Key.at(key, f"the run folder {folder}"), value)


def _drop_deleted(tree: Tree, path: Path) -> None:
    """Drop the settings that were removed from Drover; those that had a value are named."""
    from drover.pipeline.config.field_names import DELETED_SETTINGS

    for key, instead in DELETED_SETTINGS.items():
        *sections, last = key.split(".")
        section: Any = tree
        for name in sections:
            section = section.get(name) if isinstance(section, dict) else None
        if isinstance(section, dict) and section.pop(last, None):
            warn(f"{path}: the setting {key} was removed and is ignored: {instead}")


def _profile(name: str, given: Tree, place: str, config: Path) -> Tree:
    """What a cluster's profile sets in the section launch."""
    beside = config.parent / "clusters"
    candidates = [Path(name), config.parent / name] if "/" in name or name.endswith((".yaml", ".yml")) else \
        [beside / f"{name}.yaml", CLUSTERS / f"{name}.yaml"]
    path = next((candidate for candidate in candidates if candidate.is_file()), None)
    if path is None:
        known = sorted({found.stem for folder in (beside, CLUSTERS) for found in folder.glob("*.yaml")})
        looked = " and ".join(str(candidate.absolute()) for candidate in candidates)
        raise UserError(f"{place}: there is no cluster profile '{name}' (looked for {looked}). Known here: "
                        f"{', '.join(known) or 'none'}; or give a file, such as --cluster ./ours.yaml.")
    profile = read_yaml(path)
    if not {"launch", "base"}.isdisjoint(profile):
        raise UserError(f"{path}: a cluster profile holds the keys of the section `launch` themselves (partition, "
                        f"setup, train: ...), no `launch:` or `base:` around them.")
    return profile


def _shape(name: str, given: Tree, place: str, config: Path) -> Tree:
    """The section `model` of a preset, or of the weights in a folder."""
    from drover.model.presets import preset

    try:
        found = shape_in(Path(name)) if Path(name).is_dir() else preset(name)
    except (UserError, ValueError) as error:
        raise UserError(f"{place}: {error}") from None
    shape = found.model_dump()
    if not {"ffn_dim_multiplier", "multiple_of"} & given.keys():  # store the width itself, not the rule for it
        shape |= {"ffn_dim": found.hidden, "ffn_dim_multiplier": None, "multiple_of": ModelConfig().multiple_of}
    scaling, own = given.get("rope_scaling"), shape["rope_scaling"]
    if isinstance(scaling, dict) and own is not None and ("kind" in scaling) != ("kind" in own):
        shape["rope_scaling"] = None  # another kind replaces it as a whole
    return keyed(shape, f"the preset {name}")


def _validated(tree: Tree, path: str | Path, typed: dict[str, str]) -> Config:
    """typed: the overrides as they were typed."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        wrong = [(_path(item["loc"], tree), item) for item in error.errors()]
    keys = [".".join(map(str, at)) for at, _ in wrong]
    texts = [key for key, (_, item) in zip(keys, wrong, strict=True) if item["type"] == "string_type" and key in typed]
    for key in texts:  # a text that looks like a number
        override(tree, key, typed[key], as_text=True)
    if texts:
        return _validated(tree, path, {})
    found, unknown, pruned = [], [], copy.deepcopy(tree)
    for key, (at, item) in zip(keys, wrong, strict=True):
        instead = ""
        if item["type"] == "extra_forbidden":
            from drover.pipeline.config.field_names import suggestion

            instead, meant = suggestion(key, _known_keys(at[:-1], tree))
            unknown += [meant] if meant else []
        found.append(f"{place_of(tree, at)}: {sentence(item, key or '(top level)', instead)}")
        unknown.append(_cut(pruned, at))
    with suppress(ValidationError):  # problems that do not depend on the wrong values
        found += problems(Config.model_validate(pruned), unknown)
    raise refusal(found, path)


def _cut(tree: Any, path: Path_) -> str:
    """Remove the value at a path, or the whole list that contains it; returns what was removed, dotted."""
    for depth, key in enumerate(path, 1):
        if not isinstance(tree, dict) or key not in tree:
            break  # removed with another value, or missing in the first place
        if depth == len(path) or isinstance(tree[key], list):
            del tree[key]
            return ".".join(map(str, path[:depth]))
        tree = tree[key]
    return ".".join(map(str, path))


def _path(location: tuple[Any, ...], tree: Any) -> Path_:
    """Pydantic's location, without the names that it adds for members of a union."""
    path: list[Any] = []
    for number, part in enumerate(location, 1):
        if isinstance(tree, dict) and (part in tree or number == len(location)):
            tree = tree.get(part)
        elif isinstance(tree, list) and isinstance(part, int):
            tree = tree[part]
        else:
            continue
        path.append(part)
    return tuple(path)


def _known_keys(at: Path_, tree: Any) -> list[str]:
    """The keys of the section at `at`."""
    sections: list[type[BaseModel]] = [Config]
    for depth, part in enumerate(at):
        tree = tree[part]
        kind = tree.get("kind") if isinstance(tree, dict) else None
        if isinstance(part, str) and part in sections[0].model_fields:  # else a key of a mapping
            sections = sections_in(sections[0].model_fields[part].annotation)
        elif (kinds := KINDS.get(".".join(map(str, at[:depth])))) is not None:
            sections = [kinds.shipped_class(kind) or sections[0]]
        kinds_of = [get_args(one.model_fields["kind"].annotation) if "kind" in one.model_fields else (None,)
                    for one in sections]
        sections = [one for one, of in zip(sections, kinds_of, strict=True) if kind in of] or sections
    known = [*sections[0].model_fields] if sections else []
    return known + ["preset"] * (at == ("model",))


def refusal(found: list[str], path: Path | str) -> UserError:
    """The error that reports all problems of a configuration; of very many, the first."""
    count = "1 problem" if len(found) == 1 else f"{len(found):,} problems"
    found = [shortened(problem, 2000) for problem in found]
    more = [f"and {len(found) - MOST_PROBLEMS:,} more"] if len(found) > MOST_PROBLEMS else []
    return UserError(f"{count} in the configuration {path}:\n{listed([*found[:MOST_PROBLEMS], *more])}")
