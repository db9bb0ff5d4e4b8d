"""The runner: what it starts, restarts, requeues, refuses and leaves behind."""

import os
import re
import signal

import pytest
import yaml

from drover.launch.job import runner, srun
from drover.launch.job.host import StepEnd
from drover.launch.job.preflight import PreflightResult
from drover.launch.slurm.start_logs import KEPT
from drover.pipeline.contract.signed import SECRET
from drover.pipeline.contract.state import StageJob
from drover.pipeline.core.errors import UserError
from tests.launch.fake_job import KILLED, make_job
from tests.launch.launcher import holding
from tests.refusal import refused, table

RESTART, DONE = "crashed restart", "done leave"


def test_a_crash_is_followed_by_another_start_in_the_allocation(job):
    job.slurm.left_s = 180  # just enough to start again
    end, log = job.go("crash", "work")
    assert (end, job.ends()) == ("leave", [RESTART, DONE]) and "  rank 1: this rank says why" in log, log
    assert job.events("ended")[0]["reason"] == "rank 1 on n2: killed"
    assert [(event["start"], event["ranks"]) for event in job.events("attempt")] == [(0, 2), (1, 2)]
    line, first, second = job.commands[1], *job.environments
    assert "--kill-on-bad-exit=1 --wait=30 --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=1 " in line
    assert second["MASTER_ADDR"] == "localhost" and job.start == StageJob(chain="c", start=1, ranks=2)
    assert first["MASTER_PORT"] != second["MASTER_PORT"]
    secrets = {first[SECRET], second[SECRET]}
    assert [*map(len, secrets)] == [64, 64] and SECRET not in os.environ, "each start has one of its own"
    assert not holding(job.run, *secrets)


def test_a_rank_that_used_too_much_memory(job):
    """Slurm says so in the output of the rank."""
    def end(each):
        job.say(job.run / "logs/train/12.0", 1, "slurmstepd: error: Detected 1 oom_kill event in StepId=12.0.")
        return srun.read_end(143, KILLED)

    job.go(end, max_restarts=0)
    assert "rank 1 on n2: killed; it used more memory than the job" in job.events("ended")[0]["reason"]


def test_logs_of_old_starts_are_removed(job):
    """An element of an array leaves those of others alone, and no other job touches them."""
    logs = job.run / "logs/train"
    for number in range(KEPT + 1):
        for folder in (logs / f"9.{number}", logs / f"20_{number}.0"):
            folder.mkdir(parents=True)
            os.utime(folder, (number, number))
    assert f"removed logs of old starts from {logs}: 9.0, 9.1\n" in job.go("work")[1]
    assert len([*logs.glob("9.*")]) == KEPT - 1 and len([*logs.glob("20_*")]) == KEPT + 1


def test_at_a_request_to_end_the_runner_waits_and_starts_nothing(job):
    def waits(each):
        signal.raise_signal(signal.SIGTERM)
        assert each(), "it waits for its step"
        return StepEnd(143)

    assert job.go(waits)[0] == "stop"
    assert len(job.events("attempt")) == 1 and job.ends() == ["preempted stop"]


# ---- the decisions' effects, with starts that are played


@pytest.mark.parametrize("plan, slurm, action, ends, requeued, words", table("""
    save 10/save 20/save 30/work -> {} -> leave -> crashed restart, crashed restart, crashed restart, done leave -> [] \
-> train is done
    asked -> {} -> requeue -> preempted requeue -> ["12"] -> asked to stop (time limit) after step 120; queueing this
    asked -> {refusal: presently disabled} -> stop -> preempted requeue -> ["12"] -> Slurm did not queue the job again \
(presently disabled): submit the same command again
    crash -> {left_s: 179} -> requeue -> crashed requeue -> ["12"] -> the time limit is too near
    refuse -> {} -> stop -> failed stop -> [] -> there is nothing to train on
    no step/no step/no step/no step -> {} -> requeue -> crashed requeue -> ["12"] -> trying again (3 of 3)
    no step/work -> {} -> leave -> done leave -> [] -> there is no step: Unable to create step for job 12: Requested \
nodes are busy; trying again (1 of 3)
    crash -> {states: {"12": PENDING}} -> stop -> crashed requeue -> [] -> Slurm has taken the job""",
    str, yaml.safe_load, str, str, yaml.safe_load))
def test_what_follows_from_each_end_of_a_start(job, plan, slurm, action, ends, requeued, words):
    vars(job.slurm).update(slurm)
    end, log = job.go(*plan.split("/"), max_restarts=1)
    assert (end, ", ".join(job.ends()), job.slurm.requeued) == (action, ends, requeued), log
    assert words in log and len(job.events("attempt")) == len(job.ends())
    assert plan != "refuse" or job.state().status == "failed", "no later job tries again"


