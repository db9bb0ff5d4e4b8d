"""One job at a time for a stage: what waits for another job or link, and what is refused."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from launch.slurm.job import joblock
from launch.slurm.job.joblock import SILENT_S, Holder, JobLock
from launch.slurm.scheduler import COLUMNS
from pipeline.contract.locks import lock
from pipeline.errors import UserError
from pipeline.files import write_json
from tests.launch.fake_job import Job


def queue_line(job: str, state: str) -> str:
    """What squeue says of a job."""
    values = {"JobArrayID": job, "State": state}
    return "".join(values.get(name, "")[:width].ljust(width) for name, width in COLUMNS) + "\n"


def hold(job: Job, other: str, age: float, chain: str = "") -> None:
    write_json(job.run / "launch" / "train.lock", vars(Holder(other, 0, "n7", 1, time.time() - age, chain)))


def test_a_link_waits_for_the_end_of_the_one_before(job: Job) -> None:
    hold(job, "11", 0, "c")
    job.answer("squeue", queue_line("11", "COMPLETING"))
    process = job.plan("work").start()
    assert process.stdout is not None
    assert any("waits for the end of this chain's job 11" in line for line in process.stdout)
    job.answer("squeue", queue_line("11", "COMPLETED"))
    assert process.wait(30) == 0 and job.ends() == [("done", "leave")]


@pytest.mark.parametrize(("chain", "states"), [
    ("c", ["RUNNING"]), ("before", ["COMPLETING"]), ("", ["COMPLETING"]), ("c", ["COMPLETING", "RUNNING"])])
def test_who_is_not_waited_for(job: Job, monkeypatch: pytest.MonkeyPatch, chain: str, states: list[str]) -> None:
    monkeypatch.setattr(joblock, "LOOK_S", 0.01)
    hold(job, "11", 0, chain)
    answers = iter(states)
    with pytest.raises(UserError, match="Slurm says " + states[-1]):
        JobLock(job.run, "train", "12", 0, lambda job: next(answers), "c").acquire()
    assert next(answers, None) is None


def test_a_stage_waits_for_the_processes_of_the_link_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DROVER_CHAIN", "c")
    monkeypatch.setenv("SLURM_JOB_ID", "11")
    held = lock(tmp_path, "train")
    assert held is not None
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    timer = threading.Timer(0.3, held.close)
    timer.start()
    second = lock(tmp_path, "train")
    timer.join()
    assert second is not None and "Slurm job 12, chain c, since" in (tmp_path / ".locks" / "train").read_text()
    monkeypatch.setenv("SLURM_JOB_ID", "13")
    monkeypatch.setenv("DROVER_CHAIN", "d")
    with pytest.raises(UserError, match=r"in use by .*chain c"):
        lock(tmp_path, "train")
    second.close()


@pytest.mark.parametrize(("other", "state", "age", "refused"), [
    ("11", "RUNNING", 0, True), ("11", "COMPLETING", 9999, True), ("11", "COMPLETED", 0, False),
    ("11", "PENDING", 0, False), ("11", None, 10, True), ("11", None, SILENT_S + 60, False),
    ("12", "RUNNING", 0, False)])
def test_two_jobs_of_one_stage(job: Job, other: str, state: str | None, age: float, refused: bool) -> None:
    hold(job, other, age)
    if state is not None:
        job.answer("squeue", queue_line(other, state))
    status, log = job.plan("work").run_it()
    assert (status, bool(job.events("attempt"))) == ((1, False) if refused else (0, True)), log
    assert ("The job 11 on n7 works on train" in log) == refused
    assert (job.run / "launch" / "train.lock").exists() == refused, "another job's lock is left alone"
