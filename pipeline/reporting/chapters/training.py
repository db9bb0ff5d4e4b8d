"""Training: its curves, its figures and its events."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

from drover.pipeline.config.parallel import ParallelConfig
from drover.pipeline.config.phases import PhasePlan
from drover.pipeline.reporting.document import (
    Block,
    Lines,
    Record,
    Series,
    Table,
    filled,
    pairs,
    spread,
    value,
    words,
    written,
)
from drover.pipeline.reporting.facts import Facts, shareable

MOST_ROWS = 6
"""Steps in the table of the loss, and as many with a validation."""
CURVES = (("Learning rate", "learning rate", "lr", "from zero"),
          ("Gradient norm before clipping", "global norm", "grad_norm", "log"),
          ("Throughput", "tokens per second", "tokens_per_s", "from zero"),
          ("Waiting for data", "share of the step", "data_wait_s / step_s", "from zero"))
"""Charts over the steps: title, label, field of a record, scale."""
FIGURES = {
    "steps": "{steps}", "tokens": "{tokens}", "sequences": "{samples}", "predicted tokens": "{targets}",
    "epochs": "{epochs}", "parameters": "{parameters}", "vocabulary size": "{vocab_size}", "precision": "{precision}",
    "engine": "{engine}", "ranks": "{ranks}", "gradient accumulation": "{accumulation}",
    "accelerator": "{device_name}", "restarts": "{restarts}", "skipped updates": "{skipped}",
    "loss spikes": "{spikes}", "rollbacks": "{rollbacks}", "token shards verified": "{token_shards_checked}",
    "time in steps": "{seconds:s}", "mean step": "{seconds / timed:s}", "waiting for data": "{waited / seconds:.2%}",
    "peak memory of rank 0": "{memory:B}", "model FLOP utilization, mean": "{used / measured:.1%}",
    "checkpoints saved": "{saved}", "time stalled for checkpoints": "{stalled:s}", "longest stall": "{stall:s}",
    "failed attempts to save": "{unsaved}", "checkpoints copied to an object store": "{copied}",
    "bytes copied": "{copied_bytes:B}", "longest time from a checkpoint to its copy": "{behind:s}",
    "failed attempts to copy": "{uncopied}"}
MOST_EVENTS = 50
"""Rows of the table of events; a run may skip thousands of steps."""
REPORTED_ELSEWHERE = ("checkpoint", "checkpoint_copied", "fp8", "norms")
LABELS = {"startup_s": "startup (s)", "look_s": "validation and sampling (s)", "stall_s": "checkpoint stall (s)",
          "train_s": "training so far (s)", "lost_s": "lost (s)", "flash": "flash kernels"}
"""Names of an event's details."""


