"""Commands about a run, made by hand: cancel, stop, logs, why; and about a configuration."""

import os
import shlex
from contextlib import suppress
from dataclasses import replace

import pytest
import yaml

from drover.launch import commands
from drover.launch.slurm import start_logs
from drover.launch.slurm.chain import in_queue
from drover.pipeline.contract.stages import STAGES
from drover.pipeline.contract.state import STOP, write_state
from drover.pipeline.core.files import write_text
from tests.launch.recorded_slurm import NO_CONTROLLER, queue_line
from tests.launch.run_folders import HandMade
from tests.refusal import printed, table

GO_ON = "python launch/submit.py --stage all --config configs/demo.yaml --nodes 4"


@pytest.fixture
def run(tmp_path):
    """A chain of jobs 12 to 19."""
    run = HandMade(tmp_path / "demo")
    run.submitted(*run.whole_chain())
    return run


@pytest.fixture(autouse=True)
def slurm(programs, monkeypatch):
    """A Slurm that takes every cancellation."""
    programs.say("scancel")
    monkeypatch.setenv("PATH", str(programs.folder))
    return programs


def test_cancel_begins_at_the_end_of_the_chain(run, slurm, capsys):
    slurm.queue("15_1 RUNNING", "15_3 PENDING", "16 PENDING", "12_0 COMPLETED", "17 PENDING", "12 COMPLETED")
    assert printed(capsys, commands.cancel, run.folder).splitlines() == [
        "cancelled 17 (demo-convert)", "cancelled 16 (demo-train)", "cancelled 15 (demo-encode)",
        f"finished stages are kept; to continue: {GO_ON}"]
    assert slurm.calls("scancel") == ["scancel 17", "scancel 16", "scancel 15"]


def test_why_a_run_stopped(run, slurm, capsys):
    """Each start of the newest submission with the last lines of the rank that failed, and the log of a job that never
    started the stage. Starts of stages that are done, and of earlier submissions, are not shown."""
    slurm.queue("16 FAILED")
    run.done("encode")
    run.state("train", "failed", reason="given up", job="16")
    run.attempt("attempt", "encode", "15_0", ranks=1, nodes=["n1"])
    run.attempt("attempt", "train", "7", ranks=4, nodes=["n1", "n2"], chain="earlier")
    for start in range(12):
        run.attempt("attempt", "train", "16", start=start, ranks=4, nodes=["n1", "n2"])
        run.log(f"train/16.{start}/node1.log", f"2: not me\n3: start {start}\x1b[2J\n3: it broke\n")
        if start != 11:
            run.attempt("ended", "train", "16", start=start, status="crashed", reason="rank 3 on n2: killed")
    write_text(run.folder / "launch/submitit/17_0_log.out", "refused: the code changed\n")
    message = printed(capsys, commands.why, run.folder)
    assert "train failed: given up" in message
    assert message.count("on n1, n2: crashed: rank 3 on n2: killed\n    rank 3: start ") == 9
    assert "rank 3: start 2\\x1b[2J\n    rank 3: it broke\n" in message and "start 1\\x1b" not in message
    assert "start 11, at 2026-11-21T11:50 UTC on n1, n2: its end is not recorded" in message
    log = run.folder / "launch/submitit/17_0_log.out"
    assert f"convert, job 17, without a recorded end: {log}\n    refused: " in message
    assert not [words for words in ("encode, job", "job 7,", "not me") if words in message]
    message = printed(capsys, commands.why, run.folder, "convert")
    assert "convert, job 17, without a recorded end" in message and "train, job 16" not in message
    run.done("train")
    message = printed(capsys, commands.why, run.folder, "train")
    assert "train, job 16, start 10" in message and "train, job 7" in message, "of all submissions"


