"""Score a model, or compare several on the same items: a table of scores, with differences from the first model's.

    drover compare HuggingFaceTB/SmolLM2-135M --tasks python_line
    drover compare runs/demo runs/trial/convert/hf --tasks python_line
    drover compare runs/demo/train/checkpoints/step-* --tasks python_line
    drover compare runs/demo runs/trial --page compare.html

A model is a run (its export or, before that is made, its newest checkpoint), a training checkpoint inside a run, or a
Llama in Hugging Face form. A difference is taken on each item, which is sharper than two scores with their errors; the
interval holds it in 95 of 100 comparisons, from about 30 items on. torchrun shares the work over several ranks.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, islice
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drover.pipeline.config.kinds import add_plugin_option
from drover.pipeline.config.tree import EvaluateConfig
from drover.pipeline.contract.run import Run, run_in
from drover.pipeline.core.console import (
    Parser,
    Program,
    add_json,
    draw,
    echo,
    find_model,
    find_run,
    is_run,
    refuse_low,
    table,
    watch_of,
)
from drover.pipeline.core.errors import REPOSITORY, UserError, listed, require
from drover.pipeline.core.files import write_text
from drover.pipeline.evaluation.items import ANSWER_BITS, BITS, TaskResult
from drover.pipeline.evaluation.open_model import open_model, run_of, tokenizer_of
from drover.pipeline.evaluation.scores import Item, Score, decimals, scored
from drover.pipeline.evaluation.selection import OWN_TASKS, Selection, Suite, add_task_places
from drover.pipeline.evaluation.tasks import go_offline
from drover.pipeline.records.weight_files import weights_folder
from drover.pipeline.storage.model_hub import names_the_hub

if TYPE_CHECKING:
    from rich.console import RenderableType

    from drover.pipeline.evaluation.harness import HarnessModel

FORMAT = 2
COLUMNS = {"value": ".4f", "stderr": ".4f", "difference": "+.4f", "low": "+.4f", "high": "+.4f"}
HEADING = ("model", "score", "std. error", "difference", "from", "to (95%)")
NORMAL_95 = 1.96
ENOUGH = 30
"""Items from which on an interval holds what it promises."""


def add_options(parser: Parser) -> None:
    """The options."""
    parser.add_argument("models", nargs="+", type=find_model, metavar="MODEL",
                        help="runs, checkpoints, Hugging Face folders")
    add_plugin_option(parser)
    parser.add_argument("--tasks", nargs="*", default=[], metavar="TASK", help="names of tasks")
    add_task_places(parser)
    parser.set_defaults(task_folders=None)
    parser.add_argument("--validation", type=find_run, metavar="RUN",
                        help="also bits per byte of this run's validation text")
    parser.add_argument("--limit", type=int, metavar="N",
                        help="only the first N items of each task, and documents of each source (default: all)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default float32")
    parser.add_argument("--batch", type=int, default=16, help="sequences per forward pass (default 16)")
    parser.add_argument("--length", type=int, metavar="TOKENS", help="tokens of a window (default: the context)")
    parser.add_argument("--page", type=Path, metavar="FILE",
                        help="write a page: curves of the runs' training, settings that differ, scores")
    add_json(parser)


def work(options: argparse.Namespace) -> None:
    """Measure, compare and print."""
    for path in options.models:
        if names_the_hub(str(path)):
            weights_folder(path, download=True)
    go_offline()  # before anything imports the libraries that look for it
    refuse_low(options, "limit", "batch", "length")
    if not options.tasks and options.validation is None:
        compare_data(options)
        return
    if options.page is not None:
        from drover.pipeline.reporting.comparison import compare_runs

        compare_runs(options.models)  # refuses what is no trained run before anything is measured
    folders = options.task_folders or own_tasks(options.models)
    selection = Selection(folders, options.data, "--tasks").add(options.tasks).fetched()
    tasks = [*selection.tasks.values()]
    if problems := [problem for task in tasks for problem in task.problems()]:
        raise UserError(listed(problems))
    validation = None if options.validation is None else run_in(options.validation)
    if len(set(options.models)) < len(options.models):
        raise UserError(f"Give each model once; these are {', '.join(map(str, options.models))}.")
    paths = {str(path): deliverable(path) for path in options.models}
    from drover.pipeline.formats.weights import open_weights

    for path in paths.values():
        with open_weights(path) as weights:
            tokenizer_of(path, weights)  # all are looked at before one is measured
    require("a comparison", "lm_eval")
    import torch

    from drover.pipeline.evaluation.harness import HarnessModel, measure_task
    from drover.pipeline.evaluation.results import doubts, rounded
    from drover.pipeline.parallel.ranks import start_ranks, stop_ranks

    bootstrap_iters = EvaluateConfig().bootstrap_iters
    ranks = start_ranks()
    try:
        results = dict[str, dict[str, TaskResult]]()
        for name, path in paths.items():
            opened = open_model(path, ranks.device, getattr(torch, options.dtype), ranks=ranks)
            try:
                model = HarnessModel(opened, batch=options.batch, length=options.length, ranks=ranks)
            except UserError as error:
                raise UserError(f"{path}: {error}") from None
            measures: dict[str, Callable[[], TaskResult]] = {task.name: partial(
                measure_task, model, task, options.limit, bootstrap_iters, Path(os.devnull)) for task in tasks}
            if validation is not None:
                measures[f"validation text of {validation.config.name}"] = partial(
                    validation_result, model, validation, options.limit)
            results[name] = {}
            for what, measure in measures.items():
                if ranks.is_rank_zero:
                    echo(f"measuring {name}: {what}", file=sys.stderr)
                    model.watch = watch_of("compare", f"{name}, {what}", sys.stderr)
                results[name][what] = measure()
        every = [*rows(results), *suite_rows(results, selection.suites.values())]
        scores = [rounded(row) for row in every]
        made = {"format": FORMAT, "models": {name: str(path) for name, path in paths.items()},
                "dtype": options.dtype, "window": options.length, "limit": options.limit,
                "rows": scores, "notes": [*weak_intervals(scores), *(
                    f"{name}: {doubt}" for name, result in results.items() for doubt in doubts(result))]}
        if ranks.is_rank_zero:
            print(json.dumps(made, ensure_ascii=False)) if options.json else draw(*page_of(made))
            if options.page is not None:
                write_page(options.page, options.models, made)
        ranks.barrier()
    finally:
        stop_ranks()


def compare_data(options: argparse.Namespace) -> None:
    """Compare what the stage shard of runs made, and write the page of --page. UserError for nothing to do."""
    from drover.pipeline.reporting.comparison import ComparedRun, data_tables
    from drover.pipeline.reporting.document import block_lines

    data = [*data_tables([ComparedRun(str(path), run_in(path)) for path in options.models])] if all(
        map(is_run, options.models)) else []
    if options.page is not None:
        write_page(options.page, options.models)
    elif not data or options.json:
        raise UserError("There is nothing to measure: give --tasks, --validation or both, such as --validation RUN "
                        "for bits per byte of that run's validation text (drover compare A B --validation A), or "
                        "--page for curves (drover compare A B --page compare.html). Of runs whose stage shard is "
                        "done, the data is compared without them.")
    else:
        draw(*block_lines(data))


def deliverable(path: Path) -> Path:
    """For a run's folder, the export of its stage convert, which its stage evaluate measures. Before that exists, and
    for any other folder, `path` itself, from which `open_model` takes a run's newest checkpoint."""
    run = run_of(path) if (path / "config.yaml").is_file() else None
    return run.stage_folder("convert") / "hf" if run is not None and run.manifest("convert") is not None else path


