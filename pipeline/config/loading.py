"""A configuration file with its bases and overrides into a checked `Config`, or every problem at once.

Keys remember the file and line where they were written. Also the shape of weights in a folder, which `model.preset` may
name."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from drover.model.config import ModelConfig
from drover.model.huggingface import shape_of
from drover.pipeline.config.checks import problems
from drover.pipeline.config.explaining import suggestion
from drover.pipeline.config.kinds import Kind, left_out, load_plugins
from drover.pipeline.config.optimizers import optimizer_kind
from drover.pipeline.config.section import advice, local_path, sections_in, sentence, sentences, shortened
from drover.pipeline.config.shipped import FILTERS, SINKS
from drover.pipeline.config.tree import Config, Part
from drover.pipeline.core.errors import REPOSITORY, UserError, listed, meant, refusals
from drover.pipeline.core.files import Record, read_bytes, read_json, sealed_text, sha256_json, typed, write_text
from drover.pipeline.storage.model_hub import hub_folder, names_the_hub, pinned

Tree = dict[str, Any]
"""A mapping of settings, in which each key is a `Key`. Aliases share their value, so trees are never changed."""
HALF = re.compile("[\ud800-\udc7f\udd00-\udfff]")
"""Code points that no file can hold. Those between are bytes of names of files that are not UTF-8."""
LARGEST = 1 << 22
"""Bytes of the largest file that is read. YAML is read slowly: of this size in half a minute."""
MOST_VALUES = 1 << 20
"""Most values in a file or override, those of an alias counted wherever it stands. Nested aliases could make more than
any memory holds."""

OF_COMMANDS = {"parameters": "ladder", "mixtures": "mixture", "seeds": "sweep"}
"""Commands with files of their own, by a key that each of these has."""
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
    metric_list: list[dict[str, Any]] | None
    training_split: str | None
    validation_split: str | None
    test_split: str | None
    fewshot_split: str | None


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


def read_yaml(path: Path, advice: str = "Give an existing file.") -> Tree:
    """The values of one YAML file.

    Args:
        advice: what to do if the file is missing.

    Raises:
        UserError: a missing file, one that is not UTF-8, broken YAML, a key written twice, an alias inside of itself.
    """
    try:
        data = read_bytes(path, LARGEST)
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


def read_section(path: Path, kind: type[Part], otherwise: str) -> Part:
    """A file that is one section, such as a sweep's; UserError for all that is wrong in it. otherwise: what to do if
    the file is missing."""
    tree = read_yaml(path, otherwise)
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise refusal([f"{place_of(tree, problem['loc'])}: " + sentence(
            problem, ".".join(map(str, problem["loc"])), advice(str(problem["loc"][-1]), kind.model_fields))
            for problem in error.errors()], path) from None


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
        before = ("\nIf this line is right, look at the line before: a colon, bracket or quote may be missing, or the "
                  "indentation may be wrong.") * ("\n" in text.strip())
        raise UserError(f"{name} is not valid YAML: {error}{before}") from None
    except RecursionError:
        raise UserError(f"{name} is nested too deeply to be read.") from None


def read_task(path: Path, kind: Any, advice: str = "") -> dict[str, Any]:
    """The content of a task's YAML file, by a loader of PyYAML. UserError, with the advice, if it is no task."""
    try:
        return dict(typed(kind(read_bytes(path, LARGEST).decode()).get_single_data(), TaskSettings))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error).replace('"<unicode string>"', str(path))
        raise UserError(f"The task {path} cannot be read: {why}.{advice}") from None


POSITIONS = ("context_length", "rope_theta", "rope_scaling")
"""The parts of a shape that may be changed by name for existing weights: these extend a context."""


def shape_from(values: Mapping[str, Any]) -> ModelConfig:
    """The shape in one of our records; ValueError, in one line, if it is none."""
    try:
        return ModelConfig(**values)
    except ValidationError as error:
        raise ValueError(" ".join(sentences(error, "model", ModelConfig.model_fields))) from None


def read_shape(path: Path) -> ModelConfig:
    """The shape in a Hugging Face config.json. UserError, naming the key, if our network cannot be it."""
    try:
        return shape_of(typed(read_json(path), Record))
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, OSError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise UserError(f"{path} does not describe a Llama that Drover can read: {what}") from None


