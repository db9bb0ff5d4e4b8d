"""Which state a stage is in, and what is said of it: by its folder, by Slurm's answers, by both; how that is shown."""

import json
import platform
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from drover.launch import status as program
from drover.launch.run_status import judge, read_run
from drover.launch.slurm.scheduler import JobInfo
from drover.launch.status import main, show
from drover.pipeline.contract.stages import STAGES
from drover.pipeline.core.console import draw
from drover.pipeline.core.files import sha256_file, write_sealed, write_text
from drover.pipeline.records.checkpoint_scores import CheckpointScores
from tests.launch.run_folders import NOW, SETTINGS, HandMade
from tests.refusal import table

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
            self.progress("train", 320, 500, "steps", left_s=338.0, loss=4.8, tokens_per_s=11859.6, goodput=0.934,
                          restarts=1)
        return self


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The run folder runs/demo of the current folder."""
    monkeypatch.chdir(tmp_path)
    return Seen(Path("runs/demo"))


@pytest.mark.parametrize("message, answer, state, remark", table(r"""
    preempted -> PENDING BeginTime -> waiting -> ^train \(job 16\) waits: BeginTime$
    preempted -> COMPLETING -> ending -> ^train \(job 16\) is ending or being cancelled
    running -> COMPLETING -> ending -> ^train \(job 16\) is ending or being cancelled
    null -> RUNNING -> running -> ^$
    null -> PENDING Dependency -> waiting -> ^$
    null -> PENDING DependencyNeverSatisfied -> failed -> will never start.* Remove it first: drover cancel runs/demo
    null -> PENDING PartitionTimeLimit -> failed -> \(PartitionTimeLimit\): look at time or partition\. Remove
    preempted -> unknown -> stopped -> train stopped after step 300: why
    failed -> CANCELLED -> failed -> train failed after step 300: why.*once the cause is fixed, to continue: python
    running -> unknown -> failed -> train failed: job 16 is no longer known to Slurm: it crashed or was
    running -> NODE_FAIL -> failed -> train failed: job 16 ended NODE_FAIL
    running -> CANCELLED Resources -> cancelled -> train cancelled: job 16 was ended by scancel\. .drover why
    running -> TIMEOUT TimeLimit -> failed -> job 16 reached its time limit: raise launch
    null -> FAILED NonZeroExitCode -> failed -> job 16 ended FAILED \(NonZeroExitCode\)\. .drover why runs/demo
    running -> null -> running -> ^Slurm does not answer
    preempted -> null -> stopped -> ^Slurm does not answer
    failed -> null -> failed -> ^Slurm does not answer
    null -> null -> waiting -> ^Slurm does not answer""", yaml.safe_load, yaml.safe_load))
def test_its_word_and_the_queue(run, message, answer, state, remark):
    seen = run.training(message, step=300, reason="why").status(answer and {"16": answer, **DEPENDENTS})
    assert [row.state for row in seen.rows] == [*["done"] * 3, state, *["waiting"] * 3]
    assert re.search(remark, " ".join(seen.remarks))
    # What waits behind one that failed waits in vain, and so does who watches.
    assert seen.outcome == ("failed" if state in ("failed", "cancelled") else None)


def test_what_a_cancelled_job_took_along_has_not_failed(run):
    seen = run.training("running").status({"16": "COMPLETING", **dict.fromkeys(DEPENDENTS, "CANCELLED Dependency")})
    assert [row.state for row in seen.rows[3:]] == ["ending", *["to do"] * 3] and seen.outcome is None


def test_a_submission_that_sbatch_refused_halfway_is_not_done(run):
    job = run.job("16", "train")
    run.done("train", until=10)
    for jobs, refused, why in (([], "No such account.", "No such account."),
                               ([job], "", "it is at work, or was killed")):
        run.submitted(*jobs, planned=2, refused=refused)
        seen = run.status({})
        assert seen.outcome == "failed"
        assert seen.remarks[-2] == f"not all jobs of the newest submission are queued: {why}"
    run.submitted(job, planned=1)
    assert run.status({}).outcome == "done"
    run.submitted(job, planned=2)
    run.done(*STAGES, until=10)
    seen = run.status({})
    assert seen.outcome == "done" and not seen.remarks, "the other stages were made without Slurm"


def test_a_submission_that_slurm_refused_whole_ends_with_a_start_here(run):
    run.submitted(planned=7, refused="No such account.")
    run.state("shard", "running", seconds=60)
    run.attempt("attempt", "shard", "local", seconds=60, ranks=0, nodes=["n1"], chain="local-1")
    seen = run.status({})
    assert seen.files.chain is None and "No such account" not in str(seen.remarks)
    assert seen.remarks[-1] == "once the cause is fixed, the same command continues"
    run.done(*STAGES, until=10)
    assert run.status({}).outcome == "done"
    run.submitted(planned=7, refused="No such account.", seconds=5)  # by --force
    assert run.status({}).outcome == "done"


def test_a_word_or_a_manifest_of_an_earlier_submission_is_no_news(run):
    run.training("failed", seconds=5000)
    assert run.states({"16": "PENDING Dependency"})[3] == "waiting" and run.states({"16": "RUNNING"})[3] == "running"
    run.done("train", until=1000)  # it is forced
    assert "16" in read_run(run.folder).wanted_ids and run.states({"16": "PENDING Dependency"})[3] == "waiting"
    run.done("train", until=50)
    assert "16" not in read_run(run.folder).wanted_ids and run.states({"16": "COMPLETING"})[3] == "done"


def test_local_run(run):
    """Of a process that runs, is gone, cannot be seen; with and without a word of the stage."""
    run.begun("train")
    with subprocess.Popen([sys.executable, "-c", "input()", "-m", "drover.pipeline.train"],
                          stdin=subprocess.PIPE) as process:
        write_text(run.folder / ".locks/train", f"process {process.pid} on {platform.node()}, since then\n")
        assert run.states({})[2:5] == ["to do", "running", "to do"]
        process.communicate(b"\n")
    assert run.states({})[3] == "stopped"
    run.state("train", "running")
    assert run.states({})[3] == "failed"
    assert "no longer exists; it was killed. `drover why" in run.status({}).remarks[0]
    run.attempt("attempt", "train", "local", ranks=2, nodes=["n1"])
    for seconds, then, state in (30, "restart", "running"), (20, "stop", "failed"):
        run.attempt("ended", "train", "local", seconds=seconds, status="crashed", reason="rank 1: killed", next=then)
        assert run.states({})[3] == state
    assert read_run(run.folder).wanted_ids == []
    run.attempt("ended", "train", "local", seconds=10, status="preempted", reason="a request to end came", next="stop")
    assert run.status({}).rows[3].state == "stopped" and "stopped: a request to end" in run.status({}).remarks[0]
    write_text(run.folder / ".locks/train", "process 1 on another-machine, since then\n")
    assert run.status({}).rows[3].remarks[0].endswith("its last record is 10 m 00 s old")


def test_why_an_array_and_a_job_failed(run):
    """As the launcher recorded it. A job that was ended by others left no record."""
    run.submitted(run.job("20", "encode", (0, 1)), run.job("30", "convert"))
    for stage, job, reason in (("encode", "20_1", "no space"), ("convert", "30", "killed by SIGKILL")):
        run.attempt("attempt", stage, job, ranks=1, nodes=["n1"])
        run.attempt("ended", stage, job, status="failed", reason=reason)
    remarks = run.status({"20": "FAILED", "30": "FAILED"}).remarks
    assert remarks[0].startswith("encode failed: job 20 ended FAILED (no reason given): no space. `drover why")
    assert "convert failed: job 30 ended FAILED (no reason given): killed by SIGKILL. " in remarks[1]


def test_a_reused_stage_and_one_of_a_plugin(run):
    run.done("shard", "tokenizer")
    other = Seen(Path("runs/other"), {**SETTINGS, "reuse": "runs/demo"})
    other.done("letters", "train.replaced")  # the second was set aside, and is no stage
    assert other.states({}) == ["reused", "reused", *["to do"] * 5, "done"]
    other.submitted(other.job("7", "train"))  # and has not started, so that only the submission has its configuration
    (other.folder / "config.yaml").rename(other.folder / "launch/config-1.yaml")
    assert other.states({"7": "FAILED"}) == ["reused", "reused", "to do", "failed", "to do", "to do", "to do", "done"]


def test_a_job_that_scores_checkpoints_has_not_failed_once_they_are_scored(run):
    """By another job, by `drover evaluate`, or by training itself."""
    write_text(run.folder / "config.yaml", yaml.dump({**SETTINGS, "evaluate": {"every": 100}}))
    run.submitted(run.job("16", "train"), run.job("17", "watch"))
    failed = {"16": "COMPLETED", "17": "FAILED"}
    checkpoint = run.folder / "train/checkpoints/step-00000100/COMPLETE.json"
    write_text(checkpoint, "{}")
    assert run.states(failed)[-1] == "failed", "training may come to further ones"
    run.done("train", until=10)
    assert run.states(failed)[-1] == "failed" and run.status(failed).outcome == "failed"
    score = CheckpointScores(100, sha256_file(checkpoint), 1, None, {}, {})
    write_sealed(run.folder / "train/scores/step-00000100.json", asdict(score))
    seen = run.status(failed)
    assert seen.rows[-1].state == "done" and seen.outcome == "done" and not seen.remarks


def test_time_and_restarts_of_training_are_those_of_the_report(run):
    run.done("train", seconds=90, counts={"run_s": 270.0})
    run.progress("train", 500, 500, "steps", restarts=2)
    run.state("train", "done", attempt=3)  # one start was refused
    row = run.status({}).rows[3]
    assert (row.elapsed, row.figures) == ("4 m 30 s", "restarts 2")


@pytest.mark.parametrize("path, content, remark", table("""
    train/STATE.json -> {"status": "ru -> ''
    .locks/train -> process -> ''
    launch/chain.json -> {"jo -> ''
    train/manifest.json -> {"format": 99} -> by another version
    train/manifest.json -> { -> is damaged""", str, str, yaml.safe_load))
def test_files_that_are_torn_or_foreign(run, path, content, remark):
    write_text(run.training().folder / path, content)
    seen = run.status({"16": "RUNNING", **DEPENDENTS})
    assert seen.rows[3].state == ("failed" if remark else "running") and remark in " ".join(seen.remarks)


def test_a_request_to_stop(run):
    run.training("running")
    write_text(run.folder / "launch/stop", "maintenance\n")
    assert run.status({"16": "RUNNING", **DEPENDENTS}).remarks == [
        "a request to stop training is pending (maintenance): it saves and ends"]


RUNNING = """\
run       runs/demo, submitted 2026-11-21T11:45 UTC from commit 61ec0478c8 with changes

stage      state    job    elapsed  progress               left
shard      done     12    1 m 05 s
tokenizer  done     13    1 m 05 s
encode     done     15    1 m 05 s
train      running  16   10 m 00 s  320/500 steps 64%  5 m 38 s
convert    waiting  17
evaluate   waiting  18
report     waiting  19
train     nodes n[1-4], loss 4.8000, tokens/s 11,860, goodput 93.4%, restarts 1

! train crashed before and was started again: rank 2 on n3 was killed by signal 9
"""


def test_a_chain_that_runs(run, capsys):
    run.training()
    run.attempt("attempt", "train", "16", ranks=4, nodes=["n3"])
    run.attempt("ended", "train", "16", status="crashed", reason="rank 2 on n3 was killed by signal 9")
    seen = run.status({"16": JobInfo("16", "RUNNING", "", "n[1-4]", 600), **DEPENDENTS})
    draw(*show(seen))
    assert capsys.readouterr().out == RUNNING
    run.state("train", "running", seconds=-1)
    assert run.status({}).rows[3].left == "", "an earlier start wrote that"


def test_overview(run, programs, monkeypatch, capsys):
    run.training()
    Seen(Path("runs/new"))
    Seen(Path("runs/rates/base-seed0"))
    Seen(Path("runs/old")).done("shard", "tokenizer", "encode", "train", "convert", "evaluate", "report")
    programs.queue("16 RUNNING None n[1-4] 10:00", *(f"{id} PENDING Dependency" for id in DEPENDENTS))
    monkeypatch.setenv("PATH", str(programs.folder))
    assert main([]) == 0
    assert [" ".join(line.split()[:4]) for line in capsys.readouterr().out.splitlines()] == [
        "run done stage state", "demo 3/7 train running", "new 0/7 shard to", "old 7/7 report done",
        "rates/base-seed0 0/7 shard to"]
    assert len(programs.calls()) == 1, "Slurm is asked once for all runs"
    monkeypatch.chdir("runs/new")
    assert main([]) == 0 and capsys.readouterr().out == "no runs in runs\n"


def test_watch_ends_when_nothing_goes_on_at_two_looks(run, monkeypatch, capsys):
    running, failed = run.training().status({"16": "RUNNING"}), run.status({"16": "FAILED"})
    run.done("train", "convert", "evaluate", "report", until=1)
    monkeypatch.setattr(program, "WATCH_S", 0)
    for end, status in ((run.status({}), 0), (failed, 1)):
        seen = [running, end, running, end, end]
        monkeypatch.setattr(program, "query", lambda *_, seen=seen: [seen.pop(0)])
        assert main(["--run", "demo", "--watch"]) == status and seen == []
        assert capsys.readouterr().out.count("every 0 s, Ctrl-C ends this") == 5


def times(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_only_reads_and_commands_no_terminal(run, tmp_path, monkeypatch, capsys):
    """Also where foreign files say what a terminal would obey; without Slurm."""
    run.training("failed", reason="why\x1b]0;title\x07 \x9b31m \u202eback")
    run.state("convert", "running", job="14\x1b[2J", host="n\x07")
    write_text(run.folder / "launch/nodes.jsonl", '{"node": "n3\\u001b[2J", "reason": "\\u0007"}\n')
    before = times(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    for arguments in (["--run", "demo"], []):
        assert main(arguments) == 0
        shown = capsys.readouterr().out
        assert all(one.isprintable() or one == "\n" for one in shown) and "Slurm does not answer" in shown
    assert main(["demo", "--json"]) == 0
    [status] = json.loads(capsys.readouterr().out)
    assert status["run"] == "runs/demo" and "failed" in [row["state"] for row in status["stages"]]
    assert times(tmp_path) == before
    assert main(["--run", "\x1b[2J"]) == main(["--watch"]) == 2
    assert "There is no run \\x1b[2J. The runs in runs are: demo." in capsys.readouterr().err