def own_tasks(models: Sequence[Path]) -> list[Path]:
    """The folders with own tasks: configs/tasks, and those of the models' runs that exist here, which win."""
    runs = [run for path in models if (run := run_of(path)) is not None]
    named = [REPOSITORY / folder for run in runs for folder in run.config.evaluate.task_folders]
    return [*OWN_TASKS, *(folder for folder in dict.fromkeys(named) if folder.is_dir())]


def validation_result(model: HarnessModel, run: Run, documents: int | None) -> TaskResult:
    """Bits per byte on a run's validation documents, as in the stage evaluate: cut into windows that overlap by one
    token. Each model uses its own tokenizer; the bytes are the same. UserError if there are no documents.

    documents: at most so many of each source.
    """
    from drover.pipeline.tokenization.texts import shard_texts

    made = run.finished("encode" if run.config.encode.sources else "shard")
    keys = list[str]()
    texts = list[str]()
    for source, shards in groupby(shard_texts(run, "validation"), attrgetter("source")):
        read = (document for shard in sorted(shards, key=attrgetter("name")) for document in shard.read(None))
        for key, text in islice(read, documents):
            keys.append(f"{source}/{key}")
            texts.append(text)
    if not texts:
        raise UserError(f"The run {run.folder} has no validation text. Omit --validation, or give a run with "
                        f"shard.validation_share above 0.")
    tokenizer, length = model.opened.tokenizer, model.max_length
    windows = []
    for text in texts:
        ids = [tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]
        windows.append([(ids[start:start + 1], ids[start + 1:start + 1 + length])
                        for start in range(0, len(ids) - 1, length)])
    items: list[Item] = [(-value / math.log(2), float(len(text.encode())))
                         for value, text in zip(model.summed(windows), texts, strict=True)]
    return {"metrics": {BITS: scored(items)}, "items": len(items), "items_in_file": len(items), "few_shot": 0,
            "kind": "", "version": made.digest[:12], "contexts_truncated": 0, "without_value": {}, "chance": None,
            "answer_bits_per_byte": None, "items_without_right_choice": [],
            "per_item": {"hashes": keys, "texts": [], "metrics": {BITS: items}}}


