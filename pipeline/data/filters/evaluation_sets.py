"""Items of evaluation sets in files: of a task of evaluation (its .yaml), or in the fields of a file of records."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import model_validator

from drover.pipeline.config.data import FilesSource
from drover.pipeline.config.loading import read_task
from drover.pipeline.config.section import LocalPath, Section, execution
from drover.pipeline.core.errors import UserError
from drover.pipeline.data.documents import Limit, Place, Rejection, damage, is_shortage
from drover.pipeline.data.readers import file_format, file_records
from drover.pipeline.data.streams import Input, Piece

_FORMATS = ("jsonl", "json", "parquet", "csv", "arrow")
_TASK = (".yaml", ".yml")
_LARGEST = Limit(1000.0)


class EvaluationSet(Section):
    """The items of one task."""

    path: LocalPath = execution()
    """A file of items (.jsonl, .json, .parquet, .csv, .arrow, also .gz and .zst), or a task's .yaml as for
    `evaluate.tasks`, whose data files are then read, all splits. Its content, not its place, is what counts."""
    task: str | None = None
    """Name of the task in counts and reasons; null: the one in the .yaml, or the file's name without its ending."""
    fields: list[str] = []
    """Fields or columns that make an item, one after another, as in [question, answer]; a dot leads into one
    (answers.text), of a list all texts are taken. Empty, for a task's .yaml only: the fields that its doc_to_text
    names, then the right choice or what doc_to_target names."""

    @model_validator(mode="after")
    def _says_what_to_read(self) -> EvaluationSet:
        path = Path(self.path)
        if path.suffix not in _TASK:
            if file_format(path) not in _FORMATS:
                raise ValueError(f"{self.path} is no file of items: its name ends with .{', .'.join(_FORMATS)} (or "
                                 f"with .gz or .zst behind that), or with .yaml where it is a task")
            if not self.fields:
                raise ValueError(f"`fields` is missing: which fields of {self.path} make an item, as in "
                                 f"[question, answer]")
        return self

    def inputs(self) -> list[Path]:
        """The files that are read: the one that is named, and the data files of a task.

        Raises:
            UserError: the task's file cannot be used, or names a data file that is not there.
        """
        path = Path(self.path)
        if path.suffix not in _TASK or not path.exists():
            return [path]
        return [path, *_data_files(path, _settings(path))]


@dataclass(frozen=True)
class Item:
    """One item of an evaluation set. name: its file and number, from 1. text: all that must not be trained on."""

    task: str
    name: str
    text: str


def items_of(given: EvaluationSet) -> Iterator[Item]:
    """The items of a set in the order of its files.

    Raises:
        UserError: a file is not there or damaged, or an item has not the fields.
    """
    path, *data = given.inputs()
    settings = _settings(path) if data else {}
    task = given.task or settings.get("task") or path.name.partition(".")[0]
    for file in data or [path]:
        for number, record in _records(file, given.fields):
            texts = [text for field in given.fields for text in _texts(record, field, file, number)] \
                if given.fields else _of_task(record, settings, file, number)
            yield Item(str(task), f"{file.name}:{number}", "\n".join(texts))


def _records(path: Path, fields: list[str]) -> Iterator[tuple[Place, dict[str, Any]]]:
    """The records of a file: of columns those with the fields, or all."""
    source = FilesSource(kind="files", name="items", paths=[str(path)], text_field="",
                         meta_fields=[field.partition(".")[0] for field in fields])
    try:
        for record in file_records(Input(Piece.of(path)), source, _LARGEST):
            if isinstance(record, Rejection):
                raise UserError(f"The evaluation set {path} cannot be read at record {record.record}: {record.reason}. "
                                f"Repair the file, or correct `fields`.")
            number, value = record
            if not isinstance(value, dict):
                raise UserError(f"The evaluation set {path} holds no fields at record {number}.")
            yield 1 if number is None else number, value
    except damage() as error:
        if is_shortage(error):
            raise
        raise UserError(f"The evaluation set {path} cannot be read: {error}. Repair the file, or correct `path` and "
                        f"`fields`.") from None


def _texts(record: dict[str, Any], field: str, path: Path, number: Place) -> list[str]:
    """The texts in a field of an item, which may be a list, or lie in other fields."""
    value: Any = record
    for name in field.split("."):
        if not isinstance(value, dict) or name not in value:
            raise UserError(f"The evaluation set {path} has no field {field} at record {number}; the fields are "
                            f"{', '.join(map(str, value)) if isinstance(value, dict) else 'none'}. Correct `fields`.")
        value = value[name]
    return _strings(value)


def _strings(value: Any) -> list[str]:
    if isinstance(value, (list, tuple, dict)):
        return [text for part in (value.values() if isinstance(value, dict) else value) for text in _strings(part)]
    if isinstance(value, bytes):
        return [value.decode("utf-8", "surrogateescape")]
    return [] if value is None else [str(value)]


def _settings(path: Path) -> dict[str, Any]:
    """What a task's .yaml says."""
    result = read_task(path, yaml.SafeLoader, " For a task that needs code or includes other files, name its data file "
                      "and `fields` instead.")
    if not any(_strings((result.get("dataset_kwargs") or {}).get("data_files"))):
        raise UserError(f"The task {path} names no data files (dataset_kwargs.data_files) of its own. Name its data "
                        f"file and `fields` instead.")
    return result


def _data_files(path: Path, settings: dict[str, Any]) -> list[Path]:
    result: list[Path] = []
    for pattern in _strings(settings["dataset_kwargs"]["data_files"]):
        matches = sorted(path.parent.glob(pattern)) if "*" in pattern else [path.parent / pattern]
        if not matches:
            raise UserError(f"The task {path} reads {pattern}, but no file matches.")
        if "\0" in pattern or not all(map(file_format, matches)):
            raise UserError(f"The task {path} reads {pattern!r}, which is no file of items by its name.")
        result += matches
    return list(dict.fromkeys(result))


def _of_task(record: dict[str, Any], settings: dict[str, Any], path: Path, number: Place) -> list[str]:
    """The fields of an item that its task's doc_to_text names, then the right choice, or what doc_to_target names."""
    choices, gold = record.get(str(settings.get("doc_to_choice"))), record.get(str(settings.get("doc_to_target")))
    if isinstance(choices, list) and isinstance(gold, int) and 0 <= gold < len(choices):
        templates, right = ["doc_to_text"], choices[gold]
    else:
        templates, right = ["doc_to_text", "doc_to_target"], None
    # Words of a template that are no names of fields give no text.
    words = dict.fromkeys(word for key in templates
                          for word in re.findall(r"[A-Za-z_]\w*", str(settings.get(key) or "")))
    texts = _strings([*map(record.get, words), right])
    if not texts:
        raise UserError(f"The task of {path} names no field of its record {number} in doc_to_text and doc_to_target; "
                        f"its fields are {', '.join(map(str, record)) or 'none'}. Set `fields`.")
    return texts
