"""Evaluations of checkpoints during training, and of the finished model."""

from __future__ import annotations

from collections.abc import Iterator

from drover.pipeline.reporting.document import Block, Lines, Series, Table
from drover.pipeline.reporting.facts import Facts


def checkpoints(facts: Facts) -> Iterator[Block]:
    """The chapter; empty if no checkpoint was evaluated."""
    last = {facts.counts("train")["steps"]: facts.results} if facts.evaluations else {}
    found = {step: results for step, results in sorted({**facts.evaluations, **last}.items()) if results.get("validation")}
    bits = [results["validation"]["overall"]["bits_per_byte"] for results in found.values()]
    tasks = dict.fromkeys(name for results in found.values() for name in results.get("tasks", {}))
    yield Lines("Validation bits per byte by checkpoint", "step", "bits per byte",
                [Series("overall", list(found), bits)] if len(found) > 1 else [])
    yield Table("Validation and tasks by step", {
        "step": "{step:,}", "bits per byte": "{validation[overall][bits_per_byte]:.4f}",
        **{name: f"{{first[{number}][value]:.3f}}" for number, name in enumerate(tasks)}}, [
        {"step": step, **results, "first": [next(iter(results["tasks"].get(name, {}).get("metrics", {}).values()), None)
                                            for name in tasks]} for step, results in found.items()],
        "For each task its first metric. The last row is the finished model.")
