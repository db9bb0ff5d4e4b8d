"""How a run is shown: from run folders made by hand, and Slurm's answers."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.run_status.run_files import read_run
from launch.run_status.run_status import RunStatus, judge, wanted_ids
from launch.slurm.scheduler import JobInfo
from launch.status import find_run, main, overview, show
from pipeline.contract.stages import REPOSITORY
from pipeline.contract.state import STOP
from pipeline.errors import UserError
from pipeline.files import append_line, write_json, write_text
from tests.launch.recorded_slurm import NO_JOB, FakeSlurm
from tests.launch.run_folders import NOW, SETTINGS, HandMade, ago

DEPENDENTS = {id: JobInfo(id, "PENDING", "Dependency") for id in ("17", "18", "19")}
RUNNING = """\
run       runs/demo, submitted 2026-11-21 11:10 UTC from commit 61ec0478c8 with changes

stage      state    job  nodes     elapsed  progress          ETA
shard      done     12            1 m 05 s
tokenizer  done     13            1 m 05 s
encode     done     15            1 m 05 s
train      running  16   n[1-4]  10 m 00 s  320/500 64%  5 m 38 s
convert    waiting  17
evaluate   waiting  18
report     waiting  19
train     loss 4.8000, tokens/s 11,860, restarts 1, goodput 93.4%
evaluations of checkpoints: 1 done, 1 queued (step 200), 1 owed (step 300); last: step 100, 1.626
          bits per byte, python_line acc 0.950

! train crashed before and was started again: rank 2 on n3 was killed by signal 9
! node n3 failed at 2026-11-21T11:51: failed preflight: no write access to /scratch"""
RUNNING_WIDE = """\
train      running  16   n[1-4]  10 m 00 s  320/500 64%  5 m 38 s  4.8000    11,860         1    93.4%"""
FAILED = """\
run       runs/demo, submitted 2026-11-21 11:45 UTC from commit 61ec0478c8 with changes

stage      state    job   elapsed  progress       loss  tokens/s
shard      done     12   1 m 05 s
tokenizer  done     13   1 m 05 s
encode     done     15   1 m 05 s
train      failed   16             320/500 64%  4.8000    11,860
convert    removed  17
evaluate   removed  18
report     removed  19

! train failed: the loss is NaN (after step 300). Logs: runs/demo/logs/train/16.0
! convert, evaluate, report: not in the queue any more, for a stage before ended badly or was
  cancelled
! to go on, once the cause is mended: python launch/submit.py --stage all --config configs/demo.yaml
  --nodes 4"""
ARRAY = """\
run       runs/demo, submitted 2026-11-21 11:45 UTC from commit 61ec0478c8 with changes

stage      state    job    progress
shard      failed   11 x4  3/4 done, 1 failed (element 2)
tokenizer  removed  13
encode     removed  15
train      removed  16
convert    removed  17
evaluate   removed  18
report     removed  19

! shard failed: element 2 ended FAILED. Logs: runs/demo/logs/shard/11_2.*,
  runs/demo/logs/slurm/11.log
! tokenizer, encode, train, convert, evaluate, report: not in the queue any more, for a stage before
  ended badly or was cancelled
! to go on, once the cause is mended: python launch/submit.py --stage all --config configs/demo.yaml
  --nodes 4"""
LOCAL = """\
run       runs/demo

stage      state     elapsed  progress          ETA    loss  tokens/s
shard      done     1 m 05 s
tokenizer  done     1 m 05 s
encode     done     1 m 05 s
train      running            320/500 64%  5 m 38 s  4.8000    11,860
convert    to do
evaluate   to do
report     to do"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HandMade:
    """The run folder runs/demo of the current folder."""
    monkeypatch.chdir(tmp_path)
    return HandMade(Path("runs/demo"))


def standing(run: HandMade, jobs: dict[str, JobInfo] | None) -> RunStatus:
    return judge(read_run(run.folder), jobs, NOW)


