"""One job at a time for a stage: what waits for another job or link, and what is refused."""

import os

import pytest
import yaml

from drover.launch.job import host
from drover.launch.job.host import CHAIN_S, HEARTBEAT_S, RETRY_S, SILENT_S, Holder, holder_of
from drover.launch.job.srun import SlurmHost
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import write_json
from tests.refusal import refused, table


def hold(job, other, chain=""):
    write_json(job.run / "launch" / "train.lock", vars(Holder(other, 0, "n7", chain)))


@pytest.mark.parametrize("other, chain, state, renewed_at, waited, ends", table(f"""
    12 -> '' -> RUNNING -> -1 -> 0 -> false
    11 -> '' -> PENDING -> -1 -> 0 -> false
    11 -> '' -> silent -> -1 -> {SILENT_S} -> false
    11 -> '' -> silent -> 170 -> {CHAIN_S} -> true
    11 -> '' -> SUSPENDED -> -1 -> 0 -> true
    11 -> before -> COMPLETING -> -1 -> 0 -> true
    11 -> c -> silent -> 30 -> {30 + SILENT_S} -> false
    11 -> c -> COMPLETING -> -1 -> {CHAIN_S} -> true""", str, yaml.safe_load, str, float, float, yaml.safe_load))
def test_two_jobs_of_one_stage(job, monkeypatch, other, chain, state, renewed_at, waited, ends):
    """An earlier start of this job, and a job that was queued again, are gone. Where Slurm is silent only the heartbeat
    tells. A link waits for the end of the one before, but not without end."""
    clock = [0.0]
    hold(job, other, chain)
    job.slurm.silent, job.slurm.states[other] = state == "silent", state

    def sleep(seconds):
        before, clock[0] = clock[0], clock[0] + seconds
        if before < renewed_at <= clock[0]:
            hold(job, other, chain)

    monkeypatch.setattr(host.time, "sleep", sleep)
    monkeypatch.setattr(host.time, "monotonic", lambda: clock[0])
    if ends:
        refused(UserError, "The job 11 on n7 works on train.*so this one does nothing", job.go)
    else:
        end, log = job.go("work")
        assert end == "leave" and ("waits for the end of the job 11 on n7, which works on train" in log) == bool(waited)
    assert waited <= clock[0] <= waited + RETRY_S
    assert (job.run / "launch/train.lock").exists() == ends, "another job's lock is left alone"


def lock_of(job, *requests):
    return SlurmHost("12", "12", 0, ("n1",), None, job.slurm, list(requests)).lock(job.spec)


def test_a_job_with_a_request_to_end_does_not_wait(job):
    hold(job, "11", "c")
    refused(UserError, "The job 11", lock_of(job, 15).__enter__)


def test_the_heartbeat_is_written_now_and_then(job, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(host.time, "monotonic", lambda: now)
    with lock_of(job) as mine:
        for seconds, due in ((HEARTBEAT_S - 1, False), (1, True), (1, False)):
            now += seconds
            os.utime(mine.path, (0, 0))
            assert mine.renew() and (mine.path.stat().st_mtime > 0) == due
        mine.path.write_text("{")
        assert holder_of(mine.path) is None and mine.renew(at_once=True), "a torn record is nobody's"
        hold(job, "13")
        assert not mine.renew(at_once=True)
    assert mine.path.exists(), "it is another job's"
