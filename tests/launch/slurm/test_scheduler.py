"""What is made of Slurm's answers, and why a job waits; the texts were recorded from Slurm 22.05.8."""

import re

import pytest

from drover.launch.slurm.scheduler import COLUMNS, JobInfo, Scheduler
from tests.launch.recorded_slurm import NO_CONTROLLER, NO_DATABASE, NO_JOB, WIDTHS, queue_line
from tests.waiting import runs, wait_for

ACCOUNTED = """\
2|PENDING|Dependency|None assigned
3|RUNNING|None|n[1-3]
1_0|COMPLETED|None|n1
1_2|FAILED|JobArrayTaskLimit|n1
10|CANCELLED by 0|BeginTime|None assigned"""


def test_queue_answers_for_jobs_and_arrays(programs):
    programs.queue("1_2 PENDING JobArrayTaskLimit '' 0:00 0 demo-shard", "2 PENDING Dependency",
                   "1_0 COMPLETED None n1 0:08 0 demo-shard", "1_1 RUNNING None n2 0:05 1 demo-shard",
                   "3 RUNNING None n[1-3] 1-02:03:04 2")
    assert programs.scheduler().jobs([]) == {}
    assert programs.scheduler().jobs(["1", "1_2", "2", "3"]) == {
        "1": JobInfo("1", "RUNNING", "", "n2", 8, 1, "demo-shard"),
        "1_2": JobInfo("1_2", "PENDING", "JobArrayTaskLimit", name="demo-shard"),
        "2": JobInfo("2", "PENDING", "Dependency", name="demo-train"),
        "3": JobInfo("3", "RUNNING", "", "n[1-3]", 93784, 2, "demo-train")}
    assert programs.calls() == ["squeue --noheader --all --array --states all --jobs 1,2,3 --Format " + ",".join(
        f"{name}:{width}" for (name, _), width in zip(COLUMNS, WIDTHS, strict=True))]


def test_accounting_knows_what_left_the_queue(programs):
    programs.queue("3 RUNNING None n[1-3] 2:29")
    programs.say("sacct", ACCOUNTED)
    result = programs.scheduler().jobs(["1_0", "1_2", "10", "3", "2"])
    assert {id: job.state for id, job in result.items()} == {
        # The database still has job 2 as pending, which the queue does not know: it has missed its end.
        "1_0": "COMPLETED", "1_2": "FAILED", "10": "CANCELLED", "3": "RUNNING", "2": "unknown"}
    assert result["1_2"] == JobInfo("1_2", "FAILED", "JobArrayTaskLimit", "n1") and result["10"].nodes == ""
    assert programs.calls("sacct")[0].startswith("sacct --noheader --parsable2 --allocations --jobs 1,10,2 ")


@pytest.mark.parametrize("accounting", ["sleep 3600", f"echo '{NO_DATABASE}' >&2; exit 1"])
def test_one_bad_id_does_not_hide_the_others(programs, accounting):
    """Where there is no accounting, one that left the queue is unknown."""
    programs.do("squeue", f"case \"$*\" in *--jobs*) echo '{NO_JOB}' >&2; exit 1;; esac\n"
                          f"echo '{queue_line('5', 'RUNNING')}'")
    programs.do("sacct", accounting)
    result = programs.scheduler(timeout_s=1).jobs(["5", "99_2"])
    assert (result["5"].state, result["99_2"]) == ("RUNNING", JobInfo("99_2"))


@pytest.mark.parametrize("script", [
    None, "echo '{controller}' >&2; exit 1", "echo 'squeue: fatal: Could not establish a configuration source' >&2; "
    "exit 1", "sleep 3600 & echo $! > {folder}/child; wait"])
def test_slurm_that_does_not_answer(programs, script):
    """The last is a site's wrapper, whose child holds on to its output: both are ended."""
    if script:
        programs.do("squeue", script.format(controller=NO_CONTROLLER, folder=programs.folder))
    assert programs.scheduler(timeout_s=2).jobs(["3"]) is None
    assert programs.scheduler(timeout_s=0.5).mine() is None
    wait_for(lambda: not runs(programs.folder / "child"))


def test_cancel_minds_no_ended_job(programs):
    programs.do("scancel", "say() { echo \"scancel: error: Kill job error on job id $1: $2\" >&2; exit 1; }\n"
                "case $1 in 8) say 8 'Invalid job id specified';; 7) say 7 'Access/permission denied';; esac")
    assert [programs.scheduler().cancel(id) for id in ("9", "8", "7")] == [
        None, None, "Kill job error on job id 7: Access/permission denied"]
    programs.say("scancel", error=f"scancel: error: {NO_CONTROLLER}", status=1)
    assert programs.scheduler().cancel("9") == NO_CONTROLLER


def test_a_users_own_formats_and_options_are_left_out(programs):
    programs.do("squeue", f"env > {programs.folder}/environment")
    scheduler = Scheduler({"PATH": str(programs.folder), "SQUEUE_FORMAT": "%i", "SLURM_CLUSTERS": "other",
                           "SBATCH_PARTITION": "other", "SLURM_CONF": "/etc/slurm.conf"})
    assert scheduler.jobs(["1"]) == {"1": JobInfo("1")}
    seen = (programs.folder / "environment").read_text()
    assert re.findall("SLURM.*|SBATCH.*|SQUEUE.*", seen) == ["SLURM_CONF=/etc/slurm.conf"]
