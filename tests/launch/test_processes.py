"""Processes that the launcher starts: requests to stop, ends of ranks, output, orphans."""

import io
import os
import signal
import subprocess
import sys
from contextlib import redirect_stderr, suppress
from pathlib import Path

import pytest

from drover.launch import processes
from drover.launch.processes import pass_on, run_local, show, stop_requests
from drover.pipeline.contract.stages import REPOSITORY
from tests.waiting import HANG_S, runs, wait_for

ENDS_AT_TERM = "signal.signal(15, lambda *_: os._exit(5))"
STUBBORN = "signal.signal(15, signal.SIG_IGN); below = subprocess.Popen(['sleep', '3600']); " \
           "open('below', 'w').write(str(below.pid))"


def script(setup):
    """A process that is `ready` after its setup, and stays."""
    return [sys.executable, "-c", f"import os, signal, subprocess, sys, time; {setup}; "
            "open(f'ready{os.environ.get(\"RANK\", 0)}', 'w').close(); time.sleep(3600)"]


@pytest.mark.parametrize("setup, requests, limit, status, said", [
    (ENDS_AT_TERM, 1, "", 5, "stopping x: it ends its present step or task and saves (once more"),
    (STUBBORN, 2, "", 137, "killing x"), (STUBBORN, 1, "SHUTDOWN_S", 137, "stopping x"),
    (STUBBORN, "tick", "KILL_S", 137, "")])
def test_requests_to_stop(tmp_path, monkeypatch, setup, requests, limit, status, said):
    """The first asks it to save; the second, or time, kills it with what is below it."""
    monkeypatch.chdir(tmp_path)
    for name in ("SHUTDOWN_S", "KILL_S"):
        monkeypatch.setattr(processes, name, 0.2 if name == limit else HANG_S)
    ready = Path("ready0").exists
    signals = []

    def each():
        signals.extend([signal.SIGINT] * (ready() and requests in (1, 2) and len(signals) < requests))
        return not (ready() and requests == "tick")

    with redirect_stderr(io.TextIOWrapper(io.BytesIO())) as errors:
        stage = run_local(script(setup), os.environ, each, "x", signals)
        assert stage.status == status and said in errors.buffer.getvalue().decode()
    assert stage.killed == (status == 137)
    wait_for(lambda: not runs(Path("below")))


def test_the_first_rank_that_fails_ends_the_others(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fails = "os.environ['RANK'] == '1' and os._exit(7)"
    waits = "[time.sleep(0.01) for _ in iter(lambda: len([f for f in os.listdir() if f.startswith('here')]), 3)]"
    ranks = run_local(script(f"open('here' + os.environ['RANK'], 'w').close(); {waits}; {fails}"), os.environ, ranks=3)
    assert ranks.status == 7 and ranks.failed[0] == (1, 7) and set(ranks.failed[1:]) == {(0, 143), (2, 143)}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("given", [signal.SIG_DFL, signal.SIG_IGN])
def test_requests_are_noted(number, given):
    """Jobs in a shell's background inherit that SIGINT is ignored; after nohup a closed terminal is no request."""
    before = signal.signal(number, given)
    with stop_requests() as signals:
        signal.raise_signal(number)
        assert signals == [number] * ((number, given) != (signal.SIGHUP, signal.SIG_IGN))
    assert signal.signal(number, before) == given


def test_a_live_line_is_shown_unchanged_and_logged_once():
    """A closed output ends nothing."""
    shown, log = io.TextIOWrapper(io.BytesIO()), io.BytesIO()
    text = b"1/3\r\x1b[2K2/3\r\x1b[2K\n\r\x1b[1A\x1b[2K\x1b[31mdone\x1b[0m 3/3\n\nnext\r\nrest"
    reader, closed = os.pipe()
    os.close(reader)
    for target in shown, os.fdopen(closed, "w"):
        read, write = os.pipe()
        os.write(write, text)
        pass_on(read, write, target, log)
    show(target, "nobody reads this")
    with suppress(BrokenPipeError):
        target.close()
    assert shown.buffer.getvalue() == text + b"\n", "what the launcher says next begins a line"
    assert log.getvalue() == 2 * b"done 3/3\n\nnext\nrest\n"


def test_what_the_launcher_started_ends_with_it(tmp_path):
    note = tmp_path / "pid"
    code = "import os; from drover.launch.processes import run_local; " \
           "run_local(['sh', '-c', 'echo $$ > pid; exec sleep 3600'], os.environ)"
    launcher = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path,
                                env={**os.environ, "PYTHONPATH": str(REPOSITORY)})
    wait_for(lambda: note.exists() and note.read_text())
    launcher.kill()
    launcher.wait()
    wait_for(lambda: not runs(note), lambda: "the process outlived the launcher")