def test_why_finds_the_logs_that_there_are(run, slurm, capsys):
    """Of an element that failed before its start, though the others did its stage; of a rank that was killed before it
    said anything; of a job that the time limit ended."""
    slurm.queue("12_0 COMPLETED", "12_1 FAILED NonZeroExitCode", "13 CANCELLED DependencyNeverSatisfied")
    run.done("shard")
    run.attempt("attempt", "shard", "12_0", ranks=1, nodes=["n1"])
    run.attempt("ended", "shard", "12_0", status="done", reason="done")
    for job, words in ("12_0", "all is well"), ("12_1", "launch.setup failed"), ("16", "DUE TO TIME LIMIT"):
        write_text(run.folder / f"launch/submitit/{job}_0_log.out", f"{words}\n")
    for arguments in ([], ["tokenizer"]):
        message = printed(capsys, commands.why, run.folder, *arguments)
        assert "tokenizer failed: job 13 would never have started (DependencyNeverSatisfied: look at the end" in message
        assert "shard, job 12_1, without a recorded end" in message and "    launch.setup failed" in message
        assert "all is well" not in message
    run.done("tokenizer", "encode")
    slurm.queue("16 TIMEOUT TimeLimit")
    for start in (0, 1):
        run.attempt("attempt", "train", "16", start=start, ranks=4, nodes=["n1", "n2"])
    run.attempt("ended", "train", "16", start=0, status="crashed", reason="rank 2 on n2: killed")
    run.log("train/16.0/srun.err", "n2: task 2: Killed\n")
    message = printed(capsys, commands.why, run.folder)
    assert f"no output of rank 2 is in {run.folder}/logs/train/16.0\n\nwhat srun said: " in message
    assert "    n2: task 2: Killed" in message and "    DUE TO TIME LIMIT" in message


def test_why_a_run_on_this_machine_stopped_before_its_first_start(tmp_path, capsys):
    run = HandMade(tmp_path / "here")
    run.log("local.log", "start 0 cannot be recorded\n")
    assert f"{run.folder}/logs/local.log\n    start 0 cannot be recorded" in printed(capsys, commands.why, run.folder)


def test_nothing_to_cancel(run, slurm, tmp_path, capsys):
    slurm.queue("12_0 COMPLETED")
    for folder in run.folder, HandMade(tmp_path / "local").folder:
        assert printed(capsys, commands.cancel, folder) == f"no job of {folder} is in the queue\n"
    assert slurm.calls("scancel") == []


def test_cancel_when_slurm_is_silent(run, slurm, capsys):
    slurm.say("squeue", error=NO_CONTROLLER, status=1)
    assert commands.cancel([str(run.folder)]) == 0 and "squeue does not answer" in capsys.readouterr().err
    assert slurm.calls("scancel") == [f"scancel {id}" for id in (19, 18, 17, 16, 15, 13, 12)]
    slurm.say("scancel", error=NO_CONTROLLER, status=1)
    assert f"drover cancel {run.folder}" in printed(capsys, commands.cancel, run.folder, expect=1)
    assert slurm.calls("scancel")[7:] == ["scancel 19"]


@pytest.mark.parametrize("status, line, written, message", table("""
    preempted -> 16 PENDING BeginTime '' 0:00 1 -> true -> ends when it starts
    failed -> 16 FAILED -> false -> does not run (it is: failed)
    running -> 16 RUNNING -> true -> training saves a checkpoint after its current step
    running -> null -> true -> Slurm does not answer, so training may not be running""", *[yaml.safe_load] * 3))
def test_stop_writes_only_where_something_reads_it(run, slurm, capsys, status, line, written, message):
    if status:
        run.state("train", status, job="16")
    if line:
        slurm.queue(line)
    assert commands.stop([str(run.folder)]) == 0
    assert (run.folder / STOP).exists() is written
    shown = capsys.readouterr()
    assert message in shown.out + shown.err and (f"--watch` has ended: {GO_ON}" in shown.out) == written


def test_stop_on_this_machine_speaks_of_no_queue(tmp_path, capsys):
    run = HandMade(tmp_path / "here")
    run.state("train", "running", job="local")
    assert "ends. The stages after it do not start" in printed(capsys, commands.stop, run.folder)


def test_another_user_cannot_stop(run, slurm, capsys, monkeypatch):
    def forbidden(*_):
        raise PermissionError(13, "Permission denied")
    monkeypatch.setattr(commands, "write_text", forbidden)
    run.state("train", "running", job="16")
    slurm.queue("16 RUNNING")
    message = printed(capsys, commands.stop, run.folder, expect=2)
    assert f"You may not write into {run.folder}/launch" in message


