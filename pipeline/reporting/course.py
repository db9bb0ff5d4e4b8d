"""The chapter on training: its curves, and how it went."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from drover.pipeline.config.phases import PhasePlan
from drover.pipeline.console import duration
from drover.pipeline.reporting.document import Figure, Section, Table, percent, shown, words
from drover.pipeline.reporting.facts import Facts
from drover.pipeline.reporting.plots import Series, line_chart, smoothed

MOST_POINTS = 1500
"""Points of a curve; longer ones are thinned."""
SHOWN_STEPS = 10
"""Rows of the table of the loss."""
SHOWN_EVENTS = 50
"""Rows of the table of events; a run may skip thousands of steps."""


def training_section(facts: Facts) -> Section:
    """Loss, held-out bits per byte, learning rate, gradient norm, throughput and data wait over the steps."""
    section = Section("training", "Training")
    counts, metrics = facts.manifests["train"].counts, facts.metrics
    section.words.append(_in_words(facts))
    if facts.updates:
        section.figures += _figures(facts)
        section.tables.append(_loss_table(facts))
    left_out = ("checkpoint", "plan_sha256", "heldout_bpb", "loss", "phases", "planned")
    numbers = [*((words(key), shown(value)) for key, value in _flat(counts) if key not in left_out),
               *_step_rows(metrics), *_checkpoint_rows(facts)]
    if numbers:
        section.tables.append(Table("Training in numbers", ["", ""], numbers))
    told = [event for event in facts.events
            if event.get("event") not in ("checkpoint", "checkpoint_copied", "fp8", "norms")]
    rows = [[str(event.get("time", "")).replace("T", " ")[:19], event.get("event", ""), _details(event)]
            for event in told[:SHOWN_EVENTS]]
    if rows:
        more = f"The first {SHOWN_EVENTS} of {len(told):,}; all are in train/events.jsonl."
        section.tables.append(Table("Events", ["time (UTC)", "event", "details"], rows, labels=3,
                                    note=more if len(told) > SHOWN_EVENTS else ""))
    return section


def _flat(counts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Counts by name; of documents packed in phases those of each plan for itself."""
    for key, value in counts.items():
        plans = {name: found for name, found in value.items() if isinstance(found, dict)} if key == "packing" else {}
        if plans:
            yield from ((f"{key} {name}", found) for name, found in plans.items())
        else:
            yield key, value


def _details(event: dict[str, Any]) -> str:
    """What an event tells; of a bad step its sentence says the numbers, and its first documents are enough."""
    left_out = ("time", "event", "planned", *(("loss", "grad_norm", "outcome") if "text" in event else ()))
    found = {key: value for key, value in event.items() if key not in left_out and value}
    if isinstance(documents := found.get("documents"), list):
        names = [f"{document.get('source')}/{document.get('key')}" for document in documents[:3]]
        found["documents"] = [*names, *([f"{len(documents) - 3:,} more"] if len(documents) > 3 else [])]
    return ", ".join(f"{key} {shown(value)}" for key, value in found.items())


def _checkpoint_rows(facts: Facts) -> list[tuple[str, str]]:
    saved, failed = facts.events_of("checkpoint"), facts.events_of("checkpoint_failed")
    rows = [("checkpoints saved", f"{len(saved):,}")] if saved else []
    if stalls := [event["stall_s"] for event in saved if "stall_s" in event]:
        rows.append(("training stalled for checkpoints",
                     f"{shown(sum(stalls))} s in all, {shown(max(stalls))} s at most"))
    if failed:
        rows.append(("attempts to save that failed", f"{len(failed):,}"))
    copied, uncopied = facts.events_of("checkpoint_copied"), facts.events_of("checkpoint_copy_failed")
    if copied:
        rows.append(("checkpoints copied to an object store",
                     f"{len(copied):,}, {shown(sum(event['bytes'] for event in copied) / 1e6)} MB, "
                     f"{shown(max(event['behind_s'] for event in copied))} s after the checkpoint at most"))
    return [*rows, *([("attempts to copy one that failed", f"{len(uncopied):,}")] if uncopied else [])]


def _in_words(facts: Facts) -> str:
    counts, train = facts.manifests["train"].counts, facts.config.train
    if train.phases:
        phases = PhasePlan.of(train).phases
        return (f"{shown(counts.get('steps'))} steps in {len(phases)} phase{'s' if len(phases) > 1 else ''}, "
                f"{counts.get('precision', train.precision)}, {shown(counts.get('ranks'))} "
                f"rank{'' if counts.get('ranks') == 1 else 's'}. {'; '.join(map(str, phases))}.")
    return (f"{shown(counts.get('steps'))} steps of {train.batch_tokens:,} tokens in sequences of "
            f"{train.sequence_length:,}, {train.schedule} schedule with peak learning rate {train.lr:g} after "
            f"{train.warmup_steps} steps of warmup, {counts.get('precision', train.precision)}, "
            f"{shown(counts.get('ranks'))} rank{'' if counts.get('ranks') == 1 else 's'}"
            f"{' under ' + str(counts['engine']) if counts.get('engine') else ''}.")


