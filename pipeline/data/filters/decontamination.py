"""Documents that contain items of evaluation sets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from drover.pipeline.config.shipped import name_of
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import output_record, write_json
from drover.pipeline.data.documents import Document
from drover.pipeline.data.filters.base import Filter
from drover.pipeline.data.filters.chain import total
from drover.pipeline.data.filters.evaluation_sets import EvaluationSet, Item, items_of
from drover.pipeline.data.filters.item_index import ItemIndex

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

    def summary(self, findings: dict[str, dict[str, int]]) -> dict[str, dict[str, Any]]:
        """Of each task the rule, how many `items` it has, `too_short` to be looked for, `found` in `documents`; as
        `which`, each that was found with the number of documents; and a `warning` if most are too short.

        findings: those of all units, added up.
        """
        tasks: dict[str, dict[str, Any]] = {}
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
    return [own["warning"] for decontamination in filters if isinstance(decontamination, Decontamination)
            for own in decontamination.summary({}).values() if "warning" in own]


def gather_contamination(folder: Path, filters: Iterable[Any], findings: Iterable[dict[str, Any]]
                         ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the filters of this kind have found, of which each item goes into `contamination.json`.

    Args:
        folder: of the stage.
        filters: all of the configuration.
        findings: of each unit, by the filters' names.

    Returns:
        What the stage's counts get, with `contamination` by filter and task, and the record of the file; nothing if
        there is no such filter.
    """
    result = total(findings)
    summaries = {name_of(own): own.summary(result.get(name_of(own), {})) for own in filters
                 if isinstance(own, Decontamination)}
    if not summaries:
        return {}, []
    path = folder / OUTPUT
    write_json(path, summaries)
    few = {name: {task: {key: value for key, value in own.items() if key != "which"} for task, own in tasks.items()}
           for name, tasks in summaries.items()}
    return {"contamination": few}, [output_record(folder, path, split="contamination", source="", docs=0, text_bytes=0)]


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
