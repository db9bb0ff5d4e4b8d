"""Run folders made by hand: what stages, runner and submission leave, without any of them."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from drover.launch.slurm.chain import ChainJob, JobChain
from drover.pipeline.contract.manifest import STARTED, Manifest
from drover.pipeline.contract.stages import STAGES
from drover.pipeline.contract.state import PROGRESS, Progress
from drover.pipeline.core.files import append_line, write_json, write_text

NOW = datetime(2026, 11, 21, 12, 0, 0, tzinfo=UTC).timestamp()
"""When these runs are looked at."""
COMMAND = ("launch/submit.py", "--stage", "all", "--config", "configs/demo.yaml", "--nodes", "4")
SETTINGS: dict[str, Any] = {"name": "demo", "train": {"steps": 500, "checkpoint": {"every_steps": 100}}}


def ago(seconds: float) -> str:
    """A time before NOW, as files have it."""
    return datetime.fromtimestamp(NOW - seconds, UTC).isoformat(timespec="milliseconds")


class HandMade:
    """The folder of one run."""

    def __init__(self, folder: Path, settings: dict[str, Any] | None = None) -> None:
        self.folder = folder
        write_text(folder / "config.yaml", yaml.dump(settings or SETTINGS))

    def done(self, *stages: str, seconds: float = 65, until: float = 1000, **details: Any) -> None:
        """Stages with a manifest, finished `until` seconds ago."""
        for stage in stages:
            self.begun(stage)
            Manifest(stage, details.get("fingerprint", {}), details.get("outputs", []), details.get("counts", {}), "",
                     wall_s=seconds, started=ago(until + seconds), finished=ago(until)).write(self.folder / stage)

    def begun(self, stage: str) -> None:
        """A stage with a start record."""
        write_json(self.folder / stage / STARTED, {"fingerprint": {}})

    def state(self, stage: str, status: str, *, seconds: float = 600, job: str = "", **details: Any) -> None:
        """STATE.json, written so many seconds ago."""
        self.begun(stage)
        write_json(self.folder / stage / "STATE.json", {
            "status": status, "job": job, "at": ago(seconds), "host": "node-of-nowhere", **details})

    def progress(self, stage: str, done: int, total: int, unit: str, **more: Any) -> None:
        """PROGRESS.json, just written."""
        self.begun(stage)
        write_json(self.folder / stage / PROGRESS, asdict(Progress(done, total, unit, **{"at": ago(0), **more})))

    def attempt(self, event: str, stage: str, job: str, *, seconds: float = 600, start: int = 0, **more: Any) -> None:
        """A line of launch/attempts/."""
        append_line(self.folder / "launch" / "attempts" / f"{job}.jsonl", {
            "event": event, "at": ago(seconds), "stage": stage, "job": job, "restart": 0, "start": start,
            "chain": "c1", **more})

    def log(self, path: str, text: str = "words\n") -> Path:
        """A file under logs/."""
        write_text(self.folder / "logs" / path, text)
        return self.folder / "logs" / path

    def submitted(self, *jobs: ChainJob, seconds: float = 900, planned: int = 0, refused: str = "") -> None:
        """The newest submission."""
        JobChain("c1", ago(seconds), COMMAND, {"commit": "61ec0478c8f1f", "changed": True},
              str(self.folder / "launch/config-1.yaml"), "",
              jobs=jobs, planned=planned, refused=refused).write(self.folder)

    def job(self, id: str, stage: str, elements: tuple[int, ...] | None = None,
            needs: tuple[str, ...] = ()) -> ChainJob:
        """A job of the submission."""
        return ChainJob(f"demo-{stage}", stage, id, elements, needs)

    def whole_chain(self) -> list[ChainJob]:
        """A job for every stage, shard and encode as arrays of four."""
        jobs: list[ChainJob] = []
        for stage, id in zip(STAGES, ("12", "13", "15", "16", "17", "18", "19"), strict=True):
            elements = (0, 1, 2, 3) if stage in ("shard", "encode") else None
            jobs.append(self.job(id, stage, elements, tuple(job.id for job in jobs[-1:])))
        return jobs
