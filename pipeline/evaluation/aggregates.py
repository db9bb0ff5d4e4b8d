"""Scores of groups and suites from those of their tasks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from drover.pipeline.evaluation.items import ANSWER_BITS, TaskResult
from drover.pipeline.evaluation.scores import Score
from drover.pipeline.evaluation.selection import Selection, Suite, TaskGroup


def aggregated(selection: Selection, tasks: Mapping[str, TaskResult]) -> dict[str, Any]:
    """The sections `groups` and `suites` of results.json; none without groups and suites."""
    groups = {name: group_result(group, tasks) for name, group in selection.groups.items() if group.aggregated}
    suites = {name: suite_result(suite, tasks) for name, suite in selection.suites.items()}
    return {name: part for name, part in (("groups", groups), ("suites", suites)) if part}


def group_result(group: TaskGroup, tasks: Mapping[str, TaskResult]) -> dict[str, Any]:
    """A group's metrics as the harness aggregates them: weighted by the numbers of items, or all tasks alike."""
    from lm_eval.api.metrics import aggregate_subtask_metrics, pooled_sample_stderr, unweighted_mean_stderr

    own = [tasks[name] for name in group.tasks]
    metrics = dict[str, Score]()
    for entry in group.aggregated:
        by_size = entry.get("weight_by_size", True)
        for metric in _metrics_of(entry, own):
            scores = [(task["metrics"][metric], task["items"]) for task in own if metric in task["metrics"]]
            values, sizes = [score["value"] for score, _ in scores], [size for _, size in scores]
            errors = [score["stderr"] for score, _ in scores]
            metrics[metric] = {
                "value": None if None in values else float(aggregate_subtask_metrics(values, sizes, by_size)),
                "stderr": None if None in [*values, *errors] else float(
                    pooled_sample_stderr(errors, sizes) if by_size else unweighted_mean_stderr(errors))}
    return {"metrics": metrics, "chance": _mean([task["chance"] for task in own]),
            "items": sum(task["items"] for task in own), "tasks": [*group.tasks]}


def _metrics_of(entry: Mapping[str, Any], tasks: Iterable[TaskResult]) -> Iterator[str]:
    """The metrics of the tasks, with any filter or those that the group names."""
    filters = entry.get("filter_list")
    wanted = [filters] if isinstance(filters, str) else filters
    for metric in dict.fromkeys(name for task in tasks for name in task["metrics"]):
        name, _, filtered = metric.partition(" (")
        if name == entry.get("metric") and (wanted is None or (filtered.removesuffix(")") or "none") in wanted):
            yield metric


def suite_result(suite: Suite, tasks: Mapping[str, TaskResult]) -> dict[str, Any]:
    """A suite's score, the mean of its members', and theirs. A member that is a group counts as the mean of its tasks.

    Standard errors are those of means of independent scores; None if a part has none.
    """
    members = dict[str, Any]()
    for member in suite.members:
        own = [tasks[name] for name in member.tasks]
        score = _mean_score([task["metrics"].get(member.metric, {"value": None, "stderr": None}) for task in own])
        chance = _mean([task["chance"] for task in own]) if member.chance is None else member.chance
        members[member.name] = {"metric": member.metric, **score, "chance": chance}
        if suite.centred and chance is not None:
            members[member.name]["centred"] = None if score["value"] is None else (score["value"] - chance) / (
                1 - chance)
    parts: list[Score] = [{"value": entry["centred"], "stderr": None if entry["stderr"] is None else entry["stderr"] / (
        1 - entry["chance"])} if suite.centred else {"value": entry["value"], "stderr": entry["stderr"]}
        for entry in members.values()]
    answers = [tasks[name] for member in suite.members for name in member.tasks]
    return {**_mean_score(parts), "chance": 0.0 if suite.centred else _mean([
        entry["chance"] for entry in members.values()]), "centred": suite.centred, "members": members,
        "of": len(members) + len(suite.lacking), "lacking": dict(suite.lacking),
        ANSWER_BITS: _mean([bits for task in answers if (bits := task["answer_bits_per_byte"]) is not None])}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None


def _mean_score(scores: Sequence[Score]) -> Score:
    errors = [score["stderr"] for score in scores]
    known = [error for error in errors if error is not None]
    return {"value": _mean([score["value"] for score in scores]),
            "stderr": math.hypot(*known) / len(scores) if scores and len(known) == len(scores) else None}
