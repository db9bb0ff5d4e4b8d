"""Running lm-evaluation-harness tasks on our model: what they mean is the harness's business, word for word."""

from __future__ import annotations

import logging
import os
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drover.pipeline.core.errors import UserError
from drover.pipeline.evaluation.items import answer_summary, answers, errors_of_texts, item_scores
from drover.pipeline.evaluation.tasks import TaskFile, go_offline, write_absolute

if TYPE_CHECKING:
    from drover.pipeline.evaluation.harness import HarnessModel

FEW_SHOT_SEED = 1234
TALKATIVE = ("lm_eval", "datasets", "evaluate")
"""Libraries whose log goes to a file."""


class TaskRunner:
    """Measures tasks by the harness.

    Args:
        model: deals its requests out to the ranks; every rank measures the same tasks in the same order.
        limit: items per task; None: all.
        bootstrap_iters: draws of bootstrapped standard errors, as the harness takes it.
        log: file that what the harness prints and logs is appended to; None: it is dropped.
    """

    def __init__(self, model: HarnessModel, limit: int | None, bootstrap_iters: int, log: Path | None = None) -> None:
        self.model, self.limit, self.log = model, limit, log
        # The harness draws in as many processes as the machine has cores: one rank does it for all.
        self.bootstrap_iters = bootstrap_iters if model.share[0] == 0 else 0

    def measure(self, task_file: TaskFile) -> dict[str, Any]:
        """Metrics with standard errors, the level of chance, items; `per_item`, see `item_scores`. Every rank gets rank
        0's.

        Raises:
            UserError: in a sentence, on every rank, why the task cannot be loaded or scored; the whole story is in the
                log.
        """
        result, reason = None, None
        try:
            with _messages_in(self.log):
                result = self._measure(task_file)
        except Exception as error:  # whatever the harness or a task's own code make of the user's files
            if self.model.placed.broken:
                raise
            reason = _reason(error)
        outcomes = self.model.everywhere((None if self.model.share[0] else result, reason))
        for _, reason in outcomes:
            if reason is not None:
                raise UserError(f"The task {task_file.name} ({task_file.path}) failed: {reason}")
        first: dict[str, Any] = outcomes[0][0]
        return first

    def _measure(self, task_file: TaskFile) -> dict[str, Any]:
        from lm_eval.evaluator import evaluate

        name, truncated = task_file.name, self.model.truncated
        with tempfile.TemporaryDirectory(prefix="drover-tasks-") as folder:
            try:
                task = _load(task_file, Path(folder))
            except Exception as error:
                raise UserError(f"it cannot be loaded: {_reason(error)} Check its settings and data files.") from error
            found = evaluate(self.model, {"tasks": {name: task}}, limit=self.limit, log_samples=True,
                             bootstrap_iters=self.bootstrap_iters)
            summary, per_item = _summary(name, task, found), item_scores(task, found["samples"][name])
        if self.bootstrap_iters:
            for metric, stderr in errors_of_texts(per_item).items():
                summary["metrics"][metric]["stderr"] = stderr
        return {**summary, "contexts_truncated": self.model.truncated - truncated, "per_item": per_item}


def _load(task_file: TaskFile, folder: Path) -> Any:
    """The harness's task object, its data read from absolute paths into a cache of our own, in the folder."""
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
def _messages_in(log: Path | None) -> Iterator[None]:
    """Append what is printed and logged to a file, and the traceback of what goes wrong."""
    with open(log or os.devnull, "a", encoding="utf-8") as file, redirect_stdout(file), redirect_stderr(file):
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
    """One sentence of an error: the first line of what it says, after its type where that is not our own."""
    if isinstance(error, UserError):
        return str(error)
    lines = str(error).strip().splitlines()
    return f"{': '.join([type(error).__name__, *lines[:1]]).rstrip('.')}."


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
            "kind": task.OUTPUT_TYPE, "version": str(found["versions"][name]), **answer_summary(answers(task))}
