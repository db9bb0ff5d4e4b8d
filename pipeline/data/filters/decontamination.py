"""Documents that contain items of evaluation sets, and the files of items: a task of evaluation (its .yaml), or records
in whose fields the items stand."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml
from pydantic import Field, model_validator

from drover.pipeline.config.data import FilesSource
from drover.pipeline.config.loading import read_task
from drover.pipeline.config.section import LocalPath, Section, execution
from drover.pipeline.config.shipped import name_of
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Record, output_record, write_json
from drover.pipeline.data.counts import total
from drover.pipeline.data.documents import Document, Limit, Place, Rejection, damage, is_shortage
from drover.pipeline.data.filters.base import Filter
from drover.pipeline.data.item_index import ItemIndex
from drover.pipeline.data.readers import file_format, file_records
from drover.pipeline.data.streams import Input, Piece

if TYPE_CHECKING:
    from drover.pipeline.contract.stage_work import Work

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


def _records(path: Path, fields: list[str]) -> Iterator[tuple[Place, Record]]:
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


def _texts(record: Record, field: str, path: Path, number: Place) -> list[str]:
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


def _settings(path: Path) -> Record:
    """What a task's .yaml says."""
    result = read_task(path, yaml.SafeLoader, " For a task that needs code or includes other files, name its data file "
                      "and `fields` instead.")
    if not any(_strings((result.get("dataset_kwargs") or {}).get("data_files"))):
        raise UserError(f"The task {path} names no data files (dataset_kwargs.data_files) of its own. Name its data "
                        f"file and `fields` instead.")
    return result


def _data_files(path: Path, settings: Record) -> list[Path]:
    result: list[Path] = []
    for pattern in _strings(settings["dataset_kwargs"]["data_files"]):
        matches = sorted(path.parent.glob(pattern)) if "*" in pattern else [path.parent / pattern]
        if not matches:
            raise UserError(f"The task {path} reads {pattern}, but no file matches.")
        if "\0" in pattern or not all(map(file_format, matches)):
            raise UserError(f"The task {path} reads {pattern!r}, which is no file of items by its name.")
        result += matches
    return list(dict.fromkeys(result))


def _of_task(record: Record, settings: Record, path: Path, number: Place) -> list[str]:
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


META = "contamination"
OUTPUT = "contamination.json"
"""Of the stage shard: which items of which tasks were found, in how many documents."""
MOST_IN_META = 10
"""Items of a task that a flagged document names."""