def two_starts(run):
    """Logs of the last two of four ranks, on the second node, in two starts of job 16, the second the newest."""
    for number in (0, 1):
        run.attempt("attempt", "train", "16", start=number, ranks=4, nodes=["n1", "n2"])
        run.log(f"train/16.{number}/node1.log", f"2: one\n3: output {number} \N{SNOWMAN}\n2: two\n3: error\n")


def test_logs(run, capsys):
    two_starts(run)
    assert printed(capsys, commands.logs, run.folder, "--rank", 3) == (
        f"==> {run.folder}/logs/train/16.1/node1.log <==\noutput 1 \N{SNOWMAN}\nerror\n")


def test_the_log_of_an_element_is_chosen(run, capsys):
    for element in (1, 2):
        run.attempt("attempt", "shard", f"12_{element}", ranks=0, nodes=["n1"])
        run.log(f"shard/12_{element}.0/node0.log", f"0: output {element}\n")
    assert "--element N shows it.\noutput 1" in printed(capsys, commands.logs, run.folder, "shard", "--element", 1)
    assert "no log of rank 0 of element 3 of shard" in printed(
        capsys, commands.logs, run.folder, "shard", "--element", 3, expect=2)


def test_of_an_endless_log_the_end_is_shown(run, capsys, monkeypatch):
    """Sparse, as after a write far beyond its end."""
    monkeypatch.setattr(start_logs, "MOST_SHOWN", 100)
    two_starts(run)
    with open(run.folder / "logs/train/16.1/node1.log", "ab") as file:
        file.truncate(1 << 42)
        file.seek(0, os.SEEK_END)
        file.write(b"\n3: the end\n")
    message = printed(capsys, commands.logs, run.folder, "train", "--rank", 3)
    assert "The first 4.4 TB are left out." in message and message.endswith("the end\n") and len(message) < 1000
    assert start_logs.last_lines(run.folder / "logs/train/16.1", 3, 2, 9)[-1] == "rank 3: the end"


def test_a_log_commands_no_terminal(run, capsys):
    """A node's log of several ranks and that of one machine, with characters that are cut by a read."""
    run.attempt("attempt", "train", "17", start=0, ranks=1, nodes=["n1"])
    run.log("train/17.0/output.log", "")
    words = b"\x1b]0;title\x07\x1b[31m 10%\r 20%\r\n\xc2\x9b2J \xff" + "☃".encode() * 30_000
    (run.folder / "logs/train/17.0/output.log").write_bytes(words)
    shown = printed(capsys, commands.logs, run.folder, "train").partition(" <==\n")[2]
    assert shown == "\\x1b]0;title\\x07\\x1b[31m 10%\n 20%\n\\x9b2J \\xff" + "☃" * 30_000


@pytest.mark.parametrize("arguments, message", table("""
    trian -> trian in
    train --rank 7 -> : its newest start has ranks 0-3. `drover why
    encode -> no start of it is recorded, but of train. `drover why
    --stage train -> there is no option --stage; give STAGE without --stage.""", str.split))