def states(run: HandMade, jobs: dict[str, JobInfo] | None) -> dict[str, str]:
    return {row.stage: row.state for row in standing(run, jobs).rows}


def text(run: HandMade, jobs: dict[str, JobInfo] | None, columns: int = 100) -> str:
    return "\n".join(show(standing(run, jobs), columns))


def training(run: HandMade, **more: Any) -> HandMade:
    """A chain that came to train, job 16."""
    run.submitted(*run.whole_chain())
    run.done("shard", "tokenizer", "encode", until=700)
    run.state("train", "running", job="16", **more)
    run.trained(320)
    return run


def test_running_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = HandMade(Path("runs/demo"), {**SETTINGS, "launch": {"evaluate": {"every_checkpoints": 1}}})
    run.submitted(*run.whole_chain(), *(run.job(id, "evaluate", "evaluation", name=f"demo-evaluate-step-{step:08d}")
                                        for id, step in (("30", 100), ("31", 200))), seconds=3000)
    run.done("shard", "tokenizer", "encode")
    run.state("train", "running", job="16", restart=1)
    run.trained(320, goodput=0.934)
    run.attempt("attempt", "train", "16")
    run.attempt("ended", "train", "16", status="crashed", reason="rank 2 on n3 was killed by signal 9")
    run.attempt("attempt", "train", "16", start=1)
    write_json(run.folder / "train/checkpoints/step-00000300/COMPLETE.json", {})
    evaluation = HandMade(run.folder / "evaluations/step-00000100")
    evaluation.done("evaluate")
    write_json(evaluation.folder / "evaluate/results.json", {
        "heldout": {"overall": {"bits_per_byte": 1.6259}},
        "tasks": {"python_line": {"metrics": {"acc": {"value": 0.95}}}}})
    append_line(run.folder / "launch/nodes.jsonl", {
        "node": "n3", "at": ago(500), "job": "16.0", "reason": "failed preflight: no write access to /scratch"})
    jobs = {"16": JobInfo("16", "RUNNING", "", "n[1-4]", 600, 1), "31": JobInfo("31", "PENDING", "Resources"),
            **DEPENDENTS}
    assert text(run, jobs) == RUNNING
    assert RUNNING_WIDE in text(run, jobs, 160).splitlines()
    assert max(map(len, text(run, jobs, 80).splitlines())) <= 80
    assert standing(run, jobs).outcome is None


def test_failed_chain(run: HandMade) -> None:
    training(run)
    run.state("train", "failed", job="16", step=300, reason="the loss is NaN")
    run.log("train/16.0/rank0.out")
    (run.folder / "logs/train/latest").symlink_to("16.0")
    assert text(run, {"16": JobInfo("16", "FAILED", "NonZeroExitCode")}) == FAILED
    assert standing(run, {}).outcome == "failed"


def test_array_with_a_failed_element(run: HandMade) -> None:
    run.submitted(*run.whole_chain())
    run.begun("shard")
    for index in (0, 1, 3):
        run.part("shard", "read", index, 4)
    elements = {f"11_{index}": JobInfo(f"11_{index}", "FAILED" if index == 2 else "COMPLETED") for index in range(4)}
    jobs = {"11": JobInfo("11", "FAILED"), **elements}
    assert text(run, jobs) == ARRAY
    jobs |= {"11": JobInfo("11", "RUNNING", nodes="n1", elapsed_s=30), "11_2": JobInfo("11_2", "RUNNING")}
    [row] = [row for row in standing(run, jobs).rows if row.stage == "shard"]
    assert (row.state, row.progress, row.nodes, row.elapsed_s) == ("running", "3/4 done", "n1", 30)


