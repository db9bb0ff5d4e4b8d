"""The end of training: its manifest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.files import output_record
from pipeline.records.checkpoints import CHECKPOINTS, MARKER, read_marker
from pipeline.records.generation_settings import FILE
from pipeline.records.metrics import read_metrics
from pipeline.records.rollbacks import ROLLBACKS

if TYPE_CHECKING:
    from pipeline.training.session import Session


def commit(session: Session, checkpoint: Path, shards_checked: int) -> None:
    """Write the manifest of a training that is done. For one rank.

    Args:
        checkpoint: of the last step.
        shards_checked: token shards that were compared with what encode committed.
    """
    folder, name = session.work.folder, f"{CHECKPOINTS}/{checkpoint.name}"
    metrics = read_metrics(folder / "metrics.jsonl")
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
        "epochs": session.data.order.epochs(session.progress.samples), "plan_sha256": session.data.order.plan_sha256,
        "precision": session.progress.precision, "ranks": session.ranks.world,
        "accumulation": session.batch.accumulation, "engine": session.config.parallel.engine,
        **session.guard_runner.guards.counters(), "token_shards_checked": shards_checked,
        "device_name": session.ranks.device_name, "loss": metrics[-1]["loss"] if metrics else None,
        "heldout_bpb": metrics[-1].get("heldout_bpb") if metrics else None,
        "step_seconds": round(sum(record["step_s"] for record in metrics), 3)}, verified=True)
