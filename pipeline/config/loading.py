"""A configuration file with its bases and overrides into a checked `Config`, or every problem at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from drover.model.config import ModelConfig
from drover.pipeline.config.checks import problems
from drover.pipeline.config.data import FilesSource, HubSource, StdlibSource
from drover.pipeline.config.partial import UnknownSettingError, known_part
from drover.pipeline.config.plugins import left_out, load_plugins
from drover.pipeline.config.shapes import shape_in
from drover.pipeline.config.shipped import FILTERS, HOOKS, SINKS
from drover.pipeline.config.tree import Config
from drover.pipeline.config.yaml_source import Dumper, Path_, Values, read_yaml
from drover.pipeline.errors import UserError, listed
from drover.pipeline.files import sealed_text, sha256_json, write_text

CLUSTERS = Path(__file__).resolve().parents[2] / "configs" / "clusters"
"""Where the profiles of clusters are that are named without a folder."""
OF_A_STAGE = ("started.json", "manifest.json")
"""Files in a stage's folder: a folder with such folders is a run's."""


def load_config(path: str | Path, overrides: list[str] | tuple[str, ...] = (), *, check: bool = True) -> Config:
    """Read a configuration that the user gave: lay `path` over its `base:` files, apply overrides `a.b=c`, import its
    plugins, and validate.

    Args:
        path: YAML file. `base:` names one file or a list, relative to this file; later ones win. The cluster profile
            that `launch.cluster` names is laid under the section `launch`; in the result that key is null. The shape
            that `model.preset` names, published or a folder's, is laid under the section `model`; the result has no
            such key.
        overrides: `dotted.key=value` strings, the value read as YAML. The config.yaml of a run folder means the run in
            that folder, wherever it was when it was written, unless they name another.
        check: also refuse combinations that cannot work (`drover.pipeline.config.checks`).

    Raises:
        UserError: naming every problem with its file, line and key.
    """
    values = _read(path, overrides)
    if plugins := values.tree.get("plugins"):
        values.tree["plugins"] = load_plugins(plugins, Path(path), values.place(("plugins",)))
    config = _validated(values, path)
    if check and (found := problems(config)):
        raise refusal(found, path)
    return config


def read_without_plugins(path: Path) -> Config:
    """The configuration that a run's folder holds, with nothing imported; UserError as above."""
    values = _read(path, ())
    try:
        return _validated(values, path)
    except UserError as error:
        raise UserError(f"{error}\n{left_out(values.tree.get('plugins'), path.parent)}".rstrip()) from None


