"""What a person sees while a stage works: times, numbers in short, progress on a terminal and in a log."""

import sys

import pytest

from drover.pipeline.core import console
from drover.pipeline.core.console import ProgressBar, duration, echo, say
from tests.core.test_command_line import Terminal
from tests.refusal import table


@pytest.mark.parametrize(("seconds", "text"), table("""
    0.04 -> 0.0 s
    9.94 -> 9.9 s
    10 -> 10 s
    59.4 -> 59 s
    60 -> 1 m 00 s
    185 -> 3 m 05 s
    3599.6 -> 1 h 00 m
    7800 -> 2 h 10 m""", float))
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    return now


def test_in_a_log_progress_is_a_line_now_and_then(clock, capsys):
    with ProgressBar("encode", "shards", 40, "units") as bar:
        bar.already(20)  # by an earlier start: not of this one's rate
        for _ in range(4):
            clock[0] += 4
            bar.advance()
    assert capsys.readouterr().out.splitlines() == [
        "encode    shards: 23/40 units, 0.2/s, 1 m 08 s to go", "encode    shards: 24/40 units in 16 s"]


def test_on_a_terminal_one_line_is_drawn_again_and_cleared(clock, monkeypatch):
    monkeypatch.setattr(sys, "stdout", screen := Terminal())
    with ProgressBar("encode", "shards", 4, "units") as bar:
        clock[0] += 1
        bar.advance()
        clock[0] += 0.1  # too soon for another
        bar.advance()
    drawn = screen.getvalue()
    assert drawn == ("\r\x1b[Kencode    shards: 1/4 units, 1.0/s, 3.0 s to go\r\x1b[K"
                     "encode    shards: 2/4 units in 1.1 s\n")


def test_nothing_is_claimed_of_what_failed(clock, capsys):
    with pytest.raises(ValueError, match="x"), ProgressBar("encode", "shards", 4, "units"):
        raise ValueError("x")
    assert capsys.readouterr().out == ""
    say("train", "hello")
    assert capsys.readouterr().out == "train     hello\n"


@pytest.mark.parametrize("text", ["\x1b[31mred", "\x1b]0;title\x07", "\x9b2J", "a\rb", "\u202ertl", "\udce9", "\x00",
                                  "\u2028"])
def test_no_text_commands_a_terminal(text, capsys):
    """Names of files, documents and causes may be somebody else's."""
    say("shard", f"read {text}.txt")
    echo(text, file=sys.stderr)
    shown = capsys.readouterr()
    assert text not in shown.out + shown.err and "\\" in shown.out and "\\" in shown.err
    echo("größer 漢字 \u200d\tx\n")
    assert capsys.readouterr().out == "größer 漢字 \u200d\tx\n\n"
