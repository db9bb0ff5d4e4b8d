"""How a run is shown, and the program that shows it."""

import json
from pathlib import Path

from drover.launch import status as program
from drover.launch.slurm.scheduler import JobInfo
from drover.launch.status import main, overview, show
from drover.pipeline.core.files import write_text
from tests.launch.run_status.conftest import DEPENDENTS, Seen

RUNNING = """\
run       runs/demo, submitted 2026-11-21T11:45 UTC from commit 61ec0478c8 with
          changes

stage      state    job          elapsed  progress                      left
shard      done     12          1 m 05 s
tokenizer  done     13          1 m 05 s
encode     done     15          1 m 05 s
train      running  16         10 m 00 s  320/500 steps 64%         5 m 38 s
convert    waiting  17
evaluate   waiting  18
report     waiting  19
train     nodes n[1-4], loss 4.8000, tokens/s 11,860, goodput 93.4%, restarts 1

! train crashed before and was started again: rank 2 on n3 was killed by signal
  9"""


def test_a_chain_that_runs(run):
    run.training(attempt=1)
    run.attempt("attempt", "train", "16", ranks=4, nodes=["n3"])
    run.attempt("ended", "train", "16", status="crashed", reason="rank 2 on n3 was killed by signal 9")
    seen = run.status({"16": JobInfo("16", "RUNNING", "", "n[1-4]", 600), **DEPENDENTS})
    assert "\n".join(show(seen, columns=80)) == RUNNING
    run.state("train", "running", seconds=-1)
    assert run.status({}).rows[3].left == "", "an earlier start wrote that"


def test_overview(run, programs):
    run.training()
    Seen(Path("runs/new"))
    Seen(Path("runs/old")).done("shard", "tokenizer", "encode", "train", "convert", "evaluate", "report")
    programs.queue("16 RUNNING None n[1-4] 10:00", *(f"{id} PENDING Dependency" for id in DEPENDENTS))
    assert [" ".join(line.split()[:4]) for line in overview(Path("runs"), programs.scheduler())] == [
        "run done stage state", "demo 3/7 train running", "new 0/7 shard to", "old 7/7 report done"]
    assert len(programs.calls()) == 1, "Slurm is asked once for all runs"
    assert overview(Path("nothing"), programs.scheduler()) == ["no runs in nothing"]


def test_watch_ends_when_nothing_goes_on_at_two_looks(run, monkeypatch, capsys):
    running, failed = run.training().status({"16": "RUNNING"}), run.status({"16": "FAILED"})
    run.done("train", "convert", "evaluate", "report", until=1)
    for end, status in ((run.status({}), 0), (failed, 1)):
        seen = [running, end, running, end, end]
        monkeypatch.setattr(program, "query", lambda *_, seen=seen: [seen.pop(0)])
        assert main(["--run", "demo", "--watch", "0"]) == status and seen == []
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
