"""Tasks of lm-evaluation-harness, and which of their items occur in the training text."""

from __future__ import annotations

from collections.abc import Iterator

from drover.pipeline.evaluation.results import contamination_rows
from drover.pipeline.reporting.document import Block, Table, filled
from drover.pipeline.reporting.facts import Facts

CONTAMINATION = ("task", "metric", "all items", "n", "clean", "n clean", "contaminated", "n contaminated",
                 "too short to tell")
"""What `contamination_rows` has."""


def tasks(facts: Facts) -> Iterator[Block]:
    """The chapter; empty where no task was run."""
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
               "Answer bits per byte: what the right answers cost given the question, smoother than accuracy.",
               facts.results))
    yield Table("Contamination", {title: f"{{{title}{':n' if number > 1 else ''}}}"
                                  for number, title in enumerate(CONTAMINATION)},
                [dict(zip(CONTAMINATION, row, strict=True)) for row in contamination_rows(found)],
                filled("Scores ± standard error; {definitions[contamination]}.", facts.results))
    for key, told in (("items_without_right_choice", "Items whose target is none of their choices, which count as "
                                                     "answered wrongly"),
                      ("contexts_truncated", "Contexts that exceeded the context length and lost their beginning")):
        if counts := {name: task[key] for name, task in found.items() if task.get(key)}:
            yield f"{told}: {', '.join(f'{count:,} of {name}' for name, count in counts.items())}."