def test_arrays_of_several_phases(run: HandMade) -> None:
    phases = ("read", "sort", "write")
    arrays = [run.job(f"2{number}", "shard", "array", (0, 1), (), parts=2, name=f"demo-shard-{phase}", phase=phase)
              for number, phase in enumerate(phases)]
    run.submitted(*arrays, run.job("23", "shard", "finalise"))
    run.begun("shard")
    for index in (0, 1):
        run.part("shard", "read", index, 2)
    run.part("shard", "sort", 1, 2)

    def shown(**jobs: str) -> tuple[str, str, str]:
        infos = {id[1:]: JobInfo(id[1:], *state.split()) for id, state in jobs.items()}
        [row] = [row for row in standing(run, infos).rows if row.stage == "shard"]
        return row.job, row.state, row.progress
    waiting = {"_22": "PENDING Dependency", "_23": "PENDING Dependency"}
    assert shown(_20="COMPLETED", _21="RUNNING", **waiting) == ("21 x2", "running", "sort 1/2 done")
    ended = {"_21_0": "FAILED", "_21_1": "COMPLETED", "_22": "CANCELLED", "_23": "CANCELLED"}
    assert shown(_20="COMPLETED", _21="FAILED", **ended) == ("21 x2", "failed", "sort 1/2 done, 1 failed (element 0)")
    assert "element 0 of sort ended FAILED" in text(run, {id[1:]: JobInfo(id[1:], state) for id, state in {
        "_20": "COMPLETED", "_21": "FAILED", **ended}.items()})
    for phase, index in (("sort", 0), ("write", 0), ("write", 1)):
        run.part("shard", phase, index, 2)
    assert shown(_20="COMPLETED", _21="COMPLETED", _22="COMPLETED", _23="RUNNING")[2] == "write 2/2 done"


def test_local_run(run: HandMade, tmp_path: Path) -> None:
    run.done("shard", "tokenizer", "encode")
    run.trained(320)
    with subprocess.Popen([sys.executable, "-c", "input()", "-m", "pipeline.train"], stdin=subprocess.PIPE) as process:
        write_text(run.folder / ".locks/train", f"process {process.pid} on {platform.node()}, since {ago(600)}\n")
        shown = text(run, {})
        process.communicate(b"\n")
    assert shown == LOCAL
    assert states(run, {})["train"] == "stopped", "its process is gone, and left no word"
    run.state("train", "running")
    assert states(run, {})["train"] == "gone"
    assert "the process is not there; it was killed" in text(run, {}, 1000)
    write_text(run.folder / ".locks/train", f"process 1 on another-machine, since {ago(600)}\n")
    assert states(run, {})["train"] == "running?"
    assert wanted_ids(read_run(run.folder)) == []


def test_done_chain(run: HandMade) -> None:
    training(run)
    run.done("train", "convert", "evaluate", "report", until=100)
    run.attempt("job", "train", "16", seconds=465)
    seen = standing(run, {})
    assert seen.outcome == "done" and {row.state for row in seen.rows} == {"done"} and not seen.remarks
    assert [row.elapsed_s for row in seen.rows if row.stage == "train"] == [365], "over all of its starts"
    assert wanted_ids(read_run(run.folder)) == [], "Slurm need not be asked"


@pytest.mark.parametrize("status, info, expected, said", [
    ("running", JobInfo("16", "RUNNING"), "running", ""),
    ("running", JobInfo("16", "RUNNING", restarts=1), "starting", ""),
    ("preempted", JobInfo("16", "COMPLETING"), "ending", ""),
    ("preempted", JobInfo("16", "PENDING", "BeginTime", restarts=1), "requeued", "after about two minutes"),
    ("preempted", JobInfo("16"), "stopped", "train was stopped after step 300: why"),
    ("running", JobInfo("16"), "gone", "its job 16 is not known to Slurm any more (crashed, or cancelled)"),
    ("running", JobInfo("16", "NODE_FAIL"), "gone", "its job 16 ended NODE_FAIL"),
    ("running", JobInfo("16", "CANCELLED"), "cancelled", "train was cancelled"),
    ("failed", JobInfo("16", "CANCELLED"), "failed", "train failed: why (after step 300)"),
    ("running", JobInfo("16", "PENDING", "launch failed requeued held"), "held", "`scontrol release 16`")])
