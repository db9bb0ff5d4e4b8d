"""A run folder made by hand, and how it is seen with Slurm's answers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from launch.run_status.run_files import read_run
from launch.run_status.run_status import Row, RunStatus, judge
from launch.slurm.scheduler import JobInfo
from launch.status import show
from tests.launch.run_folders import NOW, HandMade

Answers = Mapping[str, str | JobInfo] | None
"""Of Slurm by job: `PENDING Resources`, say; None: it does not answer."""
DEPENDENTS = dict.fromkeys(("17", "18", "19"), "PENDING Dependency")


class Seen(HandMade):
    """A run folder that is looked at."""

    def status(self, answers: Answers) -> RunStatus:
        """All of it."""
        return judge(read_run(self.folder), None if answers is None else {
            id: answer if isinstance(answer, JobInfo) else JobInfo(id, *answer.split(" ", 1))
            for id, answer in answers.items()}, NOW)

    def row(self, answers: Answers, stage: str = "train") -> Row:
        """A stage's row."""
        return next(row for row in self.status(answers).rows if row.stage == stage)

    def text(self, answers: Answers, columns: int = 1000) -> str:
        """What is shown."""
        return "\n".join(show(self.status(answers), columns=columns))

    def training(self, status: str = "running", steps: int = 320, **more: object) -> Seen:
        """A chain that came to train, job 16."""
        self.submitted(*self.whole_chain())
        self.done("shard", "tokenizer", "encode", until=700)
        if status:
            self.state("train", status, job="16", **more)
            self.trained(steps)
        return self


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The run folder runs/demo of the current folder."""
    monkeypatch.chdir(tmp_path)
    return Seen(Path("runs/demo"))
