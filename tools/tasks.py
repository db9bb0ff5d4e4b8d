"""Download the data of lm-evaluation-harness's own tasks, and show what is there.

    drover tasks fetch hellaswag arc_easy mmlu
    drover tasks list
    drover tasks list hellaswag mmlu

`fetch` downloads each data set of the Hugging Face Hub once, at one commit, into a folder with the sha256 of every
file. Stages download nothing. Copy the folder to use it on a machine without a network.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from drover.pipeline.core.console import Parser, Program, add_json, draw, echo, readable, table
from drover.pipeline.core.errors import UserError, listed, require
from drover.pipeline.core.files import output_record, write_sealed
from drover.pipeline.evaluation.fetched import FORMAT, RECORD, FetchedData, TaskFacts, read_fetched
from drover.pipeline.evaluation.selection import Selection, add_task_places, suite_files
from drover.pipeline.evaluation.tasks import TaskFile, go_offline
from drover.pipeline.storage.model_hub import CARDS, download_dataset

DEFAULT = "default"
"""The configuration of a card that no task names."""
HEADING = ("task", "metrics", "items", "chance", "size", "data set")


def add_options(parser: Parser) -> None:
    """The options."""
    parser.add_argument("action", choices=("fetch", "list"), help="fetch: download; list: show what is there")
    parser.add_argument("names", nargs="*", metavar="NAME", help="tasks, groups, tags and suites")
    add_task_places(parser)
    add_json(parser)


def work(options: argparse.Namespace) -> None:
    """Fetch or show."""
    selection = Selection(options.task_folders, options.data, "The command").add(options.names)
    if options.action == "fetch":
        if not options.names:
            raise UserError("Name the tasks to fetch: drover tasks fetch hellaswag arc_easy")
        fetch([task for task in selection.tasks.values() if task.dataset is not None], options.data)
        return
    rows = [row_of(task) for task in selection.tasks.values()] if options.names else all_rows(options.data)
    if options.json:
        print(json.dumps(rows, ensure_ascii=False))
    else:
        draw(table([HEADING, *([str(row[name] if row[name] is not None else "") for name in HEADING]
                               for row in rows)], ("items", "chance")) if rows else f"{options.data} has no data sets.",
             *(() if options.names else suite_lines(options)))


def suite_lines(options: argparse.Namespace) -> Iterator[str]:
    """How much of each suite was fetched."""
    for name in suite_files():
        tasks = Selection(options.task_folders, options.data, name).add([name]).tasks.values()
        fetched = sum(task.fetched is not None for task in tasks)
        command = f" (drover tasks fetch {name})" * (fetched < len(tasks))
        yield f"{name}: {fetched} of {len(tasks)} tasks fetched{command}"


def row_of(task: TaskFile) -> dict[str, Any]:
    """What `list` shows of a task."""
    if task.dataset is None:
        return row(task.name, None, "local files", None)
    facts = {} if task.fetched is None else task.fetched.tasks
    return row(task.name, task.fetched, task.dataset, facts.get(task.plain_name), task.configuration)


def all_rows(data: Path) -> list[dict[str, Any]]:
    """What `list` shows of all tasks that were fetched."""
    records = [record for path in sorted(data.glob(f"*/*/{RECORD}"))
               if (record := read_fetched(data, path.parent.relative_to(data).as_posix())) is not None]
    return [row(name, record, record.dataset, facts, facts["configuration"])
            for record in records for name, facts in sorted(record.tasks.items())]


def row(name: str, record: FetchedData | None, dataset: str, facts: TaskFacts | None, configuration: str = ""
        ) -> dict[str, Any]:
    """A row of `list`."""
    read = set() if record is None else set(record.configurations[configuration])
    size = 0 if record is None else sum(file["bytes"] for file in record.files if file["path"] in read)
    chance = facts and facts["chance"]
    return {"task": name, "metrics": ", ".join(facts["metrics"]) if facts else "", "items": facts and facts["items"],
            "chance": None if chance is None else round(chance, 4), "size": readable(size) if record else "not fetched",
            "data set": f"{dataset}@{record.revision[:12]}" if record else dataset}


def fetch(tasks: Sequence[TaskFile], data: Path) -> None:
    """Download what is missing of the tasks' data sets, load each task once, and record what is there. UserError, after
    all others, for data sets that cannot be used."""
    require("fetching tasks", "lm_eval")
    by_dataset = defaultdict[str, list[TaskFile]](list)
    for task in tasks:
        by_dataset[str(task.dataset)].append(task)
    problems = list[str]()
    folders = dict[str, Path]()
    for dataset, own in by_dataset.items():
        try:
            if any(task.fetched is None or any(task.problems()) for task in own):
                echo(f"{dataset}: downloading into {data / dataset}")
                revision = next((str(given) for task in own if (given := task.dataset_settings.get("revision"))), None)
                folders[dataset] = download_dataset(dataset, revision, data / dataset, partial(patterns_of, own))
            elif unknown := [task for task in own if task.fetched and task.plain_name not in task.fetched.tasks]:
                folders[dataset] = unknown[0].snapshot
        except UserError as error:
            problems.append(str(error))
    go_offline()  # before anything imports the library that reads data sets
    for dataset, folder in folders.items():
        try:
            record_dataset(dataset, by_dataset[dataset], folder, data)
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError(listed(problems))


def patterns_of(tasks: Sequence[TaskFile], folder: Path) -> list[str]:
    """The files of the tasks' configurations, as the data set's card names them; all files if it does not."""
    from huggingface_hub.repocard import metadata_load

    card = folder / "README.md"
    known = {entry.get("config_name"): entry for entry in ((metadata_load(card) if card.is_file() else None) or {}).get(
        "configs", ())}
    wanted = set[str]()
    for name in {task.configuration or DEFAULT for task in tasks}:
        files = known.get(name, {}).get("data_files")
        if not files or "data_dir" in known[name]:
            return ["*"]
        for entry in [files] if isinstance(files, (str, dict)) else files:
            paths = entry.get("path", [*entry.values()]) if isinstance(entry, dict) else entry
            wanted.update([paths] if isinstance(paths, str) else paths)
    return sorted(wanted)


def trim_card(card: Path, names: set[str]) -> None:
    """Leave only these configurations in a data set's card: the library looks for the files of others, too."""
    from huggingface_hub.repocard import metadata_load, metadata_save

    stated = (metadata_load(card) if card.is_file() else None) or {}
    if names <= {entry.get("config_name") for entry in stated.get("configs", ())}:
        for key in ("configs", "dataset_info"):
            if isinstance(stated.get(key), list):
                stated[key] = [entry for entry in stated[key] if entry.get("config_name") in names]
        metadata_save(card, stated)


