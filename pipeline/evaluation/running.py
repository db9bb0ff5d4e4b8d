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

from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Record, named_in_errors
from drover.pipeline.evaluation.items import errors_of_texts, of_items
from drover.pipeline.evaluation.tasks import TaskFile, go_offline, write_absolute

if TYPE_CHECKING:
    from drover.pipeline.evaluation.harness import HarnessModel

FEW_SHOT_SEED = 1234
TALKATIVE = ("lm_eval", "datasets", "evaluate")
"""Libraries whose log goes to a file."""


def measure_task(model: HarnessModel, task_file: TaskFile, limit: int | None, bootstrap_iters: int,
                 log: Path) -> Record:
    """Metrics with standard errors, the level of chance, items; `per_item`, see `of_items`; `without_value`, why
    metrics have none: rank 0's, on every rank.

    Args:
        model: deals its requests out to the ranks; every rank measures the same tasks in the same order.
        limit: items; None: all.
        bootstrap_iters: draws of bootstrapped standard errors, as the harness takes it.
        log: the harness's output and log on rank 0 are appended to this file.

    Raises:
        UserError: the task cannot be loaded or scored; one sentence, on every rank. The traceback is in the log.
    """
    result, reason, leads = None, None, model.ranks.leads
    try:
        with _messages_in(log if leads else Path(os.devnull)):
            # The harness bootstraps in one process per core, so only one rank does it.
            result = _measured(model, task_file, limit, bootstrap_iters if leads else 0)
    except Exception as error:  # the harness or a task's own code may raise anything for the user's files
        if model.placed.broken:
            raise
        reason = _reason(error)
    outcomes = model.ranks.gather((result if leads else None, reason))
    for _, reason in outcomes:
        if reason is not None:
            raise UserError(f"The task {task_file.name} ({task_file.path}) failed: {reason}")
    return outcomes[0][0]


def _measured(model: HarnessModel, task_file: TaskFile, limit: int | None, bootstrap_iters: int) -> Record:
    from lm_eval.evaluator import evaluate

    name, truncated = task_file.name, model.truncated
    with tempfile.TemporaryDirectory(prefix="drover-tasks-") as folder:
        try:
            task = _load(task_file, Path(folder))
        except Exception as error:
            raise UserError(f"it cannot be loaded: {_reason(error)} Check its settings and data files.") from error
        with _guarded_metrics(task) as (failed, of_texts):
            found = evaluate(model, {"tasks": {name: task}}, limit=limit, log_samples=True,
                             bootstrap_iters=bootstrap_iters)
        failed |= of_texts
        metrics = _metrics(found["results"][name], failed)
        single = of_items(task, found["samples"][name], of_texts)
    if bootstrap_iters:
        for metric, stderr in errors_of_texts(single["per_item"]).items():
            if metrics[metric]["value"] is not None:
                metrics[metric]["stderr"] = stderr
    items = found["n-samples"][name]
    return {"metrics": metrics, "items": items["effective"], "items_in_file": items["original"],
            "few_shot": found["n-shot"][name], "kind": task.OUTPUT_TYPE, "version": str(found["versions"][name]),
            "contexts_truncated": model.truncated - truncated, "without_value": failed, **single}


def _load(task_file: TaskFile, folder: Path) -> Any:
    """The harness's task object. Its data is read from absolute paths into our own cache in the folder."""
    go_offline()
    import datasets
    from lm_eval.tasks import TaskManager

    datasets.disable_progress_bars()
    write_absolute([task_file], folder, cache_dir=str(folder / "cache"))
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    task = manager.load([task_file.name])["tasks"][task_file.name]
    if task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=FEW_SHOT_SEED)
    return task


