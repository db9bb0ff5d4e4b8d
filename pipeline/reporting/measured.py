"""Chapters on what the model can do: held-out text beside the baselines, tasks, texts that it wrote."""

from __future__ import annotations

from typing import Any

from drover.pipeline.evaluation.results import CONTAMINATION, contamination_rows
from drover.pipeline.reporting.document import Figure, Passage, Section, Table
from drover.pipeline.reporting.facts import Facts
from drover.pipeline.reporting.plots import bar_chart

MOST_SAMPLES = 4
"""Moments of training whose sample texts are shown."""


def heldout_section(facts: Facts) -> Section:
    """Bits per byte per source and overall, beside what compressors need."""
    section = Section("heldout", "Held-out text")
    held = facts.results.get("heldout")
    if not held:
        return section
    total, meanings = held["overall"], facts.results.get("definitions", {})
    names = list(total["baselines"])
    bars = sorted([(facts.config.name, total["bits_per_byte"], True),
                   *((name, value, False) for name, value in total["baselines"].items())], key=lambda bar: bar[1])
    section.words.append(
        f"{total['documents']:,} documents that no training step saw, {total['bytes']:,} bytes, {total['targets']:,} "
        f"tokens, in windows of {held['window']:,} tokens. Bits per byte do not depend on the vocabulary; fewer are "
        f"better.")
    section.figures.append(Figure("Bits per byte of held-out text", bar_chart("baselines", bars, "bits per byte")))
    rows = [_source_row(name, entry, names) for name, entry in held["sources"].items()]
    if len(rows) > 1:
        rows.append(_source_row("all", total, names))
    columns = ["source", "model", *names, "byte entropy", "perplexity", "documents", "bytes", "tokens"]
    section.tables.append(Table(
        "Bits per byte by source", columns, rows,
        note=" ".join(f"{name}: {meanings[name]}." for name in names if name in meanings),
        strong=frozenset({len(rows) - 1} if len(rows) > 1 else ())))
    return section


def _source_row(name: str, entry: dict[str, Any], baselines: list[str]) -> list[str]:
    return [name, f"{entry['bits_per_byte']:.4f}", *(f"{entry['baselines'][other]:.4f}" for other in baselines),
            f"{entry['entropy']:.4f}", "–" if entry["perplexity"] is None else f"{entry['perplexity']:.3f}",
            f"{entry['documents']:,}", f"{entry['bytes']:,}", f"{entry['targets']:,}"]


def tasks_section(facts: Facts) -> Section:
    """Results of the lm-evaluation-harness tasks, and of their items that stand in the training text."""
    section, tasks = Section("tasks", "Tasks"), facts.results.get("tasks", {})
    rows: list[list[str]] = []
    strong = set()
    for name, task in tasks.items():
        for metric, entry in task["metrics"].items():
            # The share right of blind guessing is a level for accuracies, not for other metrics of the same choices.
            value, error, chance = entry["value"], entry["stderr"], task["chance"] if _is_accuracy(metric) else None
            if error is not None and chance is not None and value > chance + 2 * error:
                strong.add(len(rows))
            rows.append([name, task["version"], metric, *map(_three, (value, error, chance)), _count(task),
                         f"{task['few_shot']}", _three(task["answer_bits_per_byte"])])
    if rows:
        harness = facts.results.get("versions", {}).get("lm_eval")
        metrics = f" Metrics are those of lm_eval {harness}." if harness else ""
        section.tables.append(Table(
            "Results", ["task", "version", "metric", "value", "std. error", "chance", "n", "few-shot",
                        "answer bits per byte"],
            rows, labels=3, strong=frozenset(strong),
            note=f"Version: of the task, as its file says. n: items.{metrics} Stressed: above chance by more than two "
                 f"standard errors. Answer bits per byte: what the right answers need given the question, smoother "
                 f"than accuracy."))
    if looked_for := contamination_rows(tasks):
        section.tables.append(Table(
            "Contamination", list(CONTAMINATION), looked_for, labels=2,
            note=f"Scores ± standard error; {facts.results.get('definitions', {}).get('contamination', '')}."))
    without = {name: task["items_without_right_choice"] for name, task in tasks.items()
               if task.get("items_without_right_choice")}
    if without:
        section.words.append(f"Items whose target is none of their choices, which count as answered wrongly: "
                             f"{', '.join(f'{count:,} of {name}' for name, count in without.items())}.")
    truncated = sum(task.get("contexts_truncated", 0) for task in tasks.values())
    if truncated:
        section.words.append(f"{truncated:,} contexts were longer than the model takes and lost their beginning.")
    return section


def _is_accuracy(metric: str) -> bool:
    return metric.startswith("acc")


def _count(task: dict[str, Any]) -> str:
    """Items, and how many there are where `evaluate.task_limit` took the first of them."""
    taken, there = task["items"], task.get("items_in_file", task["items"])
    return f"{taken:,}" if taken == there else f"{taken:,} of {there:,}"


def _three(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def texts_section(facts: Facts) -> Section:
    """Continuations by the finished model, and the same prompts while it learnt."""
    section = Section("texts", "Texts it wrote")
    sampling = facts.results.get("sampling")
    if sampling:
        section.words.append(f"The end of each passage was drawn at temperature {sampling['temperature']}, top-p "
                             f"{sampling['top_p']}, after the prompt in bold. Nothing was selected.")
    for number, entry in enumerate(facts.results.get("continuations", []), start=1):
        ended = "ended its document" if entry.get("ended") else f"cut after {entry.get('tokens', '?')} tokens"
        section.passages.append(Passage(f"Finished model, prompt {number}; {ended}", entry["prompt"], entry["text"]))
    section.passages += [Passage(f"Step {sample['step']:,}", sample["prompt"], sample["text"])
                         for sample in _spread(facts.samples)]
    return section


def _spread(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first prompt's text at a few moments, first and last among them; the last writing of a step counts."""
    if not samples:
        return []
    prompt = samples[0]["prompt"]
    by_step = {sample["step"]: sample for sample in samples if sample["prompt"] == prompt}
    steps = sorted(by_step)
    count = min(MOST_SAMPLES, len(steps))
    picked = {steps[round(index * (len(steps) - 1) / max(1, count - 1))] for index in range(count)}
    return [by_step[step] for step in sorted(picked)]


