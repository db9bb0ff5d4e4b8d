"""Run folders made by hand, and what is made of them, for the tests of how runs are shown."""

from __future__ import annotations

from typing import Any

from launch.run_status.run_files import read_run
from launch.run_status.run_status import RunStatus, judge
from launch.run_status.stage_status import Row
from launch.slurm.scheduler import JobInfo
from launch.status import show
from tests.launch.run_folders import NOW, HandMade

DEPENDENTS = {id: JobInfo(id, "PENDING", "Dependency") for id in ("17", "18", "19")}


def standing(run: HandMade, jobs: dict[str, JobInfo] | None) -> RunStatus:
    return judge(read_run(run.folder), jobs, NOW)


def row_of(run: HandMade, jobs: dict[str, JobInfo] | None, stage: str = "train") -> Row:
    """A stage's row."""
    return next(row for row in standing(run, jobs).rows if row.stage == stage)


def states(run: HandMade, jobs: dict[str, JobInfo] | None) -> dict[str, str]:
    return {row.stage: row.state for row in standing(run, jobs).rows}


def text(run: HandMade, jobs: dict[str, JobInfo] | None, columns: int = 100) -> str:
    return "\n".join(show(standing(run, jobs), columns))


def training(run: HandMade, **more: Any) -> HandMade:
    """A chain that came to train, job 16."""
    run.submitted(*run.whole_chain())
    run.done("shard", "tokenizer", "encode", until=700)
    run.state("train", "running", job="16", **more)
    run.trained(320)
    return run