class Decontamination(Filter):
    """Drops or flags documents that contain an item of an evaluation set.

    Texts are compared as in the stage `evaluate`: in Unicode's NFKC, case folded, as words, which are runs of letters
    and digits; anything between words is ignored. Scripts that put no spaces between words are compared by character:
    one of Chinese or Japanese counts as a word, three of Thai, Lao, Khmer or Burmese do. A document contains an item if
    it has any n consecutive words of it (Brown et al. 2020, appendix C, with n = 13), or all words in a row of an item
    that has fewer. Hashes find candidates; the words themselves decide.
    """

    files: list[EvaluationSet] = Field(min_length=1)
    """Evaluation sets: [{path: gsm8k.jsonl, task: gsm8k, fields: [question, answer]}, {path: configs/tasks/x.yaml}].
    Take all splits of each."""
    n: int = Field(13, gt=0)
    """Words of an n-gram."""
    min_words: int = Field(8, gt=0)
    """Items with fewer words are not searched for: they occur by chance."""
    action: Literal["drop", "flag"] = "drop"
    """What becomes of such documents: they are dropped, or kept with the tasks and items in `meta.contamination`."""

    def reads(self) -> list[Path]:
        """The files of the sets."""
        return [path for given in self.files for path in given.inputs()]

    def open(self) -> None:
        """Read the sets, once a process for any number of units."""
        self._sets  # noqa: B018 - it is made here

    @cached_property
    def _sets(self) -> Sets:
        return _read(tuple(own.model_dump_json() for own in self.files), self.n, self.min_words)

    @cached_property
    def _counts(self) -> dict[str, Counter[str]]:
        return {}

    def findings(self) -> dict[str, dict[str, int]]:
        """For each task in how many documents each item was found; under "" in how many any was."""
        return {task: dict(sorted(counts.items())) for task, counts in sorted(self._counts.items())}

    def __call__(self, document: Document) -> Document | str:
        items, index = self._sets
        hits = [items[number] for number in index.items_in(document.text)]
        if not hits:
            return document
        of_task: dict[str, list[str]] = {}  # in the order of the sets
        for item in hits:
            of_task.setdefault(item.task, []).append(item.name)
        for task, names in of_task.items():
            self._counts.setdefault(task, Counter()).update(["", *names])
        if self.action == "drop":
            return f"contains items of {next(iter(of_task))}"
        named = {task: names[:MOST_IN_META] for task, names in of_task.items()}
        return replace(document, meta={**document.meta, META: named})

    def summary(self, findings: dict[str, dict[str, int]]) -> dict[str, Record]:
        """Of each task the rule, how many `items` it has, `too_short` to be looked for, `found` in `documents`; as
        `which`, each that was found with the number of documents; and a `warning` if most are too short.

        findings: those of all units, added up.
        """
        tasks: dict[str, Record] = {}
        items, index = self._sets
        for item, short in zip(items, index.too_short.tolist(), strict=True):
            own = tasks.setdefault(item.task, {"n": self.n, "min_words": self.min_words, "action": self.action,
                                               "items": 0, "too_short": 0})
            own["items"] += 1
            own["too_short"] += short
        for task, own in tasks.items():
            result = dict(findings.get(task, {}))
            own |= {"documents": result.pop("", 0), "found": len(result), "which": result}
            if own["too_short"] > own["items"] / 2:
                own["warning"] = (f"filter {name_of(self)}: {own['too_short']:,} of {own['items']:,} items of {task} "
                                  f"have fewer than {self.min_words} words and are not searched for, so documents that "
                                  f"contain them stay. Add `fields` to the set, or lower the filter's min_words.")
        return tasks


def short_sets(filters: Iterable[Any]) -> list[str]:
    """Warnings about sets of which most items are not searched for."""
    return [own["warning"] for decontamination in filters for own in decontamination.summary({}).values()
            if "warning" in own]


def gather_contamination(work: Work, filters: Iterable[Any], findings: Iterable[Record]
                         ) -> tuple[Record, Record]:
    """What these filters have found, which is printed, and of which each item goes into `contamination.json`.

    Args:
        findings: of each unit, by the filters' names.

    Returns:
        What the stage's counts get, by filter and task, and the record of the file.
    """
    result = total(findings)
    summaries = {name_of(own): own.summary(result.get(name_of(own), {})) for own in filters}
    path = work.folder / OUTPUT
    write_json(path, summaries)
    few = {name: {task: {key: value for key, value in own.items() if key != "which"} for task, own in tasks.items()}
           for name, tasks in summaries.items()}
    for name, tasks in few.items():
        for task, own in tasks.items():
            short = f" ({own['too_short']:,} are too short for a search)" if own["too_short"] else ""
            work.say(f"filter {name}: {own['found']:,} of {own['items']:,} items of {task}{short} were found in "
                     f"{own['documents']:,} documents")
    return few, output_record(work.folder, path, split="contamination", source="", docs=0, text_bytes=0)


Sets = tuple[Sequence[Item], ItemIndex]
"""Evaluation sets as they are searched for: their items, and the index of these in the same order."""


@lru_cache(maxsize=2)
def _read(given: tuple[str, ...], n: int, min_words: int) -> Sets:
    items = [item for own in given for item in items_of(EvaluationSet.model_validate_json(own))]
    names = Counter((item.task, item.name) for item in items)
    if twice := next((pair for pair, count in names.items() if count > 1), None):
        raise UserError(f"A filter of kind decontamination has the item {twice[1]} of the task {twice[0]} twice: files "
                        f"of one task need different names. Give each of them its own `task`.")
    return items, ItemIndex((item.text for item in items), n, min_words)
