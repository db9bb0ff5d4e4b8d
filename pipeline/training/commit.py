"""The end of training: its manifest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.files import output_record
from pipeline.records.checkpoints import CHECKPOINTS, MARKER, read_marker
from pipeline.records.generation_settings import FILE
from pipeline.records.metrics import read_metrics
from pipeline.records.rollbacks import ROLLBACKS
from pipeline.training.summary import packing_facts

if TYPE_CHECKING:
    from pipeline.training.session import Session


def commit(session: Session, checkpoint: Path, shards_checked: int) -> None:
    """Write the manifest of a training that is done. For one rank.

    Args:
        checkpoint: of the last step.
        shards_checked: token shards that were compared with what encode committed.
    """
    folder, name = session.work.folder, f"{CHECKPOINTS}/{checkpoint.name}"
    # What was logged beyond the last step, before this training was made shorter, is of no model that there is.
    metrics = [record for record in read_metrics(folder / "metrics.jsonl") if record["step"] <= session.progress.step]
    # The marker's hashes were compared with the files a moment ago, by all ranks together.
    outputs = [{**record, "path": f"{name}/{record['path']}"} for record in read_marker(checkpoint)["files"]]
    outputs += [output_record(folder, path) for path in
                (checkpoint / MARKER, folder / "metrics.jsonl", folder / "samples.jsonl", folder / "events.jsonl",
                 *([folder / ROLLBACKS] if session.guard_runner.rollbacks else []),
                 *([folder / FILE] if (folder / FILE).is_file() else []))]
    session.work.commit(outputs, {
        "checkpoint": name, "steps": session.progress.step, "tokens": session.progress.tokens,
        "samples": session.progress.samples, "targets": session.progress.targets, "restarts": session.progress.restarts,
        "parameters": session.model_config.parameter_count, "vocab_size": session.model_config.vocab_size,
        **_consumed(session, metrics), "plan_sha256": session.data.order.plan_sha256,
        "precision": session.progress.precision, "ranks": session.ranks.world,
        "accumulation": session.batch.accumulation, "engine": session.config.parallel.engine,
        **packing_facts(session.data), **session.guard_runner.guards.counters(), "token_shards_checked": shards_checked,
        "device_name": session.ranks.device_name, "loss": metrics[-1]["loss"] if metrics else None,
        "heldout_bpb": metrics[-1].get("heldout_bpb") if metrics else None,
        "step_seconds": round(sum(record["step_s"] for record in metrics), 3)}, verified=True)


def _consumed(session: Session, metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """How often each source was gone through, and of each phase what it has trained on and what rollbacks left out:
    tokens by source. Of packed documents those are means of sequences, and `learned` is the sum that was counted, where
    the log has it."""
    data, samples = session.data, session.progress.samples
    phases = [{"steps": phase.steps, "tokens": taken.consumed, "left_out": taken.left_out} for phase, taken in
              zip(data.order.plan.phases, data.order.taken(samples), strict=True)]
    if data.packings:
        done = {0: 0, **{record["step"]: record["tokens"] for record in metrics}}
        for phase, counted in zip(data.order.plan.phases, phases, strict=True):
            if phase.first_step in done and phase.end_step in done:
                counted["learned"] = done[phase.end_step] - done[phase.first_step]
    return {"epochs": data.order.epochs(samples), "phases": phases}
