"""The tasks that names mean: tasks of one's own folders, the harness's own tasks, groups and tags, and suites.

Own tasks win. `NAME_5shot` is a task or group with five examples before each question. A task that a group or suite
changes otherwise gets their name before its own.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from drover.pipeline.core.errors import REPOSITORY, UserError, meant
from drover.pipeline.evaluation.harness_names import harness_names
from drover.pipeline.evaluation.tasks import TaskFile, find_tasks, read_settings

if TYPE_CHECKING:
    from drover.pipeline.config.tree import Config

SHOTS = re.compile(r"(.+)_(\d{1,3})shot")
OF_GROUPS = {"group", "group_alias", "task", "aggregate_metric_list", "metadata", "tag", "task_alias"}
"""Keys of a group's entry that change no task."""


@dataclass(frozen=True)
class TaskGroup:
    """A group of the harness: its tasks' names, and what is aggregated over them, as its YAML file has it."""

    name: str
    tasks: tuple[str, ...]
    aggregated: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class SuiteMember:
    """A task or group of a suite: its metric that counts, and its chance level; None for that of its items."""

    name: str
    tasks: tuple[str, ...]
    metric: str
    chance: float | None


@dataclass(frozen=True)
class Suite:
    """Several tasks with one score. lacking: tasks that the suite's authors have and the harness has not, with the
    reason. centred: chance counts as 0."""

    name: str
    members: tuple[SuiteMember, ...]
    lacking: Mapping[str, str]
    centred: bool


class Selection:
    """What names mean.

    Args:
        folders: own tasks; a later folder wins.
        data: the folder with fetched data sets.
        where: the setting or option with the names, for messages.

    Attributes:
        tasks: the chosen tasks by name, in the order of the names.
        groups: the chosen groups of the harness, each before the groups in it.
        suites: the chosen suites.
        by_name: by each of the names, the names of its tasks.
    """

    def __init__(self, folders: Sequence[Path], data: Path, where: str) -> None:
        self.own = find_tasks(folders, data)
        self.folders, self.data, self.where = folders, data, where
        self.tasks = dict[str, TaskFile]()
        self.groups = dict[str, TaskGroup]()
        self.suites = dict[str, Suite]()
        self.by_name = dict[str, list[str]]()

    def add(self, names: Iterable[str]) -> Selection:
        """This, with the tasks of further names. UserError for unknown ones, or if a task cannot be used."""
        unknown = list[str]()
        for name in names:
            if (leaves := self._named(name, {}, "")) is None:
                unknown.append(name)
            else:
                self.by_name[name] = leaves
        if unknown:
            own = (f"those in {' and '.join(map(str, self.folders))} (evaluate.task_folders, --task-folders) are "
                   f"{', '.join(sorted(self.own)) or 'none'}; ")
            close = meant(unknown[0], [*self.own, *suite_files(), *harness_names()])
            raise UserError(f"{self.where} names {', '.join(unknown)}, but there is no such task: {own}"
                            f"{close or 'drover tasks list shows the suites and what was fetched.'}")
        return self

    def fetched(self) -> Selection:
        """This; UserError, with the command, if data sets of the Hub were not fetched."""
        if missing := [name for name, tasks in self.by_name.items() if any(
                self.tasks[task].dataset is not None and self.tasks[task].fetched is None for task in tasks)]:
            places = f" --data {self.data}" * (self.data != Path(DATA))
            if self.own.keys() & set(missing):
                places += f" --task-folders {' '.join(map(str, self.folders))}"
            raise UserError(f"{self.where} names {', '.join(missing)}, whose data is not in {self.data}. Stages "
                            f"download nothing. On a machine with a network (then copy the folder here), give: "
                            f"drover tasks fetch {' '.join(missing)}{places}")
        return self

    def _named(self, name: str, overrides: Mapping[str, Any], owner: str) -> list[str] | None:
        """As `_add`, for names with a number of examples and suites, too; None for an unknown name."""
        shots = SHOTS.fullmatch(name)
        if self._is_known(name):
            return self._add(name, overrides, owner)
        if name in suite_files():
            return self._add_suite(name)
        if shots and self._is_known(shots[1]):
            return self._add(shots[1], {**overrides, "num_fewshot": int(shots[2])}, owner)
        return None

    def _add_suite(self, name: str) -> list[str]:
        settings = yaml.safe_load(suite_files()[name].read_text(encoding="utf-8"))
        members = list[SuiteMember]()
        for entry in settings["members"]:
            leaves = self._named(entry["task"], entry.get("settings", {}), name)
            if leaves is None:
                raise UserError(f"The suite {name} has the task {entry['task']}, which the installed lm_eval does not "
                                f"have. Install a version that pyproject.toml allows.")
            members.append(SuiteMember(entry["task"], tuple(leaves), entry["metric"], entry.get("chance")))
        self.suites[name] = Suite(name, tuple(members), settings["lacking"], settings["centred"])
        return [leaf for member in members for leaf in member.tasks]

    def _is_known(self, name: str) -> bool:
        return name in self.own or name in harness_names()

    def _add(self, name: str, overrides: Mapping[str, Any], owner: str) -> list[str]:
        """Take in what a name means, with these settings in place of its own; the names of its tasks. owner: the group
        that changes it."""
        if name in self.own:
            return [self._take(self.own[name], overrides, owner)]
        if name not in harness_names():
            raise UserError(f"{self.where} names {owner}, a group that defines the task {name} itself. Name the other "
                            f"tasks of the group one by one.")
        known = harness_names()[name]
        if known.path is None:
            return [leaf for task in known.tasks for leaf in self._add(task, overrides, owner)]
        settings, files = read_settings(known.path)
        if "group" in settings:
            return self._add_group(name, settings, overrides)
        return [self._take(TaskFile(name, known.path, settings, tuple(files), self.data), overrides, owner)]

    def _add_group(self, name: str, settings: Mapping[str, Any], overrides: Mapping[str, Any]) -> list[str]:
        given = {**{key: value for key, value in settings.items() if key not in OF_GROUPS}, **overrides}
        aggregated = settings.get("aggregate_metric_list") or []
        own_name = _renamed(name, overrides, "")
        self.groups[own_name] = TaskGroup(own_name, (), [aggregated] if isinstance(aggregated, dict) else aggregated)
        leaves = list[str]()
        members = settings.get("task") or []
        for member in [members] if isinstance(members, str) else members:
            entry: Mapping[str, Any] = {"task": member} if isinstance(member, str) else member
            more = {**given, **{key: value for key, value in entry.items() if key not in OF_GROUPS}}
            if "group" in entry and not self._is_known(str(entry["group"])):
                leaves += self._add_group(f"{name}::{entry['group']}", entry, more)
            else:
                leaves += self._add(str(entry.get("group", entry.get("task"))), more, name)
        self.groups[own_name] = replace(self.groups[own_name], tasks=tuple(dict.fromkeys(leaves)))
        return leaves

    def _take(self, task: TaskFile, overrides: Mapping[str, Any], owner: str) -> str:
        if "class" in task.settings:
            raise UserError(f"{self.where} names {task.name}, which the harness defines as a Python class that "
                            f"downloads its data itself. Leave it out, or measure the export with the command lm_eval.")
        name = _renamed(task.name, overrides, owner)
        taken = replace(task, name=name, overrides=dict(overrides), settings={**task.settings, **overrides})
        if self.tasks.setdefault(name, taken) != taken:
            raise UserError(f"{self.where} means two different tasks by {name}. Name one of them.")
        return name


