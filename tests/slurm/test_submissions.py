"""One run over several submissions: stopped, cancelled and left by its user or the site, with more and fewer nodes.

The tests share the run: each waits until it trains, ends that in another way, and submits it again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.contract.manifest import read_manifest
from pipeline.training.stop_request import LOOK_EVERY_S
from tests.slurm.faults import EVERY, Training, in_order


@pytest.fixture
def run(shared_run: Training, request: pytest.FixtureRequest) -> Iterator[Training]:
    yield from in_order(shared_run, request)


def test_the_next_link_goes_on_where_jobs_may_not_queue_themselves(run: Training) -> None:
    run.submit("launch.train.links=2", "launch.requeue=false", stages="train,convert")
    run.next_wait()
    first, second = run.job(link=0), run.job(link=1)
    run.ask("scancel", "--signal=USR2", first)
    end = run.next_end()
    assert (end.job, end.status, end.next) == (first, "preempted", "leave")
    start = run.next_start(1)
    assert (start["job"], start["from"]) == (second, end.step)


def test_stopped_by_its_user_it_stays_away_until_asked(run: Training) -> None:
    run.next_wait()
    assert "--config" in run.launcher("--stop", str(run.run))  # how to go on
    time.sleep(LOOK_EVERY_S)  # so that rank 0 looks for the request in its next step
    run.go_on()
    end = run.next_end()
    run.wait_until_gone()
    state = run.state
    assert state is not None and (state.status, state.again, end.next) == ("preempted", False, "stop")
    assert state.step and state.step % EVERY and read_manifest(run.run / "convert") is None
    run.check_curve()


def test_a_site_without_sacct_that_forbids_to_queue_again(run: Training, tmp_path: Path) -> None:
    path = run.environment["PATH"]
    run.environment["PATH"] = path_without("sacct", path, tmp_path / "programs")
    run.submit(nodes=1)
    run.next_wait()
    run.ask("scontrol", "update", f"JobId={run.job()}", "Requeue=0")
    run.ask("scancel", "--signal=USR2", run.job())
    end = run.next_end()
    run.wait_until_gone()
    run.environment["PATH"] = path
    assert (end.status, end.next) == ("preempted", "requeue")
    assert "submit the same command again" in run.log()
    run.check_curve()


def path_without(absent: str, path: str, programs: Path) -> str:
    """A PATH with all programs of `path` but one, as links in the folder `programs`."""
    programs.mkdir()
    for folder in filter(Path.is_dir, map(Path, path.split(":"))):
        for program in folder.iterdir():
            if program.name != absent and not (programs / program.name).is_symlink():
                (programs / program.name).symlink_to(program)
    return str(programs)


def test_cancelled_it_saves(run: Training) -> None:
    run.submit(nodes=4)
    run.next_wait()
    run.launcher("--cancel", str(run.run))
    run.wait_until_gone()
    assert run.state and run.state.status == "preempted" and "SIGTERM" in run.state.reason
    run.check_curve()


def test_after_all_that_the_curve_is_the_undisturbed_one_on_whatever_nodes(run: Training) -> None:
    run.submit(stages="train,convert")
    run.finish()
    assert [start["ranks"] for start in run.starts] == [2, 2, 1, 4, 2]
    assert [start["restart"] for start in run.starts] == [0] * 5 and len({start["job"] for start in run.starts}) == 5
    assert read_manifest(run.run / "convert") is not None
