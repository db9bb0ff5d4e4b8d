"""A task of lm-evaluation-harness: its YAML file, and its data as inputs of a stage.

The data are local files (`dataset_path: json`, or csv, parquet ..., and `dataset_kwargs.data_files` with paths relative
to the YAML file), or a data set of the Hub that `drover tasks fetch` has downloaded. Nothing here imports the harness
or torch, because the launcher finds tasks too.
"""

from __future__ import annotations

import glob
import os
import re
import sys
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from drover.pipeline.config.loading import read_task
from drover.pipeline.config.section import advice
from drover.pipeline.core.console import first
from drover.pipeline.core.errors import UserError, meant
from drover.pipeline.core.files import bounded_lines, opened, parsed_json, typed
from drover.pipeline.evaluation.fetched import FetchedData, read_fetched

DATASET = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
"""A data set's name on the Hub."""
FIELDS = ("doc_to_text", "doc_to_choice", "doc_to_target")
SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")


class _Loader(yaml.SafeLoader):
    """Safe YAML that also knows the harness's `!function module.name`, as the path of the module's file."""


def _module_path(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Path:
    module, _, _ = str(loader.construct_scalar(node)).rpartition(".")
    return Path(f"{module.replace('.', '/')}.py")


_Loader.add_constructor("!function", _module_path)


@dataclass(frozen=True)
class TaskFile:
    """A task's YAML file, `include`s merged.

    Attributes:
        name: the task's name.
        path: the YAML file.
        settings: its content; `!function` values are paths.
        files: the YAML file, what it includes, and local Python modules it refers to.
        data: the folder with fetched data sets.
        overrides: settings of a group or suite that replace the file's.
    """

    name: str
    path: Path
    settings: Mapping[str, Any]
    files: tuple[Path, ...]
    data: Path
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def dataset(self) -> str | None:
        """The name of its data set on the Hub; None if it reads local files. UserError if it reads neither."""
        if self.dataset_settings.get("data_files"):
            return None
        named = self.settings.get("dataset_path")
        if not isinstance(named, str) or not DATASET.fullmatch(named) or "custom_dataset" in self.settings:
            raise UserError(f"The task {self.name} ({self.path}) gets its data by code of its own, which Drover does "
                            f"not fetch, or names none. Leave the task out, or write one with local files: "
                            f"`dataset_path: json` and `dataset_kwargs: {{data_files: {{test: file.jsonl}}}}`.")
        return named

    @property
    def configuration(self) -> str:
        """The configuration of its data set; "" for the only one."""
        return str(self.settings.get("dataset_name") or "")

    @cached_property
    def fetched(self) -> FetchedData | None:
        """The record of its data set if its files were fetched. UserError as `dataset`, or for a damaged record."""
        record = None if self.dataset is None else read_fetched(self.data, self.dataset)
        return record if record is not None and self.configuration in record.configurations else None

    @property
    def plain_name(self) -> str:
        """The name without the number of few-shot examples that a choice has added."""
        return self.name.removesuffix(f"_{self.overrides.get('num_fewshot')}shot")

    @property
    def dataset_settings(self) -> Mapping[str, Any]:
        """What the harness passes to the library that reads data sets."""
        return self.settings.get("dataset_kwargs") or {}

    @cached_property
    def data_files(self) -> dict[str, list[str]]:
        """Absolute paths of the local data files by split."""
        given = self.dataset_settings["data_files"]
        splits = given if isinstance(given, dict) else {"train": given}
        return {split: [path for pattern in (patterns if isinstance(patterns, list) else [patterns])
                        for path in self._matches(str(pattern))] for split, patterns in splits.items()}

    def _matches(self, pattern: str) -> list[str]:
        folder = self.path.parent.absolute()
        matches = [pattern]
        if glob.has_magic(pattern):
            matches = sorted(glob.glob(pattern, root_dir=folder, recursive=True))  # noqa: PTH207 - absolute ones, too
        if not matches:
            raise UserError(f"The task {self.name} ({self.path}) reads {pattern}, but no file matches "
                            f"{folder / pattern}.")
        return [os.path.normpath(folder / match) for match in matches]

    def inputs(self) -> list[tuple[str, Path]]:
        """All files that decide the task, with names that do not depend on where the folder is."""
        home = self.path.parent.absolute()
        local = () if self.dataset is not None else (Path(path) for split in self.data_files.values() for path in split)
        paths = dict.fromkeys([*(path.absolute() for path in self.files), *local])
        return [*((f"{self.name}/{path.relative_to(home) if path.is_relative_to(home) else path.name}", path)
                  for path in paths), *((f"{self.name}/{self.dataset}/{name}", self.snapshot / name)
                                        for name in self._fetched_files())]

    @property
    def snapshot(self) -> Path:
        """The folder of its fetched data set's commit."""
        assert self.dataset is not None and self.fetched is not None, "it was not fetched"
        return self.data.absolute() / self.dataset / self.fetched.revision

    @property
    def source(self) -> str:
        """`OWNER/NAME@COMMIT` of a fetched data set, else ""."""
        return "" if self.fetched is None else f"{self.dataset}@{self.fetched.revision}"

    def _fetched_files(self) -> list[str]:
        return [] if self.fetched is None else self.fetched.configurations[self.configuration]

    def loading(self, cache: Path) -> dict[str, Any]:
        """Settings with which the harness reads the data where they are, into a cache. Code of a data set is never
        run."""
        given = {**self.dataset_settings, "cache_dir": str(cache)}
        for key in ("trust_remote_code", "revision"):
            given.pop(key, None)
        if self.dataset is None:
            return {"dataset_kwargs": {**given, "data_files": self.data_files}}
        return {"dataset_path": str(self.snapshot), "dataset_kwargs": given}

    def problems(self) -> Iterator[str]:
        """What the harness would fail at, or would score as it is not meant: a split without data, an unknown metric,
        lines of .jsonl files that are no items, a fetched file that has changed. A sentence each."""
        if self.dataset is not None:
            if self.fetched is not None:
                for problem in self.fetched.problems(self.snapshot, self.configuration):
                    yield f"{problem}. Delete {self.data / self.dataset}, and give: drover tasks fetch {self.name}"
            return
        splits = self.data_files
        for key in SPLITS:
            if (split := self.settings.get(key)) is not None and split not in splits:
                yield f"{self.path}: {key} is {split}, but data_files has {', '.join(splits)}. Write one of these."
        yield from self._unknown_metrics()
        for path in dict.fromkeys(Path(path) for paths in splits.values() for path in paths):
            if path.suffix == ".jsonl" and path.is_file():
                yield from self._line_problems(path)

    def _unknown_metrics(self) -> Iterator[str]:
        if "process_results" in self.settings or find_spec("lm_eval") is None:
            return  # the task's own code names them, or nothing here knows them
        import lm_eval.api.metrics  # noqa: F401 - it registers them
        from lm_eval.api.registry import metric_registry

        for entry in self.settings.get("metric_list") or []:
            name = entry.get("metric")
            if isinstance(name, str) and name not in metric_registry:
                yield (f"{self.path}: metric_list names {name}, which lm-evaluation-harness does not have; "
                       f"{meant(name, metric_registry)} It has {', '.join(sorted(metric_registry))}.")

    def _line_problems(self, path: Path) -> Iterator[str]:
        from jinja2 import TemplateError

        items = dict[int, Mapping[str, Any]]()
        bad = list[str]()
        with opened(path) as file:
            for number, line in enumerate(bounded_lines(file), 1):
                try:
                    if line.strip():
                        items[number] = typed(parsed_json(line.removeprefix(BOM_UTF8)), dict[str, Any])
                except ValueError as error:
                    bad.append(f"{path}:{number} is no item in JSON ({error})")
        if bad or not items:
            yield f"{first(bad) or f'{path} has no items'}. Write an item as one line, such as {{\"query\": \"...\"}}."
        if not items:
            return
        try:
            read = self._fields()
        except TemplateError as error:
            yield f"{self.path}: {error}. Correct the template."
            return
        known = set[str]().union(*items.values())
        for name, key in read.items():
            if name not in known:
                yield f"{self.path}: {key} names {name}, which no item of {path} has; {advice(name, sorted(known))}"
        wanted = known & read.keys()
        if lacking := [f"{path}:{number} lacks {', '.join(sorted(wanted - item.keys()))}"
                       for number, item in items.items() if wanted - item.keys()]:
            yield (f"{first(lacking)}. The harness would read None there. Give every line the fields that "
                   f"{', '.join(FIELDS)} name, empty if need be, or name others there.")

    def _fields(self) -> dict[str, str]:
        """The fields that the task reads of an item, each with the setting that names it."""
        if "process_docs" in self.settings:
            return {}  # code of the task makes them
        choices = self.settings.get("doc_to_choice")
        answers = choices if isinstance(choices, list) else []
        return {name: key for key in FIELDS if isinstance(text := self.settings.get(key), str)
                for name in (template_fields(text) or [text] * text.isidentifier()) if name not in answers}


def template_fields(template: str) -> list[str]:
    """The fields of an item that a Jinja template reads, in their order; TemplateError if it is none."""
    from jinja2 import Environment
    from jinja2.nodes import Name

    environment = Environment()
    names = [*environment.parse(template).find_all(Name)]
    own = environment.globals.keys() | {node.name for node in names if node.ctx == "store"}
    return [*dict.fromkeys(node.name for node in names if node.name not in own)]


def find_tasks(folders: Iterable[Path], data: Path) -> dict[str, TaskFile]:
    """Every task under the folders, by name; a later folder wins. data: the folder with fetched data sets. UserError
    for broken YAML or a missing folder."""
    result: dict[str, TaskFile] = {}
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder} should hold tasks (evaluate.task_folders), but it is not a folder.")
        in_folder: dict[str, TaskFile] = {}
        # If the folder contains a run, whose folders may vanish meanwhile, os.walk skips them.
        for path in sorted(Path(where, name) for where, _, names in os.walk(folder) for name in names
                           if name.endswith(".yaml")):
            settings, files = read_settings(path)
            name = settings.get("task")
            if not isinstance(name, str) or "group" in settings:
                continue  # a group, or a file that others include
            if name in in_folder:
                raise UserError(f"The task {name} is defined twice: in {in_folder[name].path} and in {path}. Rename "
                                f"one.")
            in_folder[name] = TaskFile(name, path, settings, tuple(files), data)
        result.update(in_folder)
    return result


