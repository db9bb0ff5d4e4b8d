"""Events during training."""

from __future__ import annotations

from drover.pipeline.config.parallel import ParallelConfig
from drover.pipeline.reporting.document import Record, Table, words, written
from drover.pipeline.reporting.facts import Facts, shareable

SHOWN = 50
"""Rows; a run may skip thousands of steps."""
REPORTED_ELSEWHERE = ("checkpoint", "checkpoint_copied", "fp8", "norms")
LABELS = {"startup_s": "startup (s)", "look_s": "validation and sampling (s)", "stall_s": "checkpoint stall (s)",
          "train_s": "training so far (s)", "lost_s": "lost (s)", "flash": "flash kernels"}


def events(facts: Facts) -> Table:
    """A row for each."""
    shown = [event for event in facts.events if event.get("event") not in REPORTED_ELSEWHERE]
    return Table("Events", {"time (UTC)": "{time}", "event": "{event}", "details": "{details}"}, [
        {"time": str(event.get("time", "")).replace("T", " ")[:19], "event": words(event.get("event", "")),
         "details": shareable(", ".join(f"{LABELS.get(key, words(key))} {written(value)}"
                                        for key, value in _details(event).items() if value))}
        for event in shown[:SHOWN]],
        f"The first {SHOWN} of {len(shown):,}; all are in train/events.jsonl." if len(shown) > SHOWN else "")


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