def training(facts: Facts) -> Iterator[Block]:
    """The chapter: a summary, curves over the steps, figures, and events."""
    train = facts.config.train
    ran = "{steps:,} steps in {precision}, ranks: {ranks:,}, engine: {engine}."
    phases = "; ".join(map(str, PhasePlan.of(train).phases))
    yield filled(f"{ran} {phases}." if train.phases else
                 f"{ran} {train.batch_tokens:,} tokens a step in sequences of {train.sequence_length:,}; "
                 f"{train.schedule} schedule, peak learning rate {train.lr:g}, {train.warmup_steps:,} warmup steps.",
                 facts.counts("train"))
    yield from _losses(facts)
    for title, label, name, scale in CURVES:
        records = facts.updates if scale == "log" else facts.metrics
        yield Lines(title, "step", label, _curve(records, name, title != "Learning rate"), scale=scale,
                    percent="/" in name)
    yield _steps(facts)
    yield _figures(facts)
    yield _events(facts)


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and those before it, up to `window` of them."""
    sums = [0.0, *accumulate(values)]
    return [(sums[end] - sums[max(0, end - window)]) / min(end, window) for end in range(1, len(sums))]


def _losses(facts: Facts) -> Iterator[Block]:
    """Training and validation loss in one chart, and validation bits per byte in another."""
    measured = [record for record in facts.metrics if record.get("validation_bpb")]
    texts = value("splits[validation]", facts.counts("encode")) or {}
    validation, losses = [], _curve(facts.updates, "loss", name="training, ")
    for source in dict.fromkeys(source for record in measured for source in record["validation_bpb"]):
        steps, bits = _points(measured, f"validation_bpb[{source}]")
        validation.append(Series(source, steps, bits))
        if text := texts.get(source):
            nats = math.log(2) * text["text_bytes"] / text["tokens"]
            losses.append(Series(f"validation, {source}", steps, [nats * number for number in bits]))
    yield Lines("Loss", "step", "nats per token", losses,
                "Validation is measured in bits per byte, and converted here by the bytes per token of each source's "
                "validation text." if validation else "")
    yield Lines("Validation bits per byte", "step", "bits per byte", validation,
                "On a fixed part of the validation text. The chapter Validation uses all that was configured.")


def _curve(records: Sequence[Record], field: str, smooth: bool = True, name: str = "") -> list[Series]:
    """The values of each step, and their mean over a window where there are many."""
    steps, values = _points(records, field)
    window = max(1, len(records) // 50)
    if window == 1 or not smooth:
        return [Series(f"{name}each step", steps, values)]
    return [Series(f"{name}each step", steps, values, faint=True),
            Series(f"{name}mean of {window}", steps, smoothed(values, window))]


def _points(records: Sequence[Record], field: str) -> tuple[list[float], list[float]]:
    found = {record["step"]: float(number) for record in records if (number := value(field, record)) is not None}
    return list(found), list(found.values())


def _steps(facts: Facts) -> Table:
    """A few steps, and as many with validation, as a text form of the curves."""
    measured = [record for record in facts.updates if record.get("validation_bpb")]
    sources = dict.fromkeys(source for record in measured for source in record["validation_bpb"])
    shown = {record["step"]: record for record in [*spread(facts.updates, MOST_ROWS), *spread(measured, MOST_ROWS)]}
    return Table("Loss by step", {
        "step": "{step:,}", "training loss (nats per token)": "{loss:.4f}", "learning rate": "{lr:.2e}",
        "tokens so far": "{tokens:,}",
        **{f"validation bits per byte, {source}": f"{{validation_bpb[{source}]:.3f}}" for source in sources}},
        [shown[step] for step in sorted(shown)])


def _figures(facts: Facts) -> Table:
    counts = facts.counts("train")
    timed = [record for record in facts.metrics if record.get("step_s")]
    used = [record["mfu"] for record in timed if record.get("mfu")]
    saved, copied = facts.events_of("checkpoint"), facts.events_of("checkpoint_copied")
    stalls = [event["stall_s"] for event in saved if "stall_s" in event]
    packing = {f"packing, {name}": f"{{packing[{name}]}}" for name in counts.get("packing", {})}
    return pairs("Training figures", {**FIGURES, **packing}, {
        **counts, "timed": len(timed), "seconds": sum(record["step_s"] for record in timed) or None,
        "waited": sum(record.get("data_wait_s") or 0 for record in timed), "used": sum(used), "measured": len(used),
        "memory": 1e6 * max((record.get("memory_mb") or 0 for record in timed), default=0) or None,
        "saved": len(saved), "stalled": sum(stalls), "stall": max(stalls, default=None),
        "unsaved": len(facts.events_of("checkpoint_failed")) or None, "copied": len(copied) or None,
        "copied_bytes": sum(event["bytes"] for event in copied) or None,
        "behind": max((event["behind_s"] for event in copied), default=None),
        "uncopied": len(facts.events_of("checkpoint_copy_failed")) or None})


def _events(facts: Facts) -> Table:
    """A row for each event."""
    shown = [event for event in facts.events if event.get("event") not in REPORTED_ELSEWHERE]
    return Table("Events", {"time (UTC)": "{time}", "event": "{event}", "details": "{details}"}, [
        {"time": str(event.get("time", "")).replace("T", " ")[:19], "event": words(event.get("event", "")),
         "details": shareable(", ".join(f"{LABELS.get(key, words(key))} {written(value)}"
                                        for key, value in _details(event).items() if value))}
        for event in shown[:MOST_EVENTS]],
        f"The first {MOST_EVENTS} of {len(shown):,}; all are in train/events.jsonl."
        if len(shown) > MOST_EVENTS else "")


def _details(event: Record) -> Record:
    """The fields to show. A skipped step's text contains its numbers, and a few of its documents suffice. Of the layout
    only values that are not the default."""
    left_out = ("time", "event", "planned", *(("loss", "grad_norm") if "text" in event else ()))
    found = {key: value for key, value in event.items() if key not in left_out}
    if documents := found.get("documents"):
        found["documents"] = [f"{document.get('source')}/{document.get('key')}" for document in documents[:3]]
        found["further documents"] = len(documents) - 3 if len(documents) > 3 else 0
    usual = ParallelConfig().model_dump()
    return found | {"parallel": {key: value for key, value in found.get("parallel", {}).items() if value != usual[key]}}