@contextmanager
def _messages_in(log: Path) -> Iterator[None]:
    """Append output, log messages and the traceback of an error to a file."""
    with named_in_errors(log), open(log, "a", encoding="utf-8") as file, redirect_stdout(file), redirect_stderr(file):
        handler = logging.StreamHandler(file)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        loggers = [logging.getLogger(name) for name in TALKATIVE]
        before = [(logger.level, logger.propagate, logger.handlers[:]) for logger in loggers]
        for logger in loggers:
            logger.setLevel(logging.INFO)
            logger.propagate, logger.handlers = False, [handler]
        try:
            yield
        except Exception:
            traceback.print_exc()
            raise
        finally:
            for logger, (level, propagate, handlers) in zip(loggers, before, strict=True):
                logger.setLevel(level)
                logger.propagate, logger.handlers = propagate, handlers


def _reason(error: Exception) -> str:
    """An error in one sentence: the first line of its message, after its type unless that is our own."""
    if isinstance(error, UserError):
        return str(error)
    lines = str(error).strip().splitlines()
    return f"{': '.join([type(error).__name__, *lines[:1]]).rstrip('.')}."


class _Guarded:
    """A metric's function, which gives NaN where it fails. `failed` gets the reason, by the metric's name.

    It equals the function that it guards, by which the harness finds how to compute the standard error; once it has
    failed it equals nothing, and there is none.
    """

    def __init__(self, function: Callable[..., Any], name: str, failed: dict[str, str]) -> None:
        self.function, self.name, self.failed = function, name, failed
        self.__name__ = getattr(function, "__name__", name)

    def __call__(self, *given: Any, **named: Any) -> Any:
        try:
            return self.function(*given, **named)
        except Exception as error:  # a task's own code may raise anything
            if named and isinstance(error, TypeError):
                raise  # the harness calls it again without names
            if self.name not in self.failed:
                traceback.print_exc()  # into the log
                self.failed[self.name] = _reason(error)
            return math.nan

    def __eq__(self, other: object) -> bool:
        return self.name not in self.failed and self.function == other

    def __hash__(self) -> int:
        return hash(self.function)


@contextmanager
def _guarded_metrics(task: Any) -> Iterator[tuple[dict[str, str], dict[str, str]]]:
    """While the harness measures a task, a metric that fails does not end the task. Gives the reasons, by metric: of
    those that fail on all texts together, and of those that fail on one."""
    failed, of_texts = dict[str, str](), dict[str, str]()

    def guarded(functions: dict[str, Any], reasons: dict[str, str]) -> dict[str, Any]:
        return {name: _Guarded(function, name, reasons) for name, function in functions.items()}

    own, own_of_texts = task.aggregation, task._metric_fn_list
    task.aggregation, task._metric_fn_list = lambda: guarded(own(), failed), guarded(own_of_texts, of_texts)
    try:
        yield failed, of_texts
    finally:
        task.aggregation, task._metric_fn_list = own, own_of_texts


def _is_finite(value: Any) -> bool:
    """Whether a value is a finite number. A task's own aggregation may return anything."""
    try:
        return math.isfinite(value)
    except (TypeError, ValueError, RuntimeError):  # of text, and of arrays and tensors with several numbers
        return False


def _metrics(results: Record, failed: dict[str, str]) -> dict[str, Record]:
    """Each metric's value and standard error, from the harness's `metric,filter` and `metric_stderr,filter`. Those of
    metrics that failed are None, and those that are no numbers; `failed` gets the latter, too."""
    found: dict[str, Record] = {}
    raised = {*failed}
    for key, value in results.items():
        metric, comma, filter_name = key.partition(",")
        if comma and not metric.endswith("_stderr"):
            error = results.get(f"{metric}_stderr,{filter_name}")
            shown = metric if filter_name == "none" else f"{metric} ({filter_name})"
            if metric not in raised and not _is_finite(value):
                failed[shown] = f"it is {str(value)[:80]}."
            known = not {metric, shown} & failed.keys()
            found[shown] = {
                "value": float(value) if known else None,
                "stderr": float(error) if known and isinstance(error, (int, float)) and math.isfinite(error) else None}
    return found
