"""One job at a time for a stage: what waits for another job or link, and what is refused."""

from __future__ import annotations

import threading
import time

import pytest

from launch.slurm.job import joblock
from launch.slurm.job.joblock import BEAT_S, CHAIN_S, SILENT_S, Holder, JobLock
from pipeline.contract.locks import lock
from pipeline.errors import UserError
from pipeline.files import read_json, write_json


def hold(job, other, age, chain=""):
    write_json(job.run / "launch" / "train.lock", vars(Holder(other, 0, "n7", time.time() - age, chain)))


@pytest.mark.parametrize(("other", "chain", "states", "age", "refused"), [
    ("11", "", ["RUNNING"], 0, True), ("11", "", ["COMPLETING"], 9999, True), ("11", "", ["PENDING"], 0, False),
    ("11", "", [None], SILENT_S - 10, True), ("11", "", [None], SILENT_S, False), ("12", "", ["RUNNING"], 0, False),
    # A link waits for the end of the one before.
    ("11", "c", ["COMPLETING", "COMPLETED"], 0, False), ("11", "c", ["RUNNING"], 0, True),
    ("11", "before", ["COMPLETING"], 0, True), ("11", "c", ["COMPLETING", "RUNNING"], 0, True)])
def test_two_jobs_of_one_stage(job, monkeypatch, other, chain, states, age, refused):
    hold(job, other, age, chain)
    left = list(states)

    def next_state(seconds=0):
        job.slurm.silent = left[0] is None
        job.slurm.states[other] = left.pop(0) or ""

    next_state()
    monkeypatch.setattr(joblock.time, "sleep", next_state)
    if refused:
        with pytest.raises(UserError, match=f"The job 11 on n7 works on train.*{states[-1] or ''}"):
            job.go()
    else:
        status, log = job.go("work")
        assert status == 0
        assert log.count("waits for the end of this chain's job 11 (Slurm says COMPLETING)") == len(states) - 1
    assert not left and (job.run / "launch/train.lock").exists() == refused, "another job's lock is left alone"


def test_a_link_waits_no_longer_than_it_takes_to_end(job, monkeypatch):
    hold(job, "11", 0, "c")
    wanted, clock = JobLock(job.run, "train", "12", 0, lambda job: "COMPLETING", "c"), [0.0]
    monkeypatch.setattr(joblock.time, "sleep", lambda seconds: clock.append(clock[-1] + 10 * seconds))
    monkeypatch.setattr(joblock.time, "monotonic", lambda: clock[-1])
    for ends in (False, True):  # a job that is told to end does not wait
        with pytest.raises(UserError):
            wanted.acquire(ends=lambda ends=ends: ends)
        assert CHAIN_S <= clock[-1] < CHAIN_S + 60


def test_the_heartbeat_is_written_now_and_then(job, monkeypatch):
    mine, now = JobLock(job.run, "train", "12", 0, lambda job: ""), 1000.0
    monkeypatch.setattr(joblock.time, "monotonic", lambda: now)
    monkeypatch.setattr(joblock.time, "time", lambda: now)
    mine.acquire()
    for seconds, at in ((BEAT_S - 1, 1000.0), (1, 1030.0), (1, 1030.0)):
        now += seconds
        assert mine.beat() and read_json(mine.path)["at"] == at
    assert mine.beat(at_once=True) and read_json(mine.path)["at"] == now
    mine.path.write_text("{")
    assert mine.holder() is None and mine.beat(at_once=True), "a torn record is nobody's"
    hold(job, "13", 0)
    assert not mine.beat(at_once=True)
    mine.release()
    assert mine.path.exists(), "it is another job's"


def test_a_stage_waits_for_the_processes_of_the_link_before(tmp_path, monkeypatch):
    monkeypatch.setenv("DROVER_CHAIN", "c")
    monkeypatch.setenv("SLURM_JOB_ID", "11")
    held = lock(tmp_path, "train")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    timer = threading.Timer(0.3, held.close)
    timer.start()
    second = lock(tmp_path, "train")
    timer.join()
    assert "Slurm job 12, chain c, since" in (tmp_path / ".locks" / "train").read_text()
    monkeypatch.setenv("SLURM_JOB_ID", "13")
    monkeypatch.setenv("DROVER_CHAIN", "d")
    with pytest.raises(UserError, match=r"in use by .*chain c"):
        lock(tmp_path, "train")
    second.close()
