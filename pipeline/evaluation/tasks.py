"""lm-evaluation-harness tasks from local YAML and data files: finding them, running them, offline.

A task is a YAML file as the harness documents it, with `dataset_path: json` (or csv, parquet ...) and
`dataset_kwargs.data_files`, whose paths are relative to the YAML file. Finding tasks imports neither the harness nor
torch, because the launcher asks for them too.
"""

from __future__ import annotations

import difflib
import glob
import logging
import math
import os
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from pipeline.config.tree import Config
from pipeline.errors import UserError
from pipeline.stages import REPOSITORY

if TYPE_CHECKING:
    from pipeline.evaluation.harness import HarnessModel

BOOTSTRAP_DRAWS = 1000
FEW_SHOT_SEED = 1234


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
    """

    name: str
    path: Path
    settings: dict[str, Any]
    files: tuple[Path, ...]

    @cached_property
    def data_files(self) -> dict[str, list[str]]:
        """Absolute paths of the data files by split; UserError if there are none here."""
        given = (self.settings.get("dataset_kwargs") or {}).get("data_files")
        if not given:
            raise UserError(f"The task {self.name} ({self.path}) reads {self.settings.get('dataset_path')!r}, not "
                            f"local files. Evaluation is offline: give `dataset_path: json` and "
                            f"`dataset_kwargs: {{data_files: {{test: file.jsonl}}}}`, relative to the YAML file.")
        splits = given if isinstance(given, dict) else {"train": given}
        return {split: self._paths(entry) for split, entry in splits.items()}

    def _paths(self, entry: Any) -> list[str]:
        found: list[str] = []
        for item in entry if isinstance(entry, list) else [entry]:
            path = os.path.normpath(self.path.parent.absolute() / str(item))
            root = Path(path).anchor
            matches = sorted(map(str, Path(root).glob(path[len(root):]))) if glob.has_magic(path) else [path]
            if not matches:
                raise UserError(f"The task {self.name} ({self.path}) reads {item}, but no file matches {path}.")
            found += matches
        return found

    def inputs(self) -> list[tuple[str, Path]]:
        """All files that decide the task, with names that do not depend on where the folder is."""
        home = self.path.parent.absolute()
        paths = dict.fromkeys([*(path.absolute() for path in self.files),
                               *(Path(path) for split in self.data_files.values() for path in split)])
        return [(f"{self.name}/{path.relative_to(home) if path.is_relative_to(home) else path.name}", path)
                for path in paths]


def input_files(config: Config) -> list[tuple[str, Path]]:
    """(name, path) of the YAML and data files of the tasks that are asked for; UserError for an unknown task."""
    return [pair for task in chosen_tasks(config) for pair in task.inputs()]


def chosen_tasks(config: Config) -> list[TaskFile]:
    """The tasks of `evaluate.tasks`, in that order."""
    asked, known = config.evaluate.tasks, find_tasks(folders(config)) if config.evaluate.tasks else {}
    unknown = [name for name in asked if name not in known]
    if unknown:
        close = difflib.get_close_matches(unknown[0], known, n=1)
        raise UserError(f"evaluate.tasks names {', '.join(unknown)}, but "
                        f"{' and '.join(map(str, folders(config))) or 'evaluate.task_folders'} "
                        f"{'have' if len(folders(config)) > 1 else 'has'} only {', '.join(sorted(known)) or 'no tasks'}"
                        f"{f'; did you mean {close[0]}?' if close else '.'} (Groups and tags: list their tasks.)")
    return [known[name] for name in dict.fromkeys(asked)]


def folders(config: Config) -> list[Path]:
    """The folders to look for tasks in."""
    return [REPOSITORY / folder for folder in config.evaluate.task_folders]


def find_tasks(places: list[Path]) -> dict[str, TaskFile]:
    """Every task under the folders, by name; a later folder wins. UserError for broken YAML or a missing folder."""
    found: dict[str, TaskFile] = {}
    for place in places:
        if not place.is_dir():
            raise UserError(f"evaluate.task_folders names {place}, which is not a folder.")
        here: dict[str, TaskFile] = {}
        for path in sorted(place.rglob("*.yaml")):
            settings, files = _read(path, ())
            name = settings.get("task")
            if not isinstance(name, str) or "group" in settings:
                continue  # a group, or a file that others include
            if name in here:
                raise UserError(f"The task {name} is written twice: in {here[name].path} and in {path}. Rename one.")
            here[name] = TaskFile(name, path, settings, tuple(files))
        found.update(here)
    return found


def _read(path: Path, including: tuple[Path, ...]) -> tuple[dict[str, Any], list[Path]]:
    """The settings in a YAML file and the files they came from."""
    if path in including:
        raise UserError(f"The task file {path} includes itself: {' -> '.join(map(str, (*including, path)))}.")
    try:
        own = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise UserError(f"The task file {path} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"The task file {path} is not valid YAML: {error}") from None
    if not isinstance(own, dict):
        raise UserError(f"The task file {path} does not hold a mapping, but a {type(own).__name__}.")
    included = own.pop("include", None) or []
    merged: dict[str, Any] = {}
    files = [path]
    for entry in [included] if isinstance(included, str) else included:
        below, more = _read(path.parent / entry, (*including, path))
        merged.update(below)
        files += more
    modules = [path.parent / value for value in own.values() if isinstance(value, Path)]
    return {**merged, **own}, files + [module for module in modules if module.is_file()]


def go_offline() -> None:
    """Keep the Hugging Face libraries from the network. Must come before they are first imported."""
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TQDM_DISABLE="1", TOKENIZERS_PARALLELISM="false")


def run_tasks(model: HarnessModel, tasks: list[TaskFile], places: list[Path],
              limit: int | None) -> dict[str, dict[str, Any]]:
    """Results of each task: metrics with standard errors, the level of chance, items. Every rank calls this and gets
    the same; the model deals its requests out to the ranks.

    Raises:
        UserError: a task's files do not hold what its YAML says.
    """
    go_offline()
    import datasets
    from lm_eval.evaluator import evaluate
    from lm_eval.tasks import TaskManager
    datasets.disable_progress_bars()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = TaskManager(include_path=list(places), include_defaults=False)
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="drover-tasks-") as cache:
        for task_file in tasks:
            task = _load(manager, task_file, cache)
            truncated = model.truncated
            found = evaluate(model, {"tasks": {task_file.name: task}}, limit=limit, log_samples=False,
                             bootstrap_iters=BOOTSTRAP_DRAWS)
            results[task_file.name] = {**_summary(task_file.name, task, found),
                                       "contexts_truncated": model.truncated - truncated}
    return results


def _load(manager: Any, task_file: TaskFile, cache: str) -> Any:
    """The harness's task object, its data read from absolute paths into a cache of our own."""
    kwargs = {**task_file.settings["dataset_kwargs"], "data_files": task_file.data_files, "cache_dir": cache}
    member = {"task": task_file.name, "dataset_kwargs": kwargs}
    try:  # a group of one is the harness's way to load a registered task with some settings replaced
        task = manager.load([{"group": "drover", "task": [member]}])["tasks"][task_file.name]
    except Exception as error:  # whatever datasets, the harness or a task's own code make of the user's files
        raise UserError(f"The task {task_file.name} ({task_file.path}) cannot be loaded: {type(error).__name__}: "
                        f"{error}. Check its settings and data files.") from error
    if task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=FEW_SHOT_SEED)
    return task