def shape_in(folder: Path) -> ModelConfig:
    """The shape of the weights in a folder: a run, one of its checkpoints, or a Hugging Face folder.

    `vocab_size` is None for a run that took it from its tokenizer. UserError if the folder describes no shape.
    """
    places = (folder, *folder.absolute().parents[2:3])
    run = next((place for place in places if (place / "config.yaml").is_file()), None)
    try:
        if (folder / "config.json").is_file():
            return read_shape(folder / "config.json")
        if run is not None:
            return shape_from(read_yaml(run / "config.yaml").get("model", {}))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"the shape of the weights in {folder} cannot be read ({error}).") from None
    raise UserError(f"{folder} describes no shape: it is no run, no checkpoint of one, and has no config.json. Weights "
                    f"in Meta's format are not read: download the safetensors of the same model.")


CLUSTERS = REPOSITORY / "configs" / "clusters"
"""The folder of cluster profiles that are named without a folder."""
OF_A_STAGE = ("started.json", "manifest.json")
"""Files in a stage's folder. A folder with such folders is a run's."""


def load_config(path: str | Path, overrides: list[str] | tuple[str, ...] = (), *, check: bool = True,
                base: Config | None = None) -> Config:
    """Read the user's configuration: `path` overrides its `base:` files, and `overrides` override both. Plugins are
    imported, and the result is validated.

    Args:
        path: YAML file. `base:` names one file or a list, relative to this file; later ones win. The section `launch`
            overrides the cluster profile that `launch.cluster` names; in the result that key is null. The section
            `model` overrides the shape that `model.preset` names, published or a folder's; the result has no such key.
        overrides: `dotted.key=value` strings, the value read as YAML. The config.yaml of a run folder means the run in
            that folder, wherever it was when it was written, unless they name another.
        base: what the file has amounted to; it is not read.
        check: also refuse combinations that cannot work (`drover.pipeline.config.checks`).

    Raises:
        UserError: naming every problem with its file, line and key.
    """
    path = Path(path)
    typed = dict(map(_parted, overrides))
    tree = (_of_a_run(_with_bases(path, (), _advice(path)), path) if base is None
            else base.model_dump(mode="json", exclude_unset=True))
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
    config = _at_commits(_validated(tree, path, typed))
    if check:
        refuse_impossible(config, path)
    return config


def refuse_impossible(config: Config, path: Path | str) -> None:
    """UserError for combinations of settings that cannot work."""
    if wrong := problems(config):
        raise refusal(wrong, path)


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


def _advice(path: Path) -> str:
    """What to do about a configuration that may be missing."""
    if os.path.exists(path):  # noqa: PTH110 - of any length
        return "Give another file."
    near = [str(file) for folder in (path.parent, Path(), Path("configs")) for file in folder.glob("*.y*ml")]
    return f"Give an existing file; {meant(str(path), near, '`drover init DATA` writes one.')}"


def _parted(override: str) -> tuple[str, str]:
    key, sign, text = override.partition("=")
    if not sign or not key:
        raise UserError(f"'{override}' is not an override. Write it as section.key=value, e.g. train.steps=50. A "
                        f"configuration's name ends in .yaml (--config FILE takes any name).")
    return key.strip(), text


def _with_bases(path: Path, above: tuple[Path, ...], advice: str) -> Tree:
    """A file merged over its bases. above: the files that named it as a base."""
    path = shipped(path)
    own = read_yaml(path, advice)
    commands = [command for key, command in OF_COMMANDS.items() if key in own]
    if commands and own.keys().isdisjoint(Config.model_fields):
        raise UserError(f"{path} is the file of a {commands[0]}, not the configuration of a run. `drover {commands[0]} "
                        f"{path}` trains its runs.")
    chain = (*above, path.resolve())
    if chain[-1] in above:
        raise UserError(f"The configuration {path} is its own base: {' -> '.join(map(str, chain))}. Remove one "
                        f"`base:`.")
    place, given = place_of(own, ("base",)), own.pop("base", [])
    bases = [given] if isinstance(given, str) else given
    if not (isinstance(bases, list) and all(isinstance(base, str) for base in bases)):
        raise UserError(f"{place}: `base` is a file name or a list of them, not {given!r}.")
    tree: Tree = {}
    for part in [*(_with_bases(shipped(Path(local_path(base)), path.parent), chain, f"Correct `base:` in {place}.")
                   for base in bases), own]:
        if isinstance(shape := part.get("model"), dict) and "preset" in shape:
            tree.pop("model", None)  # a preset replaces the whole section of a base
        tree = merge(tree, part)
    return tree


def shipped(path: Path, folder: Path = Path()) -> Path:
    """The file in a folder, or if there is none the one of that name that Drover ships, such as `configs/demo.yaml`."""
    given = folder / path
    own = REPOSITORY / path
    return own if os.path.isfile(own) and not os.path.exists(given) else given  # noqa: PTH110, PTH113 - of any length