def record_dataset(dataset: str, tasks: Sequence[TaskFile], folder: Path, data: Path) -> None:
    """Load each task once, and write the data set's record. UserError if its files cannot be read as data."""
    import datasets

    old = read_fetched(data, dataset)
    configurations = dict(old.configurations) if old else {}
    added = sorted({task.configuration for task in tasks})
    trim_card(folder / "README.md", {name or DEFAULT for name in (*configurations, *added)})
    for name in added:
        try:
            with tempfile.TemporaryDirectory() as cache:
                builder = datasets.load_dataset_builder(str(folder), name or None, cache_dir=cache)
            splits = builder.config.data_files or {}
        except Exception as error:  # the library raises many kinds
            raise UserError(f"The data set {dataset} cannot be read{f' ({name})' if name else ''}: "
                            f"{' '.join(str(error).split())[:300]}. If it consists of Python code, Drover does not "
                            f"run it. Leave out {', '.join(task.name for task in tasks)}.") from error
        configurations[name] = sorted({Path(path).relative_to(folder.resolve()).as_posix()
                                       for paths in splits.values() for path in paths})
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # of the download
    files = [output_record(folder, folder / name) for name in sorted(set().union(
        (card for card in CARDS if (folder / card).is_file()), *configurations.values()))]
    record: dict[str, Any] = {"format": FORMAT, "dataset": dataset, "revision": folder.name,
                              "configurations": configurations, "files": files, "tasks": old.tasks if old else {}}
    write_sealed(data / dataset / RECORD, record)
    problems = list[str]()
    for task in tasks:
        try:
            record["tasks"][task.plain_name] = facts = facts_of(replace(task))  # without the old record
            echo(f"{task.name}: {facts['items']:,} items of {dataset}@{folder.name[:12]}")
        except UserError as error:
            problems.append(str(error))
    write_sealed(data / dataset / RECORD, record)
    if problems:
        raise UserError(listed(problems))


def facts_of(task: TaskFile) -> TaskFacts:
    """What the harness finds when it loads a task. UserError if it cannot."""
    from drover.pipeline.evaluation.harness import load_task, messages_in
    from drover.pipeline.evaluation.items import right_choices

    with tempfile.TemporaryDirectory(prefix="drover-tasks-") as folder, messages_in(Path(os.devnull)):
        try:
            loaded = load_task(task, Path(folder))
            chances = [len(right) / len(choices) for choices, right in (
                right_choices(loaded, item) for item in loaded.eval_docs)] \
                if loaded.OUTPUT_TYPE == "multiple_choice" else []
            return {"configuration": task.configuration, "metrics": [*loaded.aggregation()],
                    "items": len(loaded.eval_docs), "chance": fmean(chances) if chances else None}
        except Exception as error:  # the harness or its code for the task may raise anything
            raise UserError(f"The task {task.name} cannot be loaded from {task.snapshot}: "
                            f"{' '.join(f'{type(error).__name__}: {error}'.split())[:300]}. Leave it out.") from error


main = Program("python -m drover.tools.tasks", __doc__, add_options, work, mixed=True)

if __name__ == "__main__":
    sys.exit(main())
