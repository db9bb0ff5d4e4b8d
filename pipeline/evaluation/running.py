"""Runs lm-evaluation-harness tasks on our model. The harness alone defines what they measure."""

from __future__ import annotations

import logging
import math
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Record, named_in_errors
from drover.pipeline.evaluation.items import BITS, item_results, shown_name
from drover.pipeline.evaluation.paired import scored
from drover.pipeline.evaluation.tasks import TaskFile, go_offline

if TYPE_CHECKING:
    from drover.pipeline.evaluation.harness import HarnessModel

FEW_SHOT_SEED = 1234
LIBRARIES = ("lm_eval", "datasets", "evaluate")
"""Their messages go to a file."""


def measure_task(model: HarnessModel, task_file: TaskFile, limit: int | None, bootstrap_iters: int,
                 log: Path) -> Record:
    """Metrics with standard errors, what `item_results` has, and `without_value`, why metrics have none: rank 0's, on
    every rank.

    Args:
        model: divides its requests among the ranks; every rank measures the same tasks in the same order.
        limit: items; None: all.
        bootstrap_iters: resamples of bootstrapped standard errors, as the harness takes it.
        log: the harness's output and messages on rank 0 are appended to this file.

    Raises:
        UserError: the task cannot be loaded or scored; one sentence, on every rank. The traceback is in the log.
    """
    result = None
    problem = None
    is_rank_zero = model.ranks.is_rank_zero
    try:
        with messages_in(log if is_rank_zero else Path(os.devnull)):
            # The harness bootstraps in one process per core, so only one rank does it.
            result = _measured(model, task_file, limit, bootstrap_iters if is_rank_zero else 0)
    except Exception as error:  # the harness or a task's own code may raise anything for the user's files
        if model.opened.placed.broken:
            raise
        problem = _reason(error)
    outcomes = model.ranks.gather((result if is_rank_zero else None, problem))
    for _, reason in outcomes:
        if reason is not None:
            raise UserError(f"The task {task_file.name} ({task_file.path}) failed: {reason}")
    return outcomes[0][0]


def _measured(model: HarnessModel, task_file: TaskFile, limit: int | None, bootstrap_iters: int) -> Record:
    from lm_eval.evaluator import evaluate

    name = task_file.name
    truncated = model.truncated
    with tempfile.TemporaryDirectory(prefix="drover-tasks-") as folder:
        try:
            task = _load(task_file, Path(folder))
        except Exception as error:
            raise UserError(f"it cannot be loaded: {_reason(error)} Check its settings and data files.") from error
        failed = dict[str, str]()
        aggregation = task.aggregation
        task.aggregation = lambda: {metric: _Guarded(own, metric, failed) for metric, own in aggregation().items()}
        measured = evaluate(model, {"tasks": {name: task}}, limit=limit, log_samples=True,
                            bootstrap_iters=bootstrap_iters)
        task.aggregation = aggregation
        items = item_results(task, measured["samples"][name])
    metrics = _metrics(measured["results"][name], failed)
    if bootstrap_iters and BITS in metrics:  # for which the harness computes none
        metrics[BITS]["stderr"] = scored(items["per_item"]["metrics"][BITS])["stderr"]
    counts = measured["n-samples"][name]
    return {"metrics": metrics, "items": counts["effective"], "items_in_file": counts["original"],
            "few_shot": measured["n-shot"][name], "kind": task.OUTPUT_TYPE, "version": str(measured["versions"][name]),
            "contexts_truncated": model.truncated - truncated, "without_value": failed, **items}


def _load(task_file: TaskFile, folder: Path) -> Any:
    """The harness's task object. Its data is read from absolute paths (the harness resolves them in the working
    directory, not next to the task) into our own cache in the folder."""
    go_offline()
    import datasets
    from lm_eval.tasks import TaskManager

    datasets.disable_progress_bars()
    data = {**task_file.settings["dataset_kwargs"], "data_files": task_file.data_files,
            "cache_dir": str(folder / "cache")}
    (folder / "task.yaml").write_text(yaml.safe_dump({
        "include": str(task_file.path.absolute()), "task": task_file.name, "dataset_kwargs": data}), encoding="utf-8")
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    task = manager.load([task_file.name])["tasks"][task_file.name]
    if task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=FEW_SHOT_SEED)
    return task


@contextmanager
def messages_in(log: Path) -> Iterator[None]:
    """Append output, messages of the LIBRARIES and the traceback of an error to a file."""
    with named_in_errors(log), open(log, "a", encoding="utf-8") as file, redirect_stdout(file), redirect_stderr(file):
        handler = logging.StreamHandler(file)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        loggers = [logging.getLogger(name) for name in LIBRARIES]
        for logger in loggers:
            logger.setLevel(logging.INFO)
            logger.propagate, logger.handlers = False, [handler]
        try:
            yield
        except Exception:
            traceback.print_exc()
            raise
        finally:
            for logger in loggers:
                logger.propagate, logger.handlers = True, []


def _reason(error: Exception) -> str:
    """An error in one sentence: the first line of its message, after its type unless that is our own."""
    if isinstance(error, UserError):
        return str(error)
    lines = str(error).strip().splitlines()
    return f"{': '.join([type(error).__name__, *lines[:1]]).rstrip('.')}."


class _Guarded:
    """An aggregation of a metric, which gives NaN where it fails, so that the others have values. `failed` gets the
    reason, by the metric's name.

    It equals the function that it guards, by which the harness finds how to compute the standard error; once it has
    failed it equals nothing, and there is none.
    """

    def __init__(self, function: Callable[[Any], Any], name: str, failed: dict[str, str]) -> None:
        self.function, self.name, self.failed = function, name, failed
        self.__name__ = getattr(function, "__name__", name)

    def __call__(self, values: Any) -> Any:
        try:
            return self.function(values)
        except Exception as error:  # noqa: BLE001 - a task's own code may raise anything
            traceback.print_exc()  # into the log
            self.failed[self.name] = _reason(error)
            return math.nan

    def __eq__(self, other: object) -> bool:
        return self.name not in self.failed and self.function == other

    def __hash__(self) -> int:
        return hash(self.function)


def _metrics(results: Record, failed: dict[str, str]) -> dict[str, Record]:
    """Each metric's value and standard error, from the harness's `metric,filter` and `metric_stderr,filter`.
    Values that are no finite numbers, as of metrics that failed, are None; `failed` gets a reason for each."""
    metrics = dict[str, Record]()
    for key, value in results.items():
        metric, comma, filter_name = key.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        shown = shown_name(metric, filter_name)
        known = _is_finite(value)
        error = results.get(f"{metric}_stderr,{filter_name}", math.nan)
        if not known and metric not in failed:
            failed[shown] = f"it is {str(value)[:80]}."
        metrics[shown] = {"value": float(value) if known else None,
                          "stderr": float(error) if known and _is_finite(error) else None}
    return metrics


def _is_finite(value: Any) -> bool:
    """A task's own aggregation may return anything."""
    return isinstance(value, (int, float)) and math.isfinite(value)