def _summary(name: str, task: Any, found: Any) -> dict[str, Any]:
    metrics: dict[str, dict[str, Any]] = {}
    for key, value in found["results"][name].items():
        metric, comma, filter_name = key.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        error = found["results"][name].get(f"{metric}_stderr,{filter_name}")
        metrics[metric if filter_name == "none" else f"{metric} ({filter_name})"] = {
            "value": float(value), "stderr": float(error) if isinstance(error, (int, float)) else None}
    return {"metrics": metrics, "items": found["n-samples"][name]["effective"],
            "items_in_file": found["n-samples"][name]["original"], "few_shot": found["n-shot"][name],
            "kind": task.OUTPUT_TYPE, "version": str(found["versions"][name]), **_choices(task)}


def _choices(task: Any) -> dict[str, Any]:
    """For multiple choice: the share right of blind guessing, and the bits per byte of the right answers."""
    if task.OUTPUT_TYPE != "multiple_choice":
        return {"chance": None, "answer_bits_per_byte": None}
    by_document = defaultdict(list)
    for instance in task.instances:
        by_document[instance.doc_id].append(instance)
    chance, nats, answer_bytes = 0.0, 0.0, 0
    for _, instances in sorted(by_document.items()):
        choices, gold = task.doc_to_choice(instances[0].doc), task.doc_to_target(instances[0].doc)
        golds = gold if isinstance(gold, list) else [gold]
        right = [choices.index(one) if isinstance(one, str) else one for one in golds]
        chance += len(right) / len(choices) / len(by_document)
        answer = next(instance for instance in instances if instance.idx == right[0])
        context, continuation = answer.args
        nats -= answer.resps[0][0]
        answer_bytes += len((context[len(context.rstrip()):] + continuation).encode())
    return {"chance": chance, "answer_bits_per_byte": nats / (math.log(2) * answer_bytes)}