def test_state_and_queue_together(run: HandMade, status: str, info: JobInfo, expected: str, said: str) -> None:
    training(run)
    run.state("train", status, job="16", step=300, reason="why", again=True)
    assert states(run, {"16": info, **DEPENDENTS})["train"] == expected
    assert said in text(run, {"16": info, **DEPENDENTS}, 1000)


@pytest.mark.parametrize("info, expected, said", [
    (JobInfo("16", "PENDING", "Dependency"), "waiting", ""),
    (JobInfo("16", "PENDING", "Resources"), "queued", "train (job 16) waits for free nodes (Resources)"),
    (JobInfo("16", "PENDING", "QOSMaxJobsPerUserLimit"), "queued", "(QOSMaxJobsPerUserLimit)"),
    (JobInfo("16", "PENDING", "DependencyNeverSatisfied"), "stuck", "will never run"),
    (JobInfo("16", "RUNNING"), "starting", ""), (JobInfo("16", "CANCELLED"), "cancelled", "train was cancelled"),
    (JobInfo("16", "FAILED", "NonZeroExitCode"), "failed", "Slurm's job 16 ended FAILED (NonZeroExitCode)"),
    (JobInfo("16", "COMPLETED"), "failed", "has ended, but the stage has no manifest"),
    (JobInfo("16"), "gone", "it never began")])
def test_queue_alone(run: HandMade, info: JobInfo, expected: str, said: str) -> None:
    run.submitted(*run.whole_chain())
    run.done("shard", "tokenizer", "encode", until=700)
    assert states(run, {"16": info, **DEPENDENTS})["train"] == expected
    assert said in text(run, {"16": info, **DEPENDENTS}, 1000)


def test_what_is_stuck_ends_the_watch(run: HandMade) -> None:
    run.submitted(*run.whole_chain())
    run.done("shard", "tokenizer", "encode", until=700)
    waiting = {"16": JobInfo("16", "PENDING", "Dependency"), **DEPENDENTS}
    assert standing(run, waiting).outcome is None
    seen = standing(run, {**waiting, "16": replace(waiting["16"], reason="DependencyNeverSatisfied")})
    assert seen.outcome == "failed" and "submit.py --cancel runs/demo" in " ".join(seen.remarks)


def test_slurm_does_not_answer(run: HandMade) -> None:
    training(run)
    seen = standing(run, None)
    assert [row.state for row in seen.rows] == ["done", "done", "done", "running?", *["submitted?"] * 3]
    assert seen.remarks[0].startswith("Slurm does not answer") and seen.outcome is None


def test_state_of_an_earlier_submission_is_no_news(run: HandMade) -> None:
    training(run)
    run.state("train", "failed", job="5", seconds=5000, reason="long ago")
    jobs = {"16": JobInfo("16", "PENDING", "Resources"), **DEPENDENTS}
    assert states(run, jobs)["train"] == "queued" and "long ago" not in text(run, jobs)


def test_forced_rebuild_is_not_done_until_it_is(run: HandMade) -> None:
    run.submitted(*run.whole_chain(), seconds=100)
    run.done("train", until=1000)
    jobs = {"16": JobInfo("16", "PENDING", "Dependency")}
    assert "16" in wanted_ids(read_run(run.folder)) and states(run, jobs)["train"] == "waiting"
    run.done("train", until=50)
    assert states(run, jobs)["train"] == "done"