def rows(results: Mapping[str, Mapping[str, TaskResult]]) -> Iterator[dict[str, Any]]:
    """A row a task, metric and model: its score, and its difference from the first model on the same items. results: by
    model and task."""
    from lm_eval.api.registry import is_higher_better

    firsts, *_ = results.values()
    for task, first in firsts.items():
        of_items = first["per_item"]["metrics"]
        for metric in [*first["metrics"], *([ANSWER_BITS] if ANSWER_BITS in of_items else [])]:
            for model, own in results.items():
                result = own[task]
                assert result["per_item"]["hashes"] == first["per_item"]["hashes"], "the models have other items"
                items = result["per_item"]["metrics"].get(metric, [])
                is_compared = bool(items) and metric in of_items and result is not first
                yield {"task": task, "version": result["version"], "few_shot": result["few_shot"], "metric": metric,
                       "higher_is_better": is_higher_better(BITS if metric == ANSWER_BITS else metric.split(" ")[0]),
                       "n": result["items"], "model": model,
                       **(scored(items) if metric == ANSWER_BITS else result["metrics"][metric]),
                       "chance": result["chance"] if metric.startswith("acc") else None,
                       **(interval(difference(of_items[metric], items)) if is_compared else {})}


def suite_rows(results: Mapping[str, Mapping[str, TaskResult]], suites: Iterable[Suite]) -> Iterator[dict[str, Any]]:
    """A row a suite and model: its score, and its difference from the first model's. The interval is that of a mean of
    the tasks' differences on the same items. results: by model and task."""
    from drover.pipeline.evaluation.aggregates import suite_result

    first, *_ = results.values()
    for suite in suites:
        names = {name for member in suite.members for name in member.tasks}
        expected = suite_result(suite, first)["value"]
        for model, own in results.items():
            result = suite_result(suite, own)
            differences = suite_result(suite, {name: {**own[name], "metrics": paired(first[name], own[name])}
                                               for name in names})
            apart: Score = {"value": None if None in (expected, result["value"]) else result["value"] - expected,
                            "stderr": differences["stderr"]}
            yield {"task": suite.name, "version": None, "few_shot": None, "metric": "score", "higher_is_better": True,
                   "n": sum(first[name]["items"] for name in names), "model": model,
                   **{key: result[key] for key in ("value", "stderr", "chance")},
                   **(interval(apart) if own is not first else {})}


