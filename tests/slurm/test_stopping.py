"""Training as a Slurm job is asked to stop, by Slurm, its user or an administrator: it saves, and goes on or not."""

from __future__ import annotations

from pathlib import Path

from pipeline.manifest import read_manifest
from tests.slurm.faults import EVERY, STEPS, Training, pause


def test_a_signal_saves_requeues_and_keeps_the_dependents(training):
    run: Training = training(faults=pause(11))
    run.submit(stages="train,convert")
    run.wait_for_pause(11)
    job = run.job()
    run.ask("scancel", "--signal=USR2", job)
    run.finish()
    first, last = run.ends
    assert (first.status, first.next) == ("preempted", "requeue") and "SIGUSR2" in first.reason
    assert first.step is not None and first.step % EVERY and first.step < STEPS
    assert (last.job, last.restart, last.status) == (job, 1, "done")
    assert read_manifest(run.run / "convert") is not None


def test_the_time_limit_is_a_request_to_save_and_queue_again(training):
    """Slurm looks at the limits every half minute, and may warn up to a minute before it was told to."""
    steps = range(11, STEPS)
    run: Training = training(faults=pause(*steps, seconds=1.5))
    run.submit()
    run.wait_for_pause(11)
    job = run.job()
    run.ask("scontrol", "update", f"JobId={job}", "TimeLimit=1")
    run.until(lambda: run.ends, "the end of the first start")
    run.ask("scontrol", "update", f"JobId={job}", "TimeLimit=30")
    for step in steps:
        (run.run / f"train/faults/slow-rank0-step{step}").touch()
    run.finish()
    first, last = run.ends
    assert (first.status, first.next) == ("preempted", "requeue") and "SIGUSR2" in first.reason
    assert (last.job, last.restart, last.status) == (job, 1, "done")


def test_queued_again_from_outside_while_the_newest_checkpoint_rots(training):
    """Slurm ends the ranks with SIGTERM: they save. What they saved is damaged before the job starts again."""
    run: Training = training(faults=pause(20))
    run.submit()
    run.wait_for_pause(20)
    job = run.job()
    run.ask("scontrol", "requeue", job)
    run.until(lambda: run.pending(job) and not run.processes(), "the job in the queue again")
    before, newest = run.saved()[-2:]
    flip_a_bit(newest / "rank-00001.safetensors")
    run.finish()
    first, last = run.ends
    assert (first.status, first.restart, f"step-{first.step:08}") == ("preempted", 0, newest.name)
    assert (last.job, last.restart, last.status) == (job, 1, "done")
    assert newest.name in run.output() and f"from {before.name}" in run.output()


def flip_a_bit(path: Path) -> None:
    """Of the byte in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def test_stopped_and_cancelled_by_its_user_it_stays_away_until_asked(training):
    run: Training = training(faults=pause(11, 21))
    run.submit(stages="train,convert")
    run.wait_for_pause(11)
    assert "--config" in run.launcher("--stop", str(run.run))  # how to go on
    run.until(lambda: run.ends, "the end of training")
    run.wait_until_gone()
    state, end = run.state, run.ends[0]
    assert state is not None and (state.status, state.again, end.next) == ("preempted", False, "stop")
    assert state.step and state.step % EVERY and read_manifest(run.run / "convert") is None
    run.check_curve()

    run.submit(stages="train,convert")
    run.wait_for_pause(21)
    run.launcher("--cancel", str(run.run))
    run.wait_until_gone()
    assert run.state and run.state.status == "preempted" and "SIGTERM" in run.state.reason
    run.check_curve()

    run.submit()
    run.finish()
    assert [start["restart"] for start in run.starts] == [0, 0, 0] and len({start["job"] for start in run.starts}) == 3


def test_the_next_link_goes_on_where_jobs_may_not_queue_themselves(training):
    run: Training = training(faults=pause(11), launch={"requeue": False, "train": {"links": 2}})
    run.submit(stages="train,convert")
    run.wait_for_pause(11)
    jobs = [run.job(link=0), run.job(link=1)]
    run.ask("scancel", "--signal=USR2", jobs[0])
    run.finish()
    assert [(end.job, end.status, end.next) for end in run.ends] == [
        (jobs[0], "preempted", "leave"), (jobs[1], "done", "leave")]
    assert read_manifest(run.run / "convert") is not None


def test_a_site_without_sacct_that_forbids_to_queue_again(training_elsewhere, tmp_path):
    run: Training = training_elsewhere({"accounting": False, "requeue": False}, faults=pause(11))
    run.environment["PATH"] = path_without("sacct", run.environment["PATH"], tmp_path / "programs")
    run.submit()
    run.wait_for_pause(11)
    run.ask("scancel", "--signal=USR2", run.job())
    run.wait_until_gone()
    assert [(end.status, end.next) for end in run.ends] == [("preempted", "requeue")]
    assert "submit the same command again" in run.log()
    run.check_curve()
    run.submit()
    run.finish()


def path_without(absent: str, path: str, programs: Path) -> str:
    """A PATH with all programs of `path` but one, as links in the folder `programs`."""
    programs.mkdir()
    for folder in filter(Path.is_dir, map(Path, path.split(":"))):
        for program in folder.iterdir():
            if program.name != absent and not (programs / program.name).is_symlink():
                (programs / program.name).symlink_to(program)
    return str(programs)
