"""What happened while training."""

from __future__ import annotations

from drover.pipeline.config.parallel import ParallelConfig
from drover.pipeline.reporting.document import Record, Table, words, written
from drover.pipeline.reporting.facts import Facts, shareable

SHOWN = 50
"""Rows; a run may skip thousands of steps."""
TOLD_ELSEWHERE = ("checkpoint", "checkpoint_copied", "fp8", "norms")
LABELS = {"startup_s": "startup (s)", "look_s": "validation and sampling (s)", "stall_s": "checkpoint stall (s)",
          "train_s": "training so far (s)", "lost_s": "lost (s)", "flash": "flash kernels"}


def events(facts: Facts) -> Table:
    """A row for each."""
    told = [event for event in facts.events if event.get("event") not in TOLD_ELSEWHERE]
    return Table("Events", {"time (UTC)": "{time}", "event": "{event}", "details": "{details}"}, [
        {"time": str(event.get("time", "")).replace("T", " ")[:19], "event": words(event.get("event", "")),
         "details": shareable(", ".join(f"{LABELS.get(key, words(key))} {written(value)}"
                                        for key, value in _details(event).items() if value))}
        for event in told[:SHOWN]],
        f"The first {SHOWN} of {len(told):,}; all are in train/events.jsonl." if len(told) > SHOWN else "")


def _details(event: Record) -> Record:
    """Of a bad step its sentence has the numbers, and its first documents are enough; of the layout, what is no
    default."""
    left_out = ("time", "event", "planned", *(("loss", "grad_norm") if "text" in event else ()))
    found = {key: value for key, value in event.items() if key not in left_out}
    if documents := found.get("documents"):
        found["documents"] = [f"{document.get('source')}/{document.get('key')}" for document in documents[:3]]
        found["further documents"] = len(documents) - 3 if len(documents) > 3 else 0
    usual = ParallelConfig().model_dump()
    return found | {"parallel": {key: value for key, value in found.get("parallel", {}).items() if value != usual[key]}}
