"""A run folder made by hand, and how it is seen with Slurm's answers."""

from pathlib import Path

import pytest

from drover.launch.run_status.run_files import read_run
from drover.launch.run_status.run_status import judge
from drover.launch.slurm.scheduler import JobInfo
from tests.launch.run_folders import NOW, HandMade

DEPENDENTS = dict.fromkeys(("17", "18", "19"), "PENDING Dependency")


class Seen(HandMade):
    """A run folder that is looked at."""

    def status(self, answers):
        """With Slurm's answers by job, such as `PENDING Resources`; None: it does not answer."""
        return judge(read_run(self.folder), answers and {
            id: answer if isinstance(answer, JobInfo) else JobInfo(id, *answer.split(" ", 1))
            for id, answer in answers.items()}, NOW)

    def states(self, answers):
        """Of all stages."""
        return [row.state for row in self.status(answers).rows]

    def training(self, status="running", **more):
        """A chain that came to train, job 16."""
        self.submitted(*self.whole_chain())
        self.done("shard", "tokenizer", "encode", until=700)
        if status:
            self.state("train", status, job="16", **more)
            self.progress("train", 320, 500, "steps", left_s=338.0, loss=4.8, tokens_per_s=11859.6, goodput=0.934)
        return self


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The run folder runs/demo of the current folder."""
    monkeypatch.chdir(tmp_path)
    return Seen(Path("runs/demo"))
