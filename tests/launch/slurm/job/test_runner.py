"""The runner against fake Slurm programs: what it starts, restarts, requeues, refuses and leaves behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from launch.slurm.job import srun, starts
from launch.slurm.job.allocation import Allocation
from launch.slurm.job.joblock import JobLock
from launch.slurm.job.runner import Runner
from launch.slurm.job.srun import StepEnd, run_step
from launch.slurm.nodes import add_strike
from launch.slurm.scheduler import COLUMNS, Scheduler
from pipeline.contract.manifest import Manifest
from pipeline.contract.state import log_attempt
from pipeline.files import read_lines
from tests.launch.fake_job import Job, chain_of, make_job
from tests.waiting import HANG_S, wait_for


def queue_line(job: str, state: str) -> str:
    """What squeue says of a job."""
    values = {"JobArrayID": job, "State": state}
    return "".join(values.get(name, "")[:width].ljust(width) for name, width in COLUMNS) + "\n"


def test_a_stage_that_does_its_work(job: Job) -> None:
    status, log = job.plan("work").run_it()
    assert status == 0, log
    assert job.ends() == [("done", "leave")]
    assert [(event["job"], event["restart"], event["start"], event["ranks"]) for event in job.events("attempt")] == [
        ("12", 0, 0, 2)]
    assert job.events("job")[0]["nodes"] == ["n1", "n2"]
    logs = job.run / "logs" / "train"
    assert (logs / "latest").readlink() == Path("12.0")
    assert (logs / "latest" / "rank1.out").read_text().startswith("rank 1 of 2 at 2")
    assert not (job.run / "launch" / "train.lock").exists()
    line, = job.calls("srun")
    assert "--kill-on-bad-exit=1 --wait=30 --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=1" in line
    assert "--export=ALL" in line and "rank%t.err" in line and "-m launch.slurm.job.rank --stage train -- " in line


def test_a_killed_rank_is_started_again_in_the_allocation(job: Job) -> None:
    status, log = job.plan("crash", "work").run_it()
    assert status == 0, log
    assert job.ends() == [("crashed", "restart"), ("done", "leave")]
    assert job.events("ended")[0]["reason"] == "rank 1 on n2: killed"
    assert "rank 1: this rank says why" in log, "the job's log tells what the rank said"
    assert not job.alive(), "the other rank has ended before the next start"
    ports = [(job.run / "logs" / "train" / f"12.{start}" / "rank0.out").read_text().split()[-1] for start in (0, 1)]
    assert len(set(ports)) == 2 and all(20000 <= int(port) < 30000 for port in ports)
    assert "scontrol requeue" not in job.calls("scontrol")


def test_crashes_without_progress_stop_the_stage_for_good(job: Job) -> None:
    chain_of(job, "12", "13")
    status, log = job.plan("crash", max_restarts=1, links=2).run_it()
    assert status == 1
    assert job.ends() == [("crashed", "restart"), ("crashed", "stop")]
    assert job.state().status == "failed" and "2 starts in a row without a new checkpoint" in job.state().reason
    later = replace(job.spec, link=2)
    job.spec = later
    status, log = job.plan("work").run_it(SLURM_JOB_ID="13")
    assert status == 1 and "job 12 of this chain gave train up" in log
    assert len(job.events("attempt")) == 2, "the next link started nothing"


def test_checkpoints_in_between_allow_any_number_of_crashes(job: Job) -> None:
    status, log = job.plan("save10", "save20", "save30", "work", max_restarts=1).run_it()
    assert status == 0, log
    assert [event["step"] for event in job.events("ended")] == [10, 20, 30, 30]


def test_a_stop_at_the_time_limit_requeues_the_job(job: Job) -> None:
    status, log = job.plan("asked").run_it()
    assert status == 0, log
    assert job.calls("scontrol")[-1] == "requeue 12"
    assert job.ends() == [("preempted", "requeue")]
    status, _ = job.plan("asked", "work").run_it(SLURM_RESTART_COUNT="1")
    assert status == 0 and job.ends()[-1] == ("done", "leave")
    assert job.events("attempt")[-1]["start"] == 1 and job.events("attempt")[-1]["from"] == 120


def test_a_requeue_that_ends_the_runner_before_it_has_the_answer(job: Job) -> None:
    (job.folder / "bin" / "scontrol").write_text(
        '#!/bin/sh\n[ "$1" = requeue ] || exit 1\nkill -TERM $PPID\nsleep 0.3\nkill -TERM $$\n')
    status, log = job.plan("asked").run_it()
    assert status == 0 and "did not queue" not in log and job.ends() == [("preempted", "requeue")]


def test_no_start_just_before_the_time_limit(job: Job) -> None:
    (job.folder / "bin" / "squeue").write_text("#!/bin/sh\necho 2:10\n")
    status, log = job.plan("crash", "work").run_it()
    assert status == 0 and job.calls("scontrol")[-1] == "requeue 12", log
    assert job.ends() == [("crashed", "requeue")] and "too near" in log


@pytest.mark.parametrize("links", [1, 2])
def test_where_no_job_may_requeue_itself(job: Job, links: int) -> None:
    (job.folder / "no_requeue").touch()
    status, log = job.plan("asked", links=links).run_it()
    assert status == (1 if links == 1 else 0)
    assert ("submit the same command again" if links == 1 else "the next job of the chain goes on") in log
    assert ("presently disabled" in log) == (links == 1)


def test_a_cancelled_stage_is_not_requeued(job: Job) -> None:
    status, log = job.plan("cancelled", links=2).run_it()
    assert status == 1 and "the same command goes on" in log
    assert not any("requeue" in call for call in job.calls("scontrol"))


def test_a_user_error_is_not_tried_again(job: Job) -> None:
    status, log = job.plan("failed", links=2).run_it()
    assert status == 1 and "the third record is broken" in log and len(job.events("attempt")) == 1


def test_a_refusal_before_the_first_word_is_not_tried_again(job: Job) -> None:
    status, log = job.plan("refuse").run_it()
    assert status == 1 and "there is nothing to train on" in log
    assert len(job.events("attempt")) == 1 and job.state().status == "failed"


def test_an_old_manifest_does_not_make_a_broken_start_a_done_one(job: Job) -> None:
    Manifest("train", {}, [], {"steps": 1}, "").write(job.stage)
    status, _ = job.plan("import", max_restarts=1).run_it()
    assert status == 1 and job.ends()[-1] == ("crashed", "stop")
    status, _ = job.plan("silent").run_it()
    assert status == 0, "a stage that is up to date says nothing and ends well"


def test_exit_0_without_a_manifest_is_not_done(job: Job) -> None:
    status, log = job.plan("silent", max_restarts=0).run_it()
    assert status == 1 and "ended as if all were well, but is not done" in log


def test_told_to_end_the_runner_waits_and_starts_nothing(job: Job) -> None:
    process = job.plan("wait", "work").start()
    pids = job.run / "pids"
    wait_for(lambda: (pids / "0-0").exists() and (pids / "0-1").exists() and job.stage.exists())
    process.send_signal(signal.SIGTERM)
    time.sleep(1)
    assert process.poll() is None, "it waits for its step"
    job.kill_all()  # what Slurm does after KillWait
    assert process.wait() == 143
    assert len(job.events("attempt")) == 1 and job.ends() == [("preempted", "stop")]
    assert not any("requeue" in call for call in job.calls("scontrol"))
    assert not (job.run / "launch" / "train.lock").exists()


def test_the_signal_before_the_time_limit_does_not_concern_the_runner(job: Job) -> None:
    process = job.plan("asked").start()
    wait_for(lambda: (job.run / "pids" / "0-0").exists())
    process.send_signal(signal.SIGUSR2)
    process.send_signal(signal.SIGUSR1)
    assert process.wait() == 0 and job.ends() == [("preempted", "requeue")]


def test_a_step_that_cannot_be_made_is_tried_again(job: Job) -> None:
    (job.folder / "no_step").write_text("1")
    status, log = job.plan("work").run_it()
    assert status == 0 and "there is no step: Unable to create step for job 12" in log
    assert len(job.calls("srun")) == 2 and len(job.events("attempt")) == 1


def test_a_killed_runner_leaves_no_rank(job: Job) -> None:
    process = job.plan("wait").start()
    wait_for(lambda: len(list((job.run / "pids").glob("*"))) == 2)
    process.kill()
    process.wait()
    wait_for(lambda: not job.alive())


def test_the_start_that_nobody_saw_the_end_of(job: Job) -> None:
    log_attempt(job.run, "attempt", stage="train", job="12", restart=0, start=0, chain="c", ranks=2,
                nodes=["n1", "n3"], **{"from": None})
    job.answer("sinfo", "n1|idle\nn3|down*\n")
    status, log = job.plan("crash", "work").run_it(SLURM_RESTART_COUNT="1")
    assert status == 0, log
    assert job.ends() == [("crashed", "requeue"), ("done", "leave")]
    assert job.events("ended")[0]["reason"] == "lost n3 (down*)"
    assert job.events("attempt")[-1]["start"] == 1
    strike, = read_lines(job.run / "launch" / "nodes.jsonl")
    assert (strike["node"], strike["reason"]) == ("n3", "went down (down*)")


def unseen(job: Job, restart: int, name: str = "12", stage: str = "train") -> None:
    """A start whose end its runner has not told."""
    log_attempt(job.run, "attempt", stage=stage, job=name, restart=restart, start=restart, chain="c", ranks=2,
                nodes=["n1", "n2"], **{"from": None})


def crashed(job: Job, restart: int, name: str = "12", stage: str = "train") -> None:
    """A start that crashed and brought nothing."""
    unseen(job, restart, name, stage)
    log_attempt(job.run, "ended", stage=stage, job=name, restart=restart, start=restart, chain="c", status="crashed",
                reason="", step=None, next="requeue")


@pytest.mark.parametrize("how", ["node", "runner"])
def test_deaths_of_nodes_and_runners_without_progress_stop_the_stage_for_good(job: Job, how: str) -> None:
    crashed(job, 0)
    unseen(job, 1)
    job.answer("sinfo", "n1|idle\nn2|down*\n" if how == "node" else "n1|idle\nn2|idle\n")
    if how == "runner":
        (job.run / "launch" / "killed.12.1").touch()  # by the job's script
    status, log = job.plan("work", max_restarts=1).run_it(SLURM_RESTART_COUNT="2")
    assert status == 1, log
    assert len(job.events("attempt")) == 2 and job.ends()[-1] == ("crashed", "stop")
    assert job.state().status == "failed" and "2 starts in a row without a new checkpoint" in job.state().reason
    assert ("lost n2 (down*)" if how == "node" else "its runner was killed") in job.state().reason
    status, log = job.run_it(SLURM_RESTART_COUNT="3")
    assert status == 1 and "gave train up" in log and len(job.events("attempt")) == 2


def test_requeues_from_outside_are_no_crashes(job: Job) -> None:
    crashed(job, 0)
    unseen(job, 1)
    status, log = job.plan("?", "?", "work", max_restarts=1).run_it(SLURM_RESTART_COUNT="2")
    assert status == 0, log
    assert job.ends() == [("crashed", "requeue"), ("requeued", "requeue"), ("done", "leave")]


def test_a_runner_that_was_killed_before_its_first_start(job: Job) -> None:
    log_attempt(job.run, "job", stage="train", job="12", restart=0, start=0, chain="c", nodes=["n1", "n2"])
    (job.run / "launch" / "killed.12.0").touch()
    status, log = job.plan("work", max_restarts=0).run_it(SLURM_RESTART_COUNT="1")
    assert status == 1 and job.ends() == [("crashed", "stop")] and not job.events("attempt"), log


def test_crashes_of_another_element_are_not_this_ones(tmp_path: Path) -> None:
    job = make_job(tmp_path, "shard", ranks=0, nodes=1, parts=4, max_restarts=1)
    array = {"SLURM_ARRAY_JOB_ID": "20", "SLURM_ARRAY_TASK_ID": "2", "SLURM_JOB_ID": "23"}
    for restart in range(3):
        crashed(job, restart, "20_3", "shard")
    status, log = job.plan("crash", "work").run_it(**array)
    assert status == 0, log
    unseen(job, 3, "20_3", "shard")
    (job.run / "launch" / "killed.24.3").touch()
    status, log = job.run_it(**{**array, "SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_ID": "24", "SLURM_RESTART_COUNT": "4"})
    assert status == 1 and "4 starts in a row" in log and not (job.stage / "STATE.json").exists()


def inside(job: Job, monkeypatch: pytest.MonkeyPatch) -> Runner:
    """The job's runner, in this process."""
    for name, value in {**job.environ(), "DROVER_ATTEMPT": "0"}.items():
        monkeypatch.setenv(name, value)
    return Runner(job.spec, Allocation("12", "12", 0, ("n1", "n2")), Scheduler())