def suite_files() -> dict[str, Path]:
    """The YAML file of each suite by its name."""
    return {path.stem: path for path in sorted((REPOSITORY / "configs/suites").glob("*.yaml"))}


DATA = "task_data"
"""The default folder of fetched data sets."""
OWN_TASKS = [REPOSITORY / "configs/tasks"]
"""The default folders of own tasks."""


def add_task_places(parser: argparse.ArgumentParser) -> None:
    """--task-folders and --data."""
    parser.add_argument("--task-folders", nargs="+", type=Path, default=OWN_TASKS, metavar="FOLDER",
                        help="own tasks (default: configs/tasks, and those of compared runs)")
    parser.add_argument("--data", type=Path, default=Path(DATA), metavar="FOLDER",
                        help=f"fetched data sets (default: {DATA})")


def _renamed(name: str, overrides: Mapping[str, Any], owner: str) -> str:
    """The name of a task or group that has other settings than its file."""
    shots = f"_{overrides['num_fewshot']}shot" if "num_fewshot" in overrides else ""
    return f"{owner}_{name}{shots}" if owner and overrides.keys() - {"num_fewshot"} else f"{name}{shots}"


def selected(config: Config) -> Selection:
    """What `evaluate.tasks` means. UserError for unknown names, or if data sets were not fetched."""
    settings = config.evaluate
    folders = [REPOSITORY / folder for folder in settings.task_folders] if settings.tasks else []
    return Selection(folders, Path(settings.task_data), "evaluate.tasks").add(settings.tasks).fetched()


def chosen_tasks(config: Config) -> list[TaskFile]:
    """The tasks of `evaluate.tasks`, in that order."""
    return [*selected(config).tasks.values()]


def problems(config: Config) -> list[str]:
    """What is wrong with the configured tasks, a sentence each."""
    return [problem for task in chosen_tasks(config) for problem in task.problems()]


def input_files(config: Config) -> list[tuple[str, Path]]:
    """(name, path) of the YAML and data files of the configured tasks; UserError for an unknown task."""
    return [pair for task in chosen_tasks(config) for pair in task.inputs()]