def read_settings(path: Path) -> tuple[dict[str, Any], list[Path]]:
    """The settings in a YAML file and the files they came from."""
    own = read_task(path, _Loader)
    included = own.pop("include", None) or []
    merged = dict[str, Any]()
    files = [path]
    for entry in [included] if isinstance(included, str) else included:
        below, more = read_settings(path.parent / entry)
        merged.update(below)
        files += more
    modules = [path.parent / value for value in own.values() if isinstance(value, Path)]
    return {**merged, **own}, files + [module for module in modules if module.is_file()]


def go_offline() -> None:
    """Keep the Hugging Face libraries off the network. Call it before they are first imported, but for the one that
    downloads models. And let the harness bootstrap in this process: forks of one with threads may wait forever."""
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TQDM_DISABLE="1", TOKENIZERS_PARALLELISM="false",
                      DISABLE_MULTIPROC="1")
    if (constants := sys.modules.get("huggingface_hub.constants")) is not None:
        vars(constants)["HF_HUB_OFFLINE"] = True


def only_kept_differs(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether two fingerprints of the stage evaluate differ only in its settings: the model, the text and the files of
    the tasks that both have are equal.

    Each part's result is cached under a hash of its own inputs, so that what still fits is not measured again.
    """
    tasks = [{name.partition("/")[0] for name in fingerprint["files"]} for fingerprint in (old, new)]
    both = tuple(f"{name}/" for name in tasks[0] & tasks[1])

    def fixed(fingerprint: Mapping[str, Any]) -> object:
        return fingerprint["inputs"], {name: digest for name, digest in fingerprint["files"].items()
                                       if name.startswith(both)}
    return fixed(old) == fixed(new)