def test_a_step_that_does_not_end_is_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(srun, "KILL_S", 0.2)
    stubborn = [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); "
                f"open({str(tmp_path / 'rank0.err')!r}, 'w'); time.sleep(3600)"]
    environment = {"PATH": "/usr/bin:/bin"}
    end = run_step(stubborn, environment, tmp_path, lambda: not (tmp_path / "rank0.err").exists(), print)
    assert end.abandoned and "may still run" in end.cause
    monkeypatch.setattr(srun, "KILL_S", HANG_S)
    end = run_step(["sleep", "3600"], environment, tmp_path, lambda: False, print)
    assert not end.abandoned and end.status == 128 + signal.SIGTERM


def test_no_second_gang_beside_tasks_that_may_live(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    there = inside(job, monkeypatch)
    ends = iter([StepEnd(137, abandoned=True)])
    monkeypatch.setattr(starts, "run_step", lambda *_: next(ends))
    assert there._starts() == 0 and job.calls("scontrol")[-1] == "requeue 12"
    assert job.ends() == [("crashed", "requeue")]


def test_nothing_is_evaluated_once_the_job_is_told_to_end(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    class Evaluations:
        looks = 0

        def look(self) -> None:
            self.looks += 1

    there = inside(job, monkeypatch)
    there.evaluations = seen = Evaluations()  # type: ignore[assignment]
    assert there.tick() and seen.looks == 1
    there.stopping = True
    assert there.tick() and seen.looks == 1


def test_an_accident_that_two_notice_is_one_strike(job: Job) -> None:
    unseen(job, 0)
    add_strike(job.run, "n2", "12.0.0", "was late when training hung")
    job.answer("sinfo", "n1|idle\nn2|down*\n")
    status, log = job.plan("?", "work").run_it(SLURM_RESTART_COUNT="1")
    assert status == 0 and "n2 went down (down*) (strike 1 within a day)" in log


def test_a_start_that_was_taken_over_ends_what_it_runs(job: Job) -> None:
    job.beat_s = 0.2
    process = job.plan("wait").start()
    wait_for(lambda: len(list((job.run / "pids").glob("*"))) == 2)
    JobLock(job.run, "train", "12", 1, lambda job: "").acquire()
    assert process.wait() == 1
    assert not job.alive() and len(job.events("attempt")) == 1
    assert json.loads((job.run / "launch" / "train.lock").read_text())["restart"] == 1


def test_a_link_that_finds_the_stage_done(job: Job) -> None:
    chain_of(job, "12", "13")
    assert job.plan("work", links=2).run_it()[0] == 0
    status, log = job.plan("crash", link=2).run_it(SLURM_JOB_ID="13")
    assert status == 0 and "train is done (by job 12): nothing to do" in log and len(job.events("attempt")) == 1


def test_the_stop_file(job: Job) -> None:
    (job.run / "launch").mkdir(parents=True)
    (job.run / "launch" / "stop").write_text("enough")
    status, log = job.plan("work").run_it()
    assert status == 1 and "training is to stand" in log and not job.events("attempt")


def test_a_stage_without_ranks(tmp_path: Path) -> None:
    job = make_job(tmp_path, "convert", ranks=0, nodes=1)
    status, log = job.plan("crash", "work").run_it()
    assert status == 0, log
    assert job.ends() == [("crashed", "restart"), ("done", "leave")] and not job.calls("srun")
    assert job.events("ended")[0]["reason"] == "killed by SIGKILL"
    assert "rank 0: this rank says why" in log
    assert (job.run / "logs/convert/12.1/rank0.out").read_text().startswith("rank 0")


def test_a_stage_without_ranks_is_told_to_end(tmp_path: Path) -> None:
    job = make_job(tmp_path, "convert", ranks=0, nodes=1)
    process = job.plan("wait").start()
    wait_for(lambda: (job.stage / "STATE.json").exists())
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 143 and not job.alive()


def test_elements_of_an_array(tmp_path: Path) -> None:
    job = make_job(tmp_path, "shard", ranks=0, nodes=1, parts=4)
    array = {"SLURM_ARRAY_JOB_ID": "20", "SLURM_ARRAY_TASK_ID": "2", "SLURM_JOB_ID": "23"}
    status, log = job.plan("crash", "work").run_it(**array)
    assert status == 0, log
    assert (job.stage / "units" / "parts" / "texts.2-of-4.json").exists()
    assert {event["job"] for event in job.events("ended")} == {"20_2"} and not (job.stage / "STATE.json").exists()
    assert (job.run / "logs/shard/20_2.1").is_dir() and not list((job.run / "launch").glob("*.lock"))
    assert job.plan("refuse").run_it(**{**array, "SLURM_ARRAY_TASK_ID": "3"})[0] == 1


@pytest.mark.parametrize(("element", "requeue"), [(False, True), (False, False), (True, True)])
def test_a_stage_in_units_is_warned_of_its_time_limit_and_goes_on_in_another_job(
        tmp_path: Path, element: bool, requeue: bool) -> None:
    more = {"parts": 4, "phase": "texts"} if element else {}
    array = {"SLURM_ARRAY_JOB_ID": "20", "SLURM_ARRAY_TASK_ID": "2", "SLURM_JOB_ID": "23"} if element else {}
    job = make_job(tmp_path, "shard", ranks=0, nodes=1, warned=True, requeue=requeue, signal_s=60, **more)
    job.answer("squeue", "0:50\n")
    status, log = job.plan("units").run_it(**array)
    assert status == int(not requeue) and "asked to stop (SIGUSR2: 3 of 4 units)" in log, log
    assert job.ends() == [("preempted", "requeue" if requeue else "stop")]
    assert [call for call in job.calls("scontrol") if call.startswith("requeue")] == (
        [f"requeue {'20_2' if element else '12'}"] if requeue else [])
    job.answer("squeue", "1:50\n")
    status, log = job.plan("units", "work").run_it(**array, SLURM_RESTART_COUNT="1")
    assert status == 0 and job.ends()[-1] == ("done", "leave"), log


def test_outside_of_slurm_it_says_so(job: Job) -> None:
    environment = {name: value for name, value in job.plan("work").environ().items() if name != "SLURM_JOB_ID"}
    result = subprocess.run([sys.executable, "-m", "launch.slurm.job.runner", job.command()[-1]], env=environment,
                            capture_output=True, text=True, check=False)
    assert result.returncode == 1 and "is what a Slurm job runs" in result.stdout and not result.stderr
