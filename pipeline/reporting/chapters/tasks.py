"""Tasks of lm-evaluation-harness, and which of their items occur in the training text."""

from __future__ import annotations

from collections.abc import Iterator

from drover.pipeline.core.files import Record
from drover.pipeline.evaluation.results import doubts, metric_text
from drover.pipeline.reporting.document import NONE, Block, Table, filled
from drover.pipeline.reporting.facts import Facts


def tasks(facts: Facts) -> Iterator[Block]:
    """The chapter; empty if no task was run."""
    found, rows = facts.results.get("tasks", {}), []
    for name, task in found.items():
        for metric, entry in task["metrics"].items():
            # Blind guessing gives this share of right choices: a baseline of accuracies, not of other metrics.
            row = {**task, **entry, "name": name, "metric": metric}
            if not metric.startswith("acc"):
                row["chance"] = None
            if None not in (row["stderr"], row["chance"]) and row["value"] > row["chance"] + 2 * row["stderr"]:
                row["strong"] = True
            if row.get("items_in_file", row["items"]) != row["items"]:
                row["items"] = filled("{items:,} of {items_in_file:,}", row)
            rows.append(row)
    yield Table("Task results", {
        "task": "{name}", "version": "{version}", "metric": "{metric}", "value": "{value:.3f}",
        "std. error": "{stderr:.3f}", "chance": "{chance:.3f}", "items": "{items:n}", "few-shot": "{few_shot:n}",
        "answer bits per byte": "{answer_bits_per_byte:.3f}"}, rows,
        filled("Metrics are those of lm_eval {versions[lm_eval]}. Bold: above chance by more than two standard errors. "
               "Answer bits per byte: the model's bits per byte of the right answers, smoother than accuracy.",
               facts.results))
    yield Table("Contamination", {
        "task": "{name}", "metric": "{metric}", "all items": "{whole:n}", "n": "{items:,}", "clean": "{clean score:n}",
        "n clean": "{clean[items]:,}", "contaminated": "{dirty score:n}", "n contaminated": "{dirty[items]:,}",
        "too short": "{too_short:,}"},
        [row for name, task in found.items() for row in _contamination(name, task)],
        filled("Scores ± standard error; {definitions[contamination]}.", facts.results))
    yield from (f"{doubt}." for doubt in doubts(found))


def _contamination(name: str, task: Record) -> Iterator[Record]:
    """The scores of all, clean and contaminated items of a task, by metric, if contamination was measured."""
    if not (parts := task.get("contamination")):
        return
    measured = [parts[part]["metrics"] for part in ("clean", "dirty")]
    for metric in dict.fromkeys(metric for scores in measured for metric in scores) or task["metrics"]:
        clean, dirty = (metric_text(scores[metric]) if metric in scores else NONE for scores in measured)
        whole = task["metrics"].get(metric, {"value": task.get(metric), "stderr": None})
        yield {"name": name, "metric": metric, "whole": metric_text(whole), "items": task["items"],
               "clean score": clean, "dirty score": dirty, **parts}
