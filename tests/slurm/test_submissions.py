"""One run over several submissions: stopped, cancelled and left by its user or the site, with more and fewer nodes.

The tests share the run: each waits until it trains, ends that in another way, and submits it again.
"""

import os
import re
import shutil
import time

import pytest

from drover.pipeline.contract.manifest import read_manifest
from drover.pipeline.core.files import read_json
from drover.pipeline.training.hooks import LOOK_EVERY_S
from tests.launch.recorded_slurm import NO_CONTROLLER, Programs
from tests.slurm.faults import EVERY, Training, in_order

pytestmark = pytest.mark.slow


@pytest.fixture
def run(shared_run, request):
    yield from in_order(shared_run, request)


def test_the_same_command_goes_on_where_jobs_may_not_queue_themselves(run):
    without = ("launch.requeue=false", "launch.preflight=true")
    run.submit(*without, stages="train,convert")
    run.next_wait()
    assert "preflight: 2 nodes answered" in run.log()
    run.cluster.run("scancel", "--signal=USR2", run.job())
    end = run.next_end()
    assert (end.status, end.next) == ("preempted", "stop") and "submit the same command again" in end.reason
    run.wait_until_gone()
    run.submit(*without, stages="train,convert")
    assert run.next_start()["from"] == end.step


def test_stopped_by_its_user_it_stays_away_until_asked(run):
    run.next_wait()
    assert "--config" in run.drover("stop", str(run.run))  # how to go on
    time.sleep(LOOK_EVERY_S)  # so that rank 0 looks for the request in its next step
    run.go_on()
    end = run.next_end()
    run.wait_until_gone()
    state = run.state
    assert (state.status, state.again, end.next) == ("preempted", False, "stop")
    assert state.step and state.step % EVERY and read_manifest(run.run / "convert") is None
    run.check_curve()


def test_two_submissions_never_train_at_once(run, encoded, tmp_path):
    """Where squeue fails and there is no sacct, a second submission is accepted: it waits for the first. A run of the
    same name in another folder waits for neither."""
    run.submit(nodes=1)
    run.next_wait()
    first = run.job()
    (tmp_path / "elsewhere").mkdir()
    other = Training(run.cluster, tmp_path / "elsewhere", encoded, run.whole)
    other.submit(nodes=1)
    other.next_wait()
    other.drover("cancel", str(other.run))
    programs = Programs(tmp_path)
    programs.say("squeue", error=NO_CONTROLLER, status=1)
    programs.say("sacct", error="sacct: command not found", status=127)
    run.environment["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    assert "squeue does not answer" in run.submit(nodes=1)
    run.environment["PATH"] = os.environ["PATH"]
    second = run.job()
    assert run.cluster.state(second) == "PENDING Dependency"
    assert "in the queue already" in run.launcher("--config", str(run.config), "--stage", "train", "--cluster", "lab",
                                                  expect=2)
    run.drover("cancel", str(run.run))
    run.wait_until_gone()
    assert run.state.status == "preempted" and "SIGTERM" in run.state.reason, "cancelled, it saves"
    assert [start["job"] for start in run.starts][-1] == first and run.cluster.state(second) == "CANCELLED"
    run.check_curve()


def test_a_submission_that_is_killed_after_sbatch_hides_no_job(run, tmp_path):
    """Slurm has the job and the run has no record of it: it is refused, and cancelled, by its token."""
    Programs(tmp_path).do("sbatch", f'{shutil.which("sbatch")} "$@"\nkill -9 $PPID')
    run.environment["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    command = ("--config", str(run.config), "--stage", "train", "--cluster", "lab", "launch.extra={begin: now+1hour}")
    run.launcher(*command, expect=-9)
    run.environment["PATH"] = os.environ["PATH"]
    assert not read_json(run.run / "launch/chain.json")["jobs"]
    job = re.search(r"in the queue already: (\d+) \(mini-train-\w+\)", run.launcher(*command, expect=2))[1]
    assert f"cancelled {job} (mini-train-" in run.drover("cancel", str(run.run))
    run.wait_until_gone()
    assert run.cluster.state(job) == "CANCELLED"


def test_after_all_that_the_curve_is_the_undisturbed_one_on_whatever_nodes(run):
    run.submit(nodes=4)
    run.finish()
    assert [*{start["job"]: start["ranks"] for start in run.starts}.values()] == [2, 2, 1, 4]
