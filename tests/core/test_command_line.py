"""One parser, one meaning of RUN, one way to say what is wrong."""

import io
import shlex
from pathlib import Path

import pytest

from drover.pipeline.core.command_line import (
    Program,
    add_run,
    complain,
    find_model,
    in_colour,
)
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


def test_errors_are_red_on_a_terminal_that_is_not_asked_to_do_without(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stderr", screen := Terminal())
    complain("a\x1b[2J")
    assert screen.getvalue() == "\x1b[31merror:\x1b[0m a\\x1b[2J\n" and not in_colour(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not in_colour(screen)


@pytest.mark.parametrize("arguments", ["demo", "runs/demo", "--run demo", "--run ./runs/demo/"])
def test_a_run_is_given_by_name_or_folder(arguments, tmp_path, monkeypatch, capsys):
    arguments = arguments.split()
    monkeypatch.chdir(tmp_path)
    Path("runs/demo").mkdir(parents=True)
    result = Program("p", "", add_run, lambda options: print(options.run))
    assert result(arguments) == 2 and "There is no run" in capsys.readouterr().err
    Path("runs/demo/config.yaml").touch()
    assert result(arguments) == 0 and capsys.readouterr().out == "runs/demo\n"
    assert find_model("demo") == Path("runs/demo") and find_model("hf/demo") == Path("hf/demo")
    Path("demo").mkdir()  # the text that the run was made of
    assert find_model("demo") == Path("runs/demo")
    Path("demo/config.json").touch()
    assert find_model("demo") == Path("demo")
