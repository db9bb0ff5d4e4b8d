"""The command `drover`: every subcommand, and what a shell completes."""

import shlex
import subprocess
from functools import partial

import pytest

from drover.__main__ import COMMANDS, completion, main
from tests.conftest import run_python
from tests.refusal import refused, table
from tests.test_house import HEAVY, imported_by

NAMED = tuple(COMMANDS)


@pytest.mark.parametrize(("arguments", "expected", "absent"), [
    (["--help"], [f"\n  {name} " for name in NAMED], {"pydantic", "yaml", "drover.tools"}),
    (["completion", "bash"], ["_drover() {"], set()), (["completion", "zsh"], ["autoload"], set())])
def test_help_and_completion_import_little(arguments, expected, absent, tmp_path):
    status, text, modules = imported_by("-m", "drover", *arguments, cwd=tmp_path)
    assert status == 0 and all(part in text for part in expected)
    assert not modules & (HEAVY | absent)


@pytest.mark.parametrize("name", NAMED)
def test_every_command_has_help_and_refuses_a_wrong_option(name, capsys):
    refused(SystemExit, "^0$", main, [name, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: drover {name}")
    refused(SystemExit, "^2$", main, [name, "--hlep"])
    assert capsys.readouterr().err == "error: there is no option --hlep; did you mean '--help'?\n"


@pytest.mark.parametrize(("arguments",), table("""
    logs nope train
    stop nope
    cancel nope
    compare nope hf --validation nope""", shlex.split))
def test_a_run_that_is_not_there_is_told_in_one_way(arguments, tmp_path, monkeypatch, capsys):
    """Other programs: tests/test_house.py::REFUSED."""
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert capsys.readouterr().err == "error: There is no run nope. The runs in runs are: none.\n"


@pytest.mark.parametrize(("arguments", "message"), table("""
    trian -> error: there is no command trian; did you mean 'trace'?
    qq -> error: there is no command qq; drover --help shows all.
    completion fish -> error: drover completion takes bash or zsh.""", shlex.split))
def test_a_wrong_command_is_answered(arguments, message, capsys):
    assert main(arguments) == 2 and capsys.readouterr().err == f"{message}\n"


@pytest.mark.parametrize(("words", "offered"), table("""
    tr -> trace
    audit --j -> --json
    completion '' -> bash zsh
    status de -> demo
    chat '' -> demo trial
    init '' -> nothing""", shlex.split))
def test_bash_completes_commands_options_and_runs(words, offered, tmp_path):
    for name in ("demo", "trial"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    given = shlex.join(["drover", *words])
    script = (f"{completion('bash')}\nCOMP_WORDS=({given}); COMP_CWORD={len(words)}; _drover\n"
              'printf "%s\\n" "${COMPREPLY[@]}"')
    complete = partial(subprocess.check_output, ["bash", "-c", script], cwd=tmp_path, text=True)
    assert (" ".join(sorted(complete().split())) or "nothing") == offered
    (tmp_path / "runs" / "$(touch executed)").mkdir(parents=True)
    complete()
    assert not (tmp_path / "executed").exists()


def test_code_that_imports_a_second_copy_is_refused():
    """As plugins did before everything was imported from drover."""
    for name in ("model", "pipeline", "launch", "tools"):
        output = run_python("-c", f"import {name}", check=False).stderr
        assert f"imported as drover.{name}" in output.splitlines()[-1]