def test_links_of_training(run: HandMade) -> None:
    run.submitted(*(run.job(id, "train", "link") for id in ("21", "22", "23")))
    run.state("train", "preempted", job="21", again=True)
    jobs = {"21": JobInfo("21", "COMPLETED"), "22": JobInfo("22", "RUNNING", elapsed_s=5),
            "23": JobInfo("23", "PENDING", "Dependency")}
    [row] = [row for row in standing(run, jobs).rows if row.stage == "train"]
    assert (row.job, row.state, row.elapsed_s) == ("22 (2/3)", "starting", 5)


def test_units_of_encode_are_counted_against_the_text_shards(run: HandMade) -> None:
    run.done("shard", outputs=[{"path": f"train/{n}.tar", "docs": 3} for n in range(7)] + [{"path": "rejected.jsonl"}])
    run.begun("encode")
    run.units("encode", "encode", 5)
    run.units("encode", "parts", 2)
    [row] = [row for row in standing(run, {}).rows if row.stage == "encode"]
    assert (row.state, row.progress) == ("stopped", "5/7 shards")


def test_reused_stages(run: HandMade) -> None:
    run.done("shard", "tokenizer", "encode")
    other = HandMade(Path("runs/other"), {**SETTINGS, "reuse": "runs/demo"})
    assert states(other, {}) == {"shard": "reused", "tokenizer": "reused", "encode": "reused", **dict.fromkeys(
        ("train", "convert", "evaluate", "report"), "to do")}


def test_time_to_go_counts_what_lies_between_the_steps(run: HandMade) -> None:
    training(run)
    jobs = {"16": JobInfo("16", "RUNNING"), **DEPENDENTS}
    [row] = [row for row in standing(run, jobs).rows if row.stage == "train"]
    assert row.eta_s == pytest.approx(180 * 600 / 320), "320 steps took 600 s, though each of them says 1 s"
    append_line(run.folder / "train/events.jsonl", {"event": "resume", "time": ago(3), "step": 318})
    [row] = [row for row in standing(run, jobs).rows if row.stage == "train"]
    assert row.eta_s == pytest.approx(180), "two steps after a restart say little: what steps themselves took"


def test_nodes_and_stop_request(run: HandMade) -> None:
    training(run)
    from pipeline.contract.state import now
    for number in range(2):
        append_line(run.folder / "launch/nodes.jsonl", {
            "node": "n3", "at": now(), "job": f"16.0.{number}", "reason": "was late"})
    write_text(run.folder / STOP, "maintenance\n")
    said = text(run, {"16": JobInfo("16", "RUNNING"), **DEPENDENTS}, 1000)
    assert said.count("node n3") == 1 and "was late; it is left out of the next submission" in said
    assert "training was asked to stop: maintenance; it saves and leaves" in said


@pytest.mark.parametrize("path, content", [
    ("config.yaml", "train: [half"), ("launch/chain.json", '{"id": "c1", "jo'), ("train/STATE.json", '{"status": "ru'),
    ("train/metrics.jsonl", '{"step": 320, "lo'), ("train/metrics.jsonl", ""), ("train/events.jsonl", "\x00\x00\n[]\n"),
    ("train/manifest.json", '{"format": 99}'), ("launch/attempts/16.jsonl", "{\n[]\n"), ("launch/nodes.jsonl", "3\n"),
    ("launch/stop", ""), (".locks/train", "process")])
def test_half_written_files(run: HandMade, path: str, content: str) -> None:
    training(run)
    write_text(run.folder / path, content)
    shown = text(run, {})
    assert "train " in shown and "Traceback" not in shown
    if path == "train/manifest.json":
        assert states(run, {})["train"] == "damaged" and "written by another version" in shown


def test_a_loss_that_is_no_number(run: HandMade) -> None:
    training(run)
    run.trained(20, loss="NaN")
    assert " nan" in text(run, {"16": JobInfo("16", "RUNNING"), **DEPENDENTS}, 160)


def test_empty_run_folder(tmp_path: Path) -> None:
    (tmp_path / "launch").mkdir()
    seen = judge(read_run(tmp_path), {}, NOW)
    assert {row.state for row in seen.rows} == {"to do"} and seen.outcome is None