def _figures(facts: Facts) -> list[Figure]:
    metrics = facts.updates
    window = max(1, len(metrics) // 50)
    steps, losses = _points(metrics, "loss")
    loss = [Series("each step", *_thin(steps, losses), faint=True),
            Series(f"mean of {window}", *_thin(steps, smoothed(losses, window)))]
    figures = [Figure("Training loss", line_chart("loss", loss if window > 1 else [Series("loss", steps, losses)],
                                                  "step", "nats per token"))]
    if facts.heldout:
        figures.append(Figure("Held-out bits per byte while training",
                              line_chart("heldout-curve", _heldout_series(facts.heldout), "step", "bits per byte"),
                              "On a fixed part of the held-out text; the final figures above are on all that was "
                              "asked for."))
    charts: list[tuple[str, str, str, str, dict[str, bool], Callable[[dict[str, Any]], float | None]]] = [
        ("lr", "Learning rate", "learning rate", "rate", {"from_zero": True}, lambda record: record.get("lr")),
        ("norm", "Gradient norm before clipping", "global norm", "norm", {"log": True},
         lambda record: record.get("grad_norm")),
        ("speed", "Throughput", "tokens per second", "speed", {"from_zero": True},
         lambda record: record.get("tokens_per_s")),
        ("wait", "Waiting for data", "share of the step", "wait", {"from_zero": True, "percent": True}, _wait)]
    for name, title, label, short, style, value in charts:
        points = [(record["step"], found) for record in metrics if (found := value(record)) is not None]
        if not points:
            continue
        x, y = [point[0] for point in points], [float(point[1]) for point in points]
        lines = [Series("each step", *_thin(x, y), faint=True),
                 Series(f"mean of {window}", *_thin(x, smoothed(y, window)))]
        figures.append(Figure(title, line_chart(
            name, lines if window > 1 and name != "lr" else [Series(short, *_thin(x, y))], "step", label, **style)))
    return figures


def _heldout_series(heldout: list[tuple[int, dict[str, float]]]) -> list[Series]:
    """A line for each source."""
    sources = list(dict.fromkeys(name for _, values in heldout for name in values))
    return [Series(name, [step for step, values in heldout if name in values],
                   [values[name] for _, values in heldout if name in values], dots=True) for name in sources]


def _wait(record: dict[str, Any]) -> float | None:
    if not record.get("step_s") or record.get("data_wait_s") is None:
        return None
    return float(100 * record["data_wait_s"] / record["step_s"])


def _points(metrics: list[dict[str, Any]], key: str) -> tuple[list[float], list[float]]:
    found = [(record["step"], float(record[key])) for record in metrics if record.get(key) is not None]
    return [step for step, _ in found], [value for _, value in found]


def _thin(x: list[float], y: list[float]) -> tuple[list[float], list[float]]:
    """At most MOST_POINTS of the points, evenly; the last one stays."""
    every = -(-len(x) // MOST_POINTS)
    kept = sorted({*range(0, len(x), max(1, every)), len(x) - 1} if x else ())
    return [x[index] for index in kept], [y[index] for index in kept]


def _loss_table(facts: Facts) -> Table:
    """A few steps, so that the curve can be read where it cannot be seen."""
    metrics = facts.updates
    picked = sorted({round(index * (len(metrics) - 1) / (SHOWN_STEPS - 1)) for index in range(SHOWN_STEPS)})
    heldout = facts.heldout
    rows = []
    for index in picked:
        record = metrics[index]
        # The last measurement up to here.
        bits = next((values for step, values in reversed(heldout) if step <= record["step"]), {})
        rows.append([f"{record['step']:,}", f"{record['loss']:.4f}", f"{record['lr']:.2e}" if "lr" in record else "–",
                     shown(record.get("tokens")), ", ".join(f"{value:.3f}" for value in bits.values()) or "–"])
    sources = ", ".join(dict.fromkeys(name for _, values in heldout for name in values))
    bits_title = f"held-out bits per byte ({sources})" if sources else "held-out bits per byte"
    return Table("The curve in numbers",
                 ["step", "loss (nats per token)", "learning rate", "tokens so far", bits_title], rows, labels=0)


def _step_rows(metrics: list[dict[str, Any]]) -> list[tuple[str, str]]:
    timed = [record for record in metrics if record.get("step_s")]
    if not timed:
        return []
    seconds = sum(record["step_s"] for record in timed)
    waited = sum(record.get("data_wait_s") or 0 for record in timed)
    rows = [("mean step", duration(seconds / len(timed))), ("waiting for data", percent(waited / seconds, 2))]
    memory = [record["memory_mb"] for record in timed if record.get("memory_mb")]
    utilisation = [record["mfu"] for record in timed if record.get("mfu")]
    if memory:
        rows.append(("peak memory of rank 0", f"{max(memory):,.0f} MB"))
    if utilisation:
        rows.append(("model FLOP utilisation, mean", percent(sum(utilisation) / len(utilisation))))
    return rows