def paired(first: TaskResult, second: TaskResult) -> dict[str, Score]:
    """The differences of a task's metrics that are means over items."""
    before, after = first["per_item"]["metrics"], second["per_item"]["metrics"]
    return {metric: difference(before[metric], after[metric]) for metric in before if metric in after}


def difference(first: Sequence[Item], second: Sequence[Item]) -> Score:
    """The difference of the second model's score from the first's, on the items that both have, and its standard error:
    nan for no items, and None for fewer than two.

    Two models on the same items differ by D = sum(d_i) / sum(w_i), where d_i is the value of the second less that of
    the first. It is a score of its own, whose standard error is smaller than the root of the sum of the two squared
    errors if the models find the same items hard (Miller, Adding Error Bars to Evals, 2024, section 4).
    """
    both = [(one, other) for one, other in zip(first, second, strict=True) if one is not None and other is not None]
    assert all(one[1] == other[1] for one, other in both), "these are not the same items"
    return scored([(other[0] - one[0], one[1]) for one, other in both])


def interval(apart: Score) -> dict[str, float | None]:
    """A `difference`, and its 95% interval from `low` to `high`: D +- 1.96 stderr(D) holds the true difference in 95 of
    100 comparisons, by the normal distribution: of some 30 items and more. None without a standard error."""
    middle, stderr = apart["value"], apart["stderr"]
    if middle is None or stderr is None:
        return {"difference": middle, "low": None, "high": None}
    return {"difference": middle, "low": middle - NORMAL_95 * stderr, "high": middle + NORMAL_95 * stderr}


def weak_intervals(scores: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Remarks on intervals that do not hold what they promise."""
    compared = [row for row in scores if row.get("high") is not None]
    for task, items in dict.fromkeys((row["task"], row["n"]) for row in compared if row["n"] < ENOUGH):
        yield f"{task}: {items:,} items are too few for the intervals, which need about {ENOUGH}"


def page_of(made: Mapping[str, Any]) -> list[RenderableType]:
    """A table for each task and metric, and the notes. What the models' folders have in common stands above."""
    paths = [Path(name) for name in made["models"]]
    common = next((f"{folder}/" for folder in paths[0].parents if paths[1:] and folder.name
                   and all(folder in path.parents for path in paths)), "")
    page: list[RenderableType] = [f"models in {common}", ""] if common else []
    for (task, metric, items, chance, is_higher_better), models in groupby(
            made["rows"], key=lambda row: tuple(
                row[key] for key in ("task", "metric", "n", "chance", "higher_is_better"))):
        cells = [[str(row["model"]).removeprefix(common), *(
            "" if row.get(name) is None else decimals(row[name], form) for name, form in COLUMNS.items())]
            for row in models]
        by_chance = "" if chance is None else f", {chance:.4f} by chance"
        better = "" if is_higher_better is None else f", {'higher' if is_higher_better else 'lower'} is better"
        page += [f"{task}, {metric} ({items:,} items{by_chance}{better})", table([HEADING, *cells], HEADING[1:]), ""]
    return [*page, *made["notes"]]


def write_page(page: Path, runs: Sequence[Path], made: Mapping[str, Any] | None = None) -> None:
    """Write the page of the runs, with the scores of `made` if there are any."""
    from drover.pipeline.reporting.comparison import compare_runs, score_table
    from drover.pipeline.reporting.render import html

    document = compare_runs(runs, [] if made is None else [score_table(made["rows"]), *made["notes"]])
    write_text(page, html(document))
    echo(document.result, file=sys.stderr)
    echo(f"open {page.absolute()}", file=sys.stderr)


main = Program("python -m drover.tools.compare", __doc__, add_options, work, mixed=True)

if __name__ == "__main__":
    sys.exit(main())