def test_overview(run: HandMade, tmp_path: Path) -> None:
    training(run)
    HandMade(Path("runs/new"))
    finished = HandMade(Path("runs/old"))
    finished.done("shard", "tokenizer", "encode", "train", "convert", "evaluate", "report")
    slurm = FakeSlurm(tmp_path / "bin")
    slurm.queue(("16", "RUNNING", "None", "n[1-4]", "10:00"), *((id, "PENDING", "Dependency") for id in DEPENDENTS))
    shown = overview(Path("runs"), slurm.scheduler())
    assert shown == ["run   done  now            job  progress          ETA    loss",
                     "demo  3/7   train running  16   320/500 64%  5 m 38 s  4.8000",
                     "new   0/0   to do",
                     "old   7/7   done"]
    assert len(slurm.calls()) == 1, "Slurm is asked once for all runs"
    run.state("train", "preempted", job="16")
    slurm.say("squeue", error=NO_JOB, status=1)
    assert overview(Path("runs"), slurm.scheduler())[1].split() == ["demo", "3/7", "train", "stopped", "16", "320/500",
                                                                    "64%", "4.8000"], "not what it took along"
    assert overview(Path("nothing"), slurm.scheduler()) == ["no runs in nothing"]


def test_run_is_found_by_name_or_folder(run: HandMade) -> None:
    assert find_run("demo") == find_run("runs/demo") == Path("runs/demo")
    assert main(["--run", "dmo"]) == 2 and main(["--watch"]) == 2
    with pytest.raises(UserError, match=r"There is no run dmo\. The runs in runs are: demo\."):
        find_run("dmo")


def test_watch_ends_with_the_chain(run: HandMade, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                   capsys: pytest.CaptureFixture[str]) -> None:
    """Seen running, then done; and, of another run, failed."""
    training(run)
    slurm = FakeSlurm(tmp_path / "bin")
    manifest = tmp_path / "manifest.json"
    ready = HandMade(tmp_path / "other")
    ready.done("train", until=1)
    (ready.folder / "train/manifest.json").rename(manifest)
    later = " ".join(f"{run.folder.absolute()}/{stage}" for stage in ("train", "convert", "evaluate", "report"))
    slurm.queue(("16", "RUNNING", "None", "n[1-4]", "10:00"))
    # The second look finds everything done.
    script = (slurm.folder / "squeue").read_text().replace("exit 0", f"[ -e {tmp_path}/seen ] && for stage in {later}; "
                                                           f"do mkdir -p $stage; cp {manifest} $stage/; done\n"
                                                           f"touch {tmp_path}/seen\nexit 0")
    (slurm.folder / "squeue").write_text(script)
    monkeypatch.setenv("PATH", str(slurm.folder))
    assert main(["--run", "demo", "--watch", "0.01"]) == 0
    seen = capsys.readouterr().out
    assert seen.count("train      running") == 1 and seen.count("train      done") == 1
    run.state("train", "failed", job="16", reason="why")
    (run.folder / "train/manifest.json").unlink()
    slurm.say("squeue", error=NO_JOB, status=1)
    assert main(["--run", "demo", "--watch", "0.01"]) == 1
    assert "train failed: why" in capsys.readouterr().out


def test_as_a_program_without_slurm_or_torch(run: HandMade, tmp_path: Path) -> None:
    training(run)
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    environment = {**os.environ, "PATH": str(tmp_path / "nothing"), "COLUMNS": "80"}
    result = subprocess.run([sys.executable, "-X", "importtime", REPOSITORY / "launch/status.py", "--run", "demo"],
                            cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0 and "running?" in result.stdout and "! Slurm does not answer" in result.stdout
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in result.stderr.splitlines()}
    assert "yaml" in imported and not imported & {"torch", "numpy", "submitit", "rich", "transformers"}
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before, "it only reads"