def recorded_stages(folder: Path) -> list[str]:
    """The stages that have a record in a run's folder, without outputs that were replaced; [] for another folder."""
    return sorted({path.parent.name for name in OF_A_STAGE for path in folder.glob(f"*/{name}")
                   if not path.parent.suffix})


def _of_a_run(tree: Tree, path: Path) -> Tree:
    """If the file is a run's own configuration: the same with the run's present folder, which may have been moved, and
    without settings that Drover no longer has."""
    folder = path.parent if path.parent.name not in ("", "..") else path.parent.resolve()
    if path.name != "config.yaml" or not recorded_stages(folder):
        return tree
    config = _validated(tree, path, {}, extra="ignore")
    same = config.folder.resolve() == folder.resolve()
    place = f"the run folder {folder}"
    return merge(config.model_dump(mode="json"), {} if same else {
        Key.at("runs_dir", place): str(folder.parent), Key.at("name", place): folder.name})


def _profile(name: str, given: Tree, place: str, config: Path) -> Tree:
    """The section `launch`, over the profile of a cluster."""
    folders = (CLUSTERS, Path("configs") / "clusters", config.parent / "clusters")
    known = {path.stem: path for folder in folders for path in folder.glob("*.yaml")}
    path = known.get(name) or folder_of(place, Path()) / name
    return merge(read_yaml(path, (
        f"It is the cluster profile of {place}. Give a file, or one of {', '.join(known)}. `drover doctor --write "
        f"configs/clusters/NAME.yaml` writes one for your site.")), given)


def _at_commits(config: Config) -> Config:
    """The configuration with a commit for each name on the Hub: without a revision, that with which the run, or the run
    that it reuses, was started. A name that cannot be resolved stays as it is, and what needs its files is refused."""
    for section, key in (("tokenizer", "path"), ("train", "init_from")):
        part = config.part(section)
        if (name := getattr(part, key)) is not None and names_the_hub(name):
            records = (folder / "config.yaml" for folder in (config.folder, Path(config.reuse or config.folder)))
            with suppress(UserError):
                recorded = [read_yaml(file).get(section, {}).get(key) for file in records if file.is_file()]
                config = config.model_copy(update={section: part.model_copy(update={key: pinned(name, *recorded)})})
    return config


def _shape(name: str, given: Tree, place: str, config: Path) -> Tree:
    """The section `model`, over the shape of a preset or of the weights in a folder."""
    from drover.model.presets import preset

    try:
        model = (shape_in(Path(name)) if os.path.isdir(name)  # noqa: PTH112 - of any length
                 else shape_in(hub_folder(name, download=True)) if names_the_hub(name) else preset(name))
    except (UserError, ValueError) as error:
        raise UserError(f"{place}: {shortened(str(error), 2000)}") from None
    shape = model.model_dump()
    if not {"ffn_dim_multiplier", "multiple_of"} & given.keys():  # store the width itself, not the rule for it
        shape |= {"ffn_dim": model.hidden, "ffn_dim_multiplier": None, "multiple_of": ModelConfig().multiple_of}
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
    name = str(train.get("optimizer")) if isinstance(train := tree.get("train"), dict) and "optimizer" in train else ":"
    unknown = [] if ":" in name else refusals(lambda: optimizer_kind(name))  # other modules are not imported here
    raise refusal([f"{place}: {sentence(problem, own or '(top level)', suggestion(own, known if own == key else ()))}"
                   for key, place, known, problem in wrong for own in _settings(key, problem)] + unknown, path)


def _settings(key: str, problem: ErrorDetails) -> list[str]:
    """The setting of one of pydantic's errors; of an unknown section, such as another project's, its only setting."""
    given = problem.get("input")
    if problem["type"] == "extra_forbidden" and "." not in key and isinstance(given, dict) and len(given) == 1:
        return [f"{key}.{name}" for name in given]
    return [key]


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
        elif isinstance(value, dict) and (
                part in value or (problem["type"] == "missing" and part == problem["loc"][-1])):
            fields = _fields(sections, value.get("kind"))
            known = [*fields]
            sections = sections_in(fields[part].annotation) if part in fields else []
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
    """The error that reports all problems of a configuration."""
    count = f"{len(wrong):,} problem{'s' * (len(wrong) > 1)} in the configuration {path}"
    return UserError(f"{count}:\n{listed([shortened(problem, 2000) for problem in wrong])}")
