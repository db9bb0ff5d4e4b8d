"""Training: its curves, its figures and its events, and how its time was used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from statistics import fmean

from drover.pipeline.config.phases import PhasePlan
from drover.pipeline.records.checkpoint_scores import SCORED
from drover.pipeline.records.goodput import CAUSES
from drover.pipeline.reporting.document import (
    ALL,
    NONE,
    Block,
    Lines,
    Series,
    Table,
    filled,
    spread,
    value,
    words,
    written,
)
from drover.pipeline.reporting.facts import Facts, shareable

SAMPLE = ("Training measures the validation sample: the first documents of each source, {sample:,} tokens or a little "
          "more. The finished model was measured on {overall[documents]:documents} with {overall[targets]:,} "
          "predicted tokens: those are the figures under Validation and at the top.")
MOST_ROWS = 6
"""Steps in the table of the loss, and as many with a validation."""
CURVES = {"Learning rate": "lr", "Gradient norm before clipping": "grad_norm", "Tokens per second": "tokens_per_s"}
"""Charts over the steps, and the field of a record that each shows."""
FIGURES = {
    "steps": "{steps}", "tokens": "{tokens}", "predicted tokens": "{targets}", "epochs": "{epochs}",
    "precision": "{precision}", "engine": "{engine}", "ranks": "{ranks}", "gradient accumulation": "{accumulation}",
    "packing": "{packing}", "accelerator": "{device_name}", "restarts": "{restarts}", "skipped updates": "{skipped}",
    "loss spikes": "{spikes}", "rollbacks": "{rollbacks}",
    "mean step": "{step_s[sum] / step_s[number]:s}", "waiting for data": "{data_wait_s[sum] / step_s[sum]:.2%}",
    "peak memory of rank 0": "{memory_mb[bytes]:B}", "model FLOP utilization, mean": "{mfu[sum] / mfu[number]:.1%}",
    "checkpoints saved": "{of[checkpoint]}", "failed attempts to save": "{of[checkpoint_failed]}",
    "checkpoints copied to an object store": "{of[checkpoint_copied]}",
    "failed attempts to copy": "{of[checkpoint_copy_failed]}"}
MOST_EVENTS = 50
"""Rows of the table of events and of that of starts; a run may skip thousands of steps."""
EVENT_FIELDS = ("text", "reason", "error", "changes", "ranks", "planned_epochs", "sink")
"""The fields of an event that are shown."""
REPORTED_ELSEWHERE = ("checkpoint", "checkpoint_copied", "fp8", SCORED)
PRODUCTIVE = "productive steps"
MEANINGS = {**CAUSES, PRODUCTIVE: "steps of the finished model, each counted once",
            ALL: "from the first start of training to its end"}


def training(facts: Facts) -> Iterator[Block]:
    """The chapter: a summary, curves over the steps, figures, and events."""
    plan = PhasePlan.of(facts.config.train)
    phases = "; ".join(map(str, plan.phases)) if plan.declared else str(plan.phases[0]).partition(": ")[2]
    yield filled("{steps:steps} in {precision}, ranks: {ranks:,}, engine: {engine}. The last settings plan {plan}.",
                 {**facts.counts("train"), "plan": phases})
    if facts.validation and facts.config.train.validation_every is not None:
        yield filled(SAMPLE, {**facts.validation, "sample": facts.config.train.validation_tokens})
    yield _losses(facts)
    for over, measure in facts.measures.items():
        points = {source: facts.over(measure, f"validation_sample_bpb[{source}]") for source in _sources(facts)}
        yield Lines("Validation sample", "bits per byte", [
            Series(source, [*own], [*own.values()]) for source, own in points.items() if own],
            over=over, colour=1)  # of sources, as next to the training loss
    for title, name in CURVES.items():
        yield Lines(title, "", curve(facts.series(name, facts.updates)), from_zero=True)
    yield _steps(facts)
    yield _figures(facts)
    yield _phases(facts)
    yield _events(facts)


def _losses(facts: Facts) -> Lines:
    """Training and validation loss in one chart."""
    losses = curve(facts.series("loss", facts.updates), "training, ")
    for source in _sources(facts):
        if points := facts.series(f"validation_sample_loss[{source}]"):
            losses.append(Series(f"validation sample, {source}", list(points), list(points.values())))
    return Lines("Loss", "nats per token", losses)


def _sources(facts: Facts) -> Iterable[str]:
    """Those with validation text."""
    return value("splits[validation]", facts.counts("encode")) or ()


def curve(points: Mapping[int, float] | Mapping[float, float], name: str = "") -> list[Series]:
    """The values of each step, and last, where there are many, their means over windows.

    points: by x.
    """
    steps, values, window = list(points), list(points.values()), max(1, len(points) // 50)
    means = [fmean(values[end - window:end]) for end in range(window, len(values) + 1, window)]
    return [Series(f"{name}each step", steps, values, faint=window > 1),
            *([Series(f"{name}mean of {window}", steps[window - 1::window], means)] if window > 1 else [])]


def _steps(facts: Facts) -> Table:
    """A few steps, and as many with validation, as a text form of the curves."""
    measured = [record for record in facts.updates if record.get("validation_sample_bpb")]
    sources = dict.fromkeys(source for record in measured for source in record["validation_sample_bpb"])
    shown = {record["step"]: record for record in [*spread(facts.updates, MOST_ROWS), *spread(measured, MOST_ROWS)]}
    return Table("Loss by step", {
        "step": "{step:,}", "training loss (nats per token)": "{loss:.4f}", "learning rate": "{lr:.2e}",
        "gradient norm": "{grad_norm:.3f}", "tokens per second": "{tokens_per_s:,.0f}", "tokens so far": "{tokens:,}",
        **{f"validation sample, {source} (bits per byte)": f"{{validation_sample_bpb[{source}]:.3f}}"
           for source in sources}}, [shown[step] for step in sorted(shown)])


def _figures(facts: Facts) -> Table:
    numbers = {name: facts.series(name).values() for name in ("step_s", "data_wait_s", "mfu", "memory_mb")}
    known = {**facts.counts("train"), "of": Counter(event["event"] for event in facts.events),
             **{name: {"sum": sum(result), "number": len(result), "bytes": 1e6 * max(result)}
                for name, result in numbers.items() if result}}
    rows = [{"label": label, "value": filled(figure, known)} for label, figure in FIGURES.items()]
    return Table("Training figures", {"": "{label}", " ": "{value}"}, [row for row in rows if row["value"] != NONE])


def _phases(facts: Facts) -> Table:
    """Tokens of each source in each phase; empty if training had neither phases nor a mixture."""
    phases = facts.counts("train").get("phases", [])
    mixed = facts.config.train.phases or facts.config.train.mixture is not None
    return Table("Tokens by phase and source", {"phase": "{phase}", "steps": "{steps:,}", "trained on": "{tokens}",
                                                "rolled back": "{left_out}"},
                 [{**phase, "phase": str(number)} for number, phase in enumerate(phases, 1) if mixed],
                 "With packed documents, a source's tokens are estimated by the mean of its sequences.")


def _events(facts: Facts) -> Table:
    """A row for each event."""
    shown = [event for event in facts.events if event.get("event") not in REPORTED_ELSEWHERE]
    return Table("Events", {"time (UTC)": "{at}", "event": "{kind}", "step": "{step:,}", "details": "{details}"}, [
        {**event, "at": str(event.get("time", "")).replace("T", " ")[:19], "kind": words(event["event"]),
         "details": shareable("; ".join(
             f"{words(key)}: {written(event.get(key))}" for key in EVENT_FIELDS if event.get(key)))}
        for event in shown[:MOST_EVENTS]],
        f"The first {MOST_EVENTS} of {len(shown):,}; all are in train/events.jsonl."
        if len(shown) > MOST_EVENTS else "")


def goodput(facts: Facts) -> Iterator[Block]:
    """The share of time that went into productive steps, and where the rest went; empty if the records of training do
    not suffice."""
    if (result := facts.goodput) is None or result.wall_s <= 0:
        return
    yield from result.notes
    uses = {PRODUCTIVE: result.effective_s, **{cause: seconds for cause, seconds in result.lost.items() if seconds},
            ALL: result.wall_s}
    yield Table("Time since the first start", {
        "use": "{use}", "seconds": "{seconds:,.1f}", "share": "{seconds / all:.1%}", "meaning": "{meaning}"},
        [{"use": name, "seconds": seconds, "all": result.wall_s, "meaning": MEANINGS[name]}
         for name, seconds in uses.items()])
    yield Table("Starts of training", {
        "began (UTC)": "{time}", "ended": "{why}", "ranks": "{ranks:,}", "from step": "{first:,}",
        "to step": "{last:,}"}, [
        {**vars(start), "time": datetime.fromtimestamp(start.began, UTC).strftime("%Y-%m-%d %H:%M:%S")}
        for start in result.starts[-MOST_EVENTS:]],
        f"The last {MOST_EVENTS} of {len(result.starts):,}." if len(result.starts) > MOST_EVENTS else "")
