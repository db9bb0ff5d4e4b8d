"""What a person sees of a program: times, progress on a terminal and in a log, one parser, one meaning of RUN, one way
to say what is wrong."""

import io
import re
import shlex
import sys
from pathlib import Path

import pytest

from drover.pipeline.core import console
from drover.pipeline.core.console import (
    Program,
    ProgressBar,
    add_run,
    complain,
    draw,
    duration,
    echo,
    find_model,
    find_run,
    say,
)
from drover.pipeline.core.console import table as table_of
from drover.pipeline.core.errors import UserError
from tests.refusal import refused, table


class Terminal(io.StringIO):
    def isatty(self):
        return True


def program(work=lambda options: 0, **about):
    def options(parser):
        parser.add_argument("words", nargs="*")
        parser.add_argument("--steps", type=int)
        parser.add_argument("--stage")
    return Program("python -m p", "What it does.", options, work, **about)


@pytest.mark.parametrize(("arguments", "message"), table("""
    --stpes 3 -> there is no option --stpes; did you mean '--steps'?
    --stpes=3 --q -> did you mean '--steps'? there is no option --q; python -m p --help shows all.
    --steps x -> argument --steps: invalid int value: 'x'""", shlex.split))
def test_a_wrong_option_is_answered_with_the_one_that_was_meant(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        program()(arguments)
    assert ended.value.code == 2 and capsys.readouterr().err.rstrip() .endswith(message)


def test_what_only_looks_like_an_option_is_a_word():
    seen = []
    assert program(lambda options: seen.append(options.words), mixed=True)(
        ["a=1", "--ste=3", "b=2", "--", "--c"]) == 0
    assert seen[0][:2] == ["a=1", "b=2"] and seen[0][-1] == "--c"


def failing(error):
    def work(options):
        raise error
    return program(work, interrupted="kept")


@pytest.mark.parametrize(("error", "status", "message"), [
    (UserError("There is no cable."), 2, "error: There is no cable.\n"),
    (FileNotFoundError(2, "No usable temporary directory found in ['/tmp', '/var/tmp']"), 2,
     "error: The disk, quota or file size limit is exhausted: [Errno 2] No usable temporary directory"),
    (OSError(28, "No space left on device"), 2, "error: The disk, quota or file size limit is exhausted"),
    (KeyboardInterrupt(), 130, "\nkept\n")])
def test_what_a_user_can_mend_is_said_in_one_way(error, status, message, capsys):
    assert failing(error)([]) == status
    assert capsys.readouterr().err.startswith(message)


def test_a_defect_keeps_its_traceback():
    refused(ValueError, "ours", failing(ValueError("ours")), [])


UNADORNED = ("NO_COLOR=1", "TERM=dumb")


@pytest.fixture(autouse=True)
def colours(monkeypatch):
    """The terminal has colours, whatever this process's is."""
    for name in ("NO_COLOR", "COLORTERM", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")  # must put none into pipes


def test_errors_are_red_on_a_terminal_that_is_not_asked_to_do_without(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr", screen := Terminal())
    complain("a\x1b[2J [red]x")
    say("shard", "warning: less")
    assert screen.getvalue() == "\x1b[1;31merror:\x1b[0m a\\x1b[2J [red]x\n"
    say("shard", "warning: an error: none")
    assert "\x1b" not in capsys.readouterr().out
    for name in UNADORNED:
        with monkeypatch.context() as one:
            one.setenv(*name.split("="))
            one.setattr("sys.stderr", screen := Terminal())
            complain("a")
            assert screen.getvalue() == "error: a\n"


@pytest.mark.parametrize("arguments", ["demo", "runs/demo", "--run demo", "--run ./runs/demo/"])
def test_a_run_is_given_by_name_or_folder(arguments, tmp_path, monkeypatch, capsys):
    arguments = arguments.split()
    monkeypatch.chdir(tmp_path)
    Path("runs/demo").mkdir(parents=True)
    result = Program("p", "", add_run, lambda options: print(options.run))
    assert result(arguments) == 2 and "There is no run" in capsys.readouterr().err
    Path("runs/demo/config.yaml").touch()
    assert result(arguments) == 0 and capsys.readouterr().out == "runs/demo\n"
    refused(UserError, r"no run dmeo; did you mean 'demo'\? The runs in runs are: demo\.$", find_run, "dmeo")
    refused(UserError, "did you mean 'demo'.* Weights are also read from", find_model, "demos")
    assert find_model("demo") == Path("runs/demo") and find_model("hf/demo") == Path("hf/demo")
    Path("demo").mkdir()  # the text that the run was made of
    assert find_model("demo") == Path("runs/demo")
    Path("demo/config.json").touch()
    assert find_model("demo") == Path("demo")


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
        "encode    shards: 23/40 units  1 m 08 s to go  0.2/s", "encode    shards: 24/40 units in 16 s"]


@pytest.mark.parametrize(("columns", "bar", "figures"), [
    (20, "", "shards: 1/"), (40, "", "shards: 1/4 [b]units"), (60, "", "shards: 1/4 [b]units  3.0 s to go  1.0/s"),
    (71, "━━╸━━━━━━━  ", "shards: 1/4 [b]units  3.0 s to go  1.0/s"),
    (200, "━━━━━╺━━━━━━━━━━━━━━  ", "shards: 1/4 [b]units  3.0 s to go  1.0/s")])
def test_on_a_terminal_one_line_is_drawn_again_fits_and_is_cleared(columns, bar, figures, clock, monkeypatch):
    """What is printed meanwhile stays whole, above it. The cursor is never hidden: a kill would leave it so."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stdout", screen := Terminal())
    with ProgressBar("encode", "shards", 4, "[b]units") as progress:
        clock[0] += 1
        progress.advance()
        say("encode", text := "[red] ends")
        clock[0] += 0.1  # too soon for another
        progress.advance()
    assert "\x1b[?25" not in screen.getvalue() and sys.stdout is screen
    drawn = re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue()).split("\r")
    line = f"\x1b[2Kencode    {bar}{figures}"
    assert len(line) - 4 <= columns and drawn[1:4] == [line, f"\x1b[2Kencode    {text}\n{line[4:]}", "\x1b[2K\n"]
    assert " ".join(drawn[4].split()) == "\x1b[1A\x1b[2Kencode shards: 2/4 [b]units in 1.1 s"


def test_lines_are_folded_below_their_text_on_a_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setattr(sys, "stdout", screen := Terminal())
    draw("batch     1,024 tokens a step and more\x07", "", f"! it ended: {'x' * 40}",
         "  a setting whose meaning is long")
    assert screen.getvalue().splitlines() == [
        "batch     1,024 tokens a step", "          and more\\x07", "", "! it ended:", f"  {'x' * 40}",
        "  a setting whose meaning is", "  long"]


def test_tables_take_names_literally_and_fit_a_terminal_but_not_a_pipe(monkeypatch, capsys):
    rows = [["name", "count"], ["a long [red] name \x1b[2J " + "x" * 80, "1,000"], ["漢字", "2"]]
    draw(table_of(rows, ["count"]))
    assert [len(line) for line in capsys.readouterr().out.splitlines()] == [113, 113, 111]
    monkeypatch.setattr(sys, "stdout", screen := Terminal())
    draw(table_of(rows, ["count"], ["red", ""]))
    lines = re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue()).splitlines()
    assert max(map(len, lines)) <= 80 and re.match(r"a long \[red\] name \\x1b\[2J", lines[1])
    monkeypatch.setattr(sys, "stdout", pipe := io.StringIO())
    monkeypatch.setenv("COLUMNS", "80")
    draw(table_of(rows, ["count"]))
    assert pipe.getvalue().splitlines() == [*map(str.rstrip, lines)]


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