def test_logs_that_are_not_there(run, capsys, arguments, message):
    two_starts(run)
    with suppress(SystemExit):  # of the parser
        assert commands.logs([str(run.folder), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_following_over_a_restart(run, capsys, monkeypatch):
    """What is there, what is added, and the next start's, until Ctrl-C; before there is anything, too."""
    logged = run.folder / "logs/train"

    def began(start, words):
        run.log(f"train/{start}/node0.log", words)
        run.attempt("attempt", "train", "16", start=int(start[-1]), ranks=2, nodes=["n1"])

    def message(words):
        with open(run.folder / "logs/train/16.0/node0.log", "a") as file:
            file.write(words)

    def interrupt():
        raise KeyboardInterrupt

    happens = iter([lambda: began("16.0", "0: one\n1: and another"), lambda: message("'s\n 0: two\n1: x\n0: la"),
                    lambda: (message("st words\n"), began("16.1", "0: three\n")), interrupt])
    monkeypatch.setattr(commands.time, "sleep", lambda seconds: next(happens)())
    assert commands.logs([str(run.folder), "train", "--follow"]) == 130
    shown = [line for line in capsys.readouterr().out.splitlines() if line]
    assert shown == [f"==> {logged}/16.0/node0.log <==", "one", "two", "last words",
                     f"==> {logged}/16.1/node0.log <==", "three"]


def test_jobs_that_another_user_has_queued_are_in_the_queue(run, slurm):
    """A run may be a group's."""
    slurm.do("squeue", f"case \"$*\" in *--user*) ;; *) echo '{queue_line('16', 'RUNNING')}';; esac")
    assert [job.id for job in in_queue(run.folder, slurm.scheduler())[0]] == ["16"]


@pytest.mark.parametrize("text, whole", [
    ("0: a\n1: b\n 1: c\n10: d\n1: \n11: 1: e\n", "b\nc\n\n"),
    (f"1: {'x' * start_logs.PIECE}\n2: {'y' * start_logs.PIECE}\n1: {'z' * start_logs.PIECE}\n2: y\n1: end\n",
     f"{'x' * start_logs.PIECE}{'z' * start_logs.PIECE}end\n"),
    ("slurmstepd: error: 1: no label\n1: a: b\n", "a: b\n")])
def test_the_lines_of_one_rank(tmp_path, text, whole):
    path = tmp_path / "node0.log"
    path.write_text(text)
    with open(path, "rb") as file:
        assert b"".join(start_logs.output(file, 1)).decode() == whole


@pytest.mark.parametrize("lines, word", [
    ([], ""),
    (["rank 1: Traceback", "rank 1: KeyError: 'a'"], "rank 1: KeyError: 'a'"),
    (["rank 0: error: shard: 2 problems:", "rank 0:   - one", "rank 0:   - two"],
     "rank 0: error: shard: 2 problems: - one - two"),
    (["rank 0: error: first", "rank 0: error: second"], "rank 0: error: second"),
    (["corpus " * 300], f"{' '.join(['corpus'] * ((start_logs.MOST - 4) // 7))} ...")])
def test_what_a_rank_said_last_is_not_cut_within_a_word(lines, word):
    assert start_logs.last_word(lines) == word


# ---- about a configuration


@pytest.mark.parametrize("arguments, now", table("""
    train.lr -> 0.003
    config.yaml train.lr train.lr=0.5 -> 0.5
    train.lr --config config.yaml train.lr=0.5 -> 0.5""", shlex.split))
def test_explain_shows_the_value_of_a_configuration_that_is_given(launcher, arguments, now):
    message = launcher.call(*arguments, program=commands.explain).stdout
    assert message.endswith(f" {now}\n") and ("configured: " in message) == ("config.yaml" in arguments)


def test_why_of_a_run_by_its_name(launcher):
    write_text(launcher.run / "config.yaml", "name: trial\n")
    write_state(launcher.run / "train", "failed", reason="there is no text")
    for words in ("trial",), ("runs/trial",):
        assert "train failed: there is no text" in launcher.call(*words, program=commands.why).stdout
    launcher.done("shard")
    for words in ("trial", "shard"), ("shard", "trial"):
        assert launcher.call(*words, program=commands.why).stdout.endswith("\nshard: done\n")
    assert "There is no stage trian." in launcher.call("trial", "trian", program=commands.why).stderr
    assert "There is no run nosuch. The runs in runs are: trial. It is no stage either." in launcher.call(
        "nosuch", program=commands.why).stderr


def test_why_a_stage_is_out_of_date(launcher, monkeypatch):
    launcher.done("shard", "tokenizer")
    assert launcher.call("config.yaml", "tokenizer", "tokenizer.algorithm=unigram", program=commands.why).stdout == \
        "tokenizer: changed\n  tokenizer.algorithm: \"bpe\" -> \"unigram\"\n"
    monkeypatch.setitem(STAGES, "shard", replace(STAGES["shard"], code=()))
    assert "code has changed since: pipeline/data" in launcher.call("shard", "config.yaml", program=commands.why).stdout
    warned = launcher.accepted("--stage shard --cluster local")
    assert "warning: the code has changed since (pipeline/" in warned
    assert "shard     up to date" in warned and "all done in" in warned