@pytest.mark.parametrize("plan, changes, used, ends, words", table("""
    lose n2/work -> {} -> n1,n2 n1,n3 -> crashed restart, done leave -> train is done
    no n2/work -> {} -> n1,n2 n1,n3 -> crashed restart, done leave -> train is done
    lose n2,n3 -> {} -> n1,n2 -> crashed restart -> crashed: too few of the job's nodes are left; queueing this job \
again
    lose n2,n3 -> {requeue: false} -> n1,n2 -> crashed restart -> too few of the job's nodes are left; jobs may not \
requeue themselves here: submit the same command again
    crash/work -> {} -> n1,n2 n1,n2 -> crashed restart, done leave -> train is done""", str, yaml.safe_load))
def test_nodes_after_a_loss(job, plan, changes, used, ends, words):
    """Spare nodes come first; then the job is queued again, where that is allowed."""
    job.slurm.nodes = ("n1", "n2", "n3")
    end, log = job.go(*plan.split("/"), spare_nodes=1, **changes)
    assert (end == "stop") == ("requeue" in changes) and ", ".join(job.ends()) == ends and words in log, log
    lists = used.split()
    assert [re.search("--nodelist=([^ ]+) ", line)[1] for line in job.commands] == lists
    assert bool(job.slurm.requeued) == ("queueing" in words)


@pytest.fixture
def impatient(monkeypatch):
    """Records are tried again at once, and once."""
    monkeypatch.setattr(runner, "RECORD_S", 0.01)
    monkeypatch.setattr(runner, "RECORD_PAUSE_S", 0.02)


def test_a_folder_that_takes_no_record_for_a_moment_ends_no_job(job, impatient, monkeypatch):
    write, failures = runner.log_attempt, [OSError("Stale file handle")]

    def failing(*given, **details):
        if failures:
            raise failures.pop()
        write(*given, **details)
    monkeypatch.setattr(runner, "log_attempt", failing)
    end, log = job.go("work")
    assert end == "leave" and job.ends() == [DONE] and "cannot be recorded now (Stale file handle); trying again" in log


@pytest.mark.parametrize("place", ["logs", "launch/attempts", "launch/nodes.jsonl"])
def test_a_job_whose_starts_cannot_be_recorded_ends(job, impatient, place):
    """Nobody could count them, nor the failures of a bad node. Slurm requeues nothing."""
    if place.endswith("jsonl"):
        (job.run / place).mkdir()
    else:
        (job.run / place).touch()
    refused(UserError, r"Starts cannot be recorded \(.*Make the folder writable", job.go, preflight=True,
            trial=PreflightResult({"n2": "no GPU"} if place.endswith("jsonl") else {}))
    assert not job.commands and not job.slurm.requeued


# ---- starts before this one


def test_the_stop_file(job):
    (job.run / "launch/stop").write_text("enough")
    end, log = job.go()
    assert end == "stop" and "training does not start" in log and not job.events("attempt")


@pytest.mark.parametrize("cause", ["lost n2", "its runner was killed", ""])
def test_ends_without_progress_stop_the_stage_for_good(job, cause):
    """A requeue from outside is no crash."""
    job.crashed(0)
    job.unseen(1)
    if cause == "lost n2":
        job.slurm.down = {"n2": "down*"}
    elif cause:
        job.log("killed", 1, "12")
    end, log = job.go("work", max_restarts=1, restart=2)
    assert job.ends()[1:] == (["crashed stop"] if cause else ["requeued requeue", DONE]), log
    assert cause != "lost n2" or "n2 went down (down*) (failure 1 within a day)" in log
    assert (end == "stop") == bool(cause) and (not cause or (job.state().status == "failed" and re.match(
        f"given up after 2 starts in a row without .*{cause}", job.state().reason)))


def test_a_start_that_slurm_took_away_ends_what_it_runs(job, monkeypatch):
    """Its node may be one that Slurm has given up. The job's next start has recorded its end."""
    monkeypatch.setattr(runner, "LOOK_S", 0.0)

    def taken(each):
        assert each()
        job.slurm.restarts = 1
        assert not each()
        return StepEnd(143)

    refused(UserError, "Another start of this job has taken the stage over", job.go, taken)
    assert len(job.events("attempt")) == 1 and not job.ends()


# ---- elements of arrays


def test_elements_of_an_array(tmp_path):
    """One element's crashes are not another's, and no element speaks for the stage."""
    job = make_job(tmp_path, "shard", ranks=0, nodes=1, max_restarts=1)
    for restart in range(2):
        job.crashed(restart, "20_3")
    assert job.go("crash", "work", element=2)[0] == "leave" and job.ends()[2:] == [RESTART, DONE]
    assert job.commands[-1].endswith("--element 20_2") and (job.run / "logs/shard/20_2.1").is_dir()
    (job.stage / "manifest.json").unlink()
    assert job.go("refuse", element=1)[0] == "stop"
    job.unseen(2, "20_3")
    job.slurm.down = {"n2": "down*"}
    end, log = job.go(element=3, job="24", restart=3)
    assert end == "stop" and "3 starts in a row" in log
    assert job.go("asked", element=0)[0] == "requeue" and job.ends()[-1] == "preempted requeue"
    assert not (job.stage / "STATE.json").exists()