def dump_config(config: Config) -> str:
    """The resolved configuration as YAML, which reads back as an equal `Config`."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100)


def save_config(config: Config, path: Path) -> None:
    """Write the resolved configuration and prove that it loads back equal, unless that was done before."""
    text = sealed_text(dump_config(config))
    if path.is_file() and path.read_bytes() == text.encode():
        return
    write_text(path, text)
    if read_without_plugins(path) != config:
        path.unlink()  # else the next start would find it as written
        raise AssertionError(f"{path} does not load back to the configuration it was written from")


def config_hash(config: Config) -> str:
    """Hex sha256 of the whole resolved configuration."""
    return sha256_json(config.model_dump(mode="json"))


def _read(path: str | Path, overrides: list[str] | tuple[str, ...]) -> Values:
    return _with_preset(_with_profile(_with_overrides(path, overrides), Path(path)))


def _with_overrides(path: str | Path, overrides: list[str] | tuple[str, ...]) -> Values:
    values = _with_bases(Path(path), ())
    _find_itself(values, Path(path))
    if any(override.startswith("model.preset=") for override in overrides):
        values.tree.pop("model", None)
    for override in overrides:
        key, sign, text = override.partition("=")
        if not sign or not key:
            raise UserError(f"'{override}' is not an override. Write it as section.key=value, e.g. train.steps=50.")
        values.set(key.strip(), text)
    return values


def _find_itself(values: Values, path: Path) -> None:
    """Let the configuration of a run folder that was moved or copied name the folder that it is in."""
    folder = path.parent if path.parent.name not in ("", "..") else path.parent.resolve()
    if path.name != "config.yaml" or not any(next(folder.glob(f"*/{name}"), None) for name in OF_A_STAGE):
        return
    written = Path(str(values.tree.get("runs_dir")), str(values.tree.get("name")))
    if written.resolve() != folder.resolve():
        for key, value in (("runs_dir", str(folder.parent)), ("name", folder.name)):
            values.tree[key] = value
            values.places[(key,)] = f"the run folder {folder}"


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


def _with_preset(values: Values) -> Values:
    """Lay the section `model` over the shape that it names, published or of the weights in a folder. Whoever names one
    means all of it: what bases say of the shape is gone by now, and for a preset on the command line what the files
    say."""
    section = values.tree.get("model")
    if not isinstance(section, dict) or section.get("preset") is None:
        if isinstance(section, dict):
            section.pop("preset", None)
        return values
    from drover.model.presets import preset

    place, name = values.place(("model", "preset")), str(section.pop("preset"))
    try:
        found = shape_in(Path(name)) if Path(name).is_dir() else preset(name)
    except (UserError, ValueError) as error:
        raise UserError(f"{place}: {error}") from None
    shape = found.model_dump()
    if not {"ffn_dim_multiplier", "multiple_of"} & section.keys():  # one way to say the width, the plain one
        shape |= {"ffn_dim": found.hidden, "ffn_dim_multiplier": None, "multiple_of": ModelConfig().multiple_of}
    given, own = section.get("rope_scaling"), shape["rope_scaling"]
    if isinstance(given, dict) and own is not None and ("kind" in given) != ("kind" in own):
        shape["rope_scaling"] = None  # of another kind: nothing of it is left
    below = Values()
    below.tree = {"model": shape}
    below.places = {("model", key): f"the preset {name}" for key in shape}
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
    looked = " and ".join(str(candidate.absolute()) for candidate in candidates)
    raise UserError(f"{place}: there is no cluster profile '{name}' (looked for {looked}). Known here: "
                    f"{', '.join(known) or 'none'}; or give a file, such as --cluster ./ours.yaml.")


def _validated(values: Values, path: str | Path) -> Config:
    try:
        return Config.model_validate(values.tree)
    except ValidationError as error:
        texts = [_path(item["loc"], values.tree) for item in error.errors() if item["type"] == "string_type"]
        whole = [_path(item["loc"], values.tree) for item in error.errors() if item["type"] == "int_type"]
        if values.take_words(texts) | values.take_whole_numbers(whole):
            return _validated(values, path)
        found = [_sentence(item, values) for item in error.errors()] + _combinations(error, values)
        raise refusal(found, path) from None


def _with_bases(path: Path, seen: tuple[Path, ...], named_by: str = "") -> Values:
    own = read_yaml(path, named_by)
    resolved = path.resolve()
    if resolved in seen:
        chain = " -> ".join(str(step) for step in (*seen, resolved))
        raise UserError(f"The configuration {path} is its own base: {chain}. Remove one `base:`.")
    named_by = f"`base:` in {own.place(('base',))}"
    bases = own.tree.pop("base", [])
    if not (isinstance(bases, str) or (isinstance(bases, list) and all(isinstance(base, str) for base in bases))):
        raise UserError(f"{own.place(('base',))}: `base` is a file name or a list of them, not {bases!r}.")
    values = Values()
    for base in [bases] if isinstance(bases, str) else bases:
        values.merge(_with_bases(path.parent / base, (*seen, resolved), named_by))
    if isinstance(own.tree.get("model"), dict) and "preset" in own.tree["model"]:
        values.tree.pop("model", None)
    values.merge(own)
    return values


def _sentence(error: Any, values: Values) -> str:
    at = _path(error["loc"], values.tree)
    key, place = ".".join(map(str, at)) or "(top level)", values.place(at)
    given = error.get("input")
    if error["type"] == "extra_forbidden":
        return f"{place}: unknown key '{key}'; {_suggested(at, values.tree)[0]}"
    if error["type"] == "missing":
        return f"{place}: '{key}' is missing."
    message = error["msg"][0].lower() + error["msg"][1:]
    if error["type"] == "impossible":
        return f"{place}: '{key}': {message}."
    shown = repr(given) if not isinstance(given, (dict, list)) else f"a {type(given).__name__}"
    return f"{place}: '{key}' is {shown} ({type(given).__name__}): {message}{'' if message.endswith('?') else '.'}"


def _combinations(error: ValidationError, values: Values) -> list[str]:
    """Combinations that cannot work among the settings that are right by themselves."""
    wrong = [_path(item["loc"], values.tree) for item in error.errors()]
    meant = [_suggested(at, values.tree)[1] for at, item in zip(wrong, error.errors(), strict=True)
             if item["type"] == "extra_forbidden"]
    try:
        return problems(known_part(values.tree, wrong, [key for key in meant if key is not None]))
    except UnknownSettingError:
        return []


def _suggested(at: Path_, tree: Any) -> tuple[str, str | None]:
    from drover.pipeline.config.field_names import suggestion

    return suggestion(".".join(map(str, at[:-1])), str(at[-1]), _known_keys(at[:-1], tree))


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
    for depth, part in enumerate(at):
        node = node[part]
        if isinstance(section, type) and issubclass(section, BaseModel):
            section = section.model_fields[str(part)].annotation
        if isinstance(part, int) and isinstance(node, dict):
            section = _item_class(node.get("kind"), ".".join(map(str, at[:depth]))) or section
    sections = _sections_in(section)
    of_kind = [found for found in sections
               if isinstance(node, dict) and ("kind" in node) == ("kind" in found.model_fields)]
    for found in (of_kind or sections)[:1]:
        return [*found.model_fields, *(["preset"] if found is ModelConfig else [])]
    return []


def _sections_in(annotation: Any) -> list[type[BaseModel]]:
    """The sections that a field may be."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in get_args(annotation) for found in _sections_in(part)]


def _item_class(kind: Any, setting: str) -> Any:
    """The section of an item of a list by its kind; None in a list without kinds."""
    if setting == "shard.sources":
        return {"stdlib": StdlibSource, "files": FilesSource, "hf": HubSource}.get(kind)
    return next((kinds.shipped_class(kind) for kinds in (FILTERS, HOOKS, SINKS) if kinds.setting == setting), None)


def refusal(found: list[str], path: Path | str) -> UserError:
    """What is raised for problems in a configuration, all of them."""
    count = "1 problem" if len(found) == 1 else f"{len(found)} problems"
    return UserError(f"{count} in the configuration {path}:\n{listed(found)}")
