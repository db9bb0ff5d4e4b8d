"""Chapters on the way to the result: where the time of training went, and what checkpoints could do."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from drover.pipeline.console import duration
from drover.pipeline.records.goodput import CAUSES, Start
from drover.pipeline.reporting.document import Figure, Section, Table, percent
from drover.pipeline.reporting.facts import Facts
from drover.pipeline.reporting.plots import Series, bar_chart, line_chart

SHOWN_STARTS = 50
"""Rows of the table of starts."""


def goodput_section(facts: Facts) -> Section:
    """Which share of the time since the first start went into steps that counted, and where the rest went."""
    section, found = Section("goodput", "Where the time went"), facts.goodput
    if found is None or found.wall_s <= 0:
        return section
    section.words.append(
        f"From the first start of training to its end {duration(found.wall_s)} passed; {percent(found.share)} of them "
        f"went into steps that count.")
    section.words += found.notes
    parts = [("steps that count", found.effective_s, True),
             *((cause, seconds, False) for cause, seconds in found.lost.items() if seconds > 0)]
    section.figures.append(Figure("Time by what it went into", bar_chart(
        "goodput", parts, "seconds", labels=[duration(seconds) for _, seconds, _ in parts])))
    section.tables.append(Table(
        "Time since the first start", ["went into", "that is", "seconds", "share"],
        [[name, CAUSES.get(name, "steps of training, once each"), f"{seconds:,.1f}", percent(seconds / found.wall_s)]
         for name, seconds, _ in [*parts, ("all", found.wall_s, False)]],
        labels=2, strong=frozenset({0, len(parts)})))
    if len(found.starts) > 1:
        more = len(found.starts) - SHOWN_STARTS
        section.tables.append(Table(
            "Starts of training", ["began (UTC)", "ended", "ranks", "from step", "to step", "start-up", "lasted"],
            [_start_row(start) for start in found.starts[:SHOWN_STARTS]], labels=2,
            note=f"The first {SHOWN_STARTS}; {more:,} more are in train/events.jsonl." if more > 0 else ""))
    return section


def _start_row(start: Start) -> list[str]:
    began = datetime.fromtimestamp(start.began, UTC).strftime("%Y-%m-%d %H:%M:%S")
    return [began, start.why or "–", f"{start.ranks:,}", f"{start.first:,}", f"{start.last:,}",
            duration(start.ready - start.began), duration(max(0.0, start.end - start.began))]


def checkpoints_section(facts: Facts) -> Section:
    """What the checkpoints that were evaluated beside training could do, and the finished model after them."""
    section = Section("checkpoints", "Checkpoints on the way")
    if not facts.evaluations:
        return section
    found = {step: results for step, results in facts.evaluations.items() if results.get("heldout")}
    if facts.results.get("heldout") and (last := facts.manifests["train"].counts.get("steps")):
        found[last] = dict(facts.results)
    if not found:
        return section
    steps = sorted(found)
    totals = [found[step]["heldout"]["overall"]["bits_per_byte"] for step in steps]
    if len(steps) > 1:
        section.figures.append(Figure("Bits per byte of held-out text", line_chart(
            "checkpoints", [Series("overall", steps, totals, dots=True)], "step", "bits per byte")))
    tasks = list(dict.fromkeys(name for step in steps for name in found[step].get("tasks", {})))
    section.tables.append(Table(
        "Held-out text and tasks by step", ["step", "bits per byte", *tasks],
        [[f"{step:,}", f"{total:.4f}", *(_metric(found[step].get("tasks", {}).get(name)) for name in tasks)]
         for step, total in zip(steps, totals, strict=True)],
        labels=0, note="Of each task its first metric. The last row is the finished model, measured above."))
    return section


def _metric(task: dict[str, Any] | None) -> str:
    entry = next(iter(task["metrics"].values()), None) if task else None
    return "–" if entry is None or entry["value"] is None else f"{entry['value']:.3f}"
