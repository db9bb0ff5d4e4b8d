"""The command `drover`: every subcommand, and what a shell completes."""

import ast
import io
import re
import shlex
import shutil
import subprocess
from contextlib import redirect_stdout
from functools import partial

import pytest

from drover.__main__ import COMMANDS, main
from tests.conftest import REPOSITORY, run_python
from tests.refusal import refused, table
from tests.test_house import HEAVY, imported_by

NAMED = tuple(COMMANDS)


@pytest.mark.parametrize(("arguments", "expected", "absent"), [
    (["--help"], [f"\n  {name} " for name in NAMED], {"pydantic", "yaml", "drover.tools"}),
    (["completion", "zsh"], ["autoload", "_drover() {"], set())])
def test_help_and_completion_import_little(arguments, expected, absent, tmp_path):
    status, text, modules = imported_by("-m", "drover", *arguments, cwd=tmp_path)
    assert status == 0 and all(part in text for part in expected)
    assert not modules & (HEAVY | absent)


@pytest.mark.parametrize("name", NAMED)
def test_every_command_has_help_and_refuses_a_wrong_option(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    refused(SystemExit, "^0$", main, [name, "--help"])
    output = capsys.readouterr().out
    assert output.startswith(f"usage: drover {name}") and max(map(len, output.split("\n"))) <= 80
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
    resume mine -> error: there is no command resume; did you mean 'run'?
    qq -> error: there is no command qq; drover --help shows all.
    completion2 -> error: there is no command completion2; did you mean 'completion'?""", shlex.split))
def test_a_wrong_command_is_answered(arguments, message, capsys):
    assert main(arguments) == 2 and capsys.readouterr().err == f"{message}\n"


SHELLS = {
    "bash": ('{script}\nCOMP_WORDS=({words}); COMP_CWORD={number}; _drover; printf "%s\\n" "${{COMPREPLY[@]}}"'),
    "zsh": ("autoload -U compinit; compinit -u -D\n{script}\nCOMP_WORDS=({words}); COMP_CWORD={number}; PREFIX={last}; "
            "compgen -F _drover"),
    "fish": "{script}\ncomplete -C {line}"}
"""What each shell does when TAB is pressed. zsh then drops what does not begin with the word."""


@pytest.fixture(scope="module", params=SHELLS)
def shell(request):
    """A shell that is installed, and the script that it reads."""
    if not shutil.which(request.param):
        pytest.skip(f"{request.param} is not installed")
    with redirect_stdout(io.StringIO()) as script:
        assert main(["completion", request.param]) == 0
    return request.param, script.getvalue()


@pytest.mark.parametrize(("words", "offered"), table("""
    tr -> trace
    audit --j -> --json
    completion '' -> bash fish zsh
    status de -> demo
    chat '' -> demo trial
    logs demo tok -> tokenizer
    run --stage '' -> all convert encode evaluate report shard tokenizer train
    run --cluster s -> slurm
    run con -> configs/ convert.average= convert.copy_to= convert.dtype= convert.max_shard_mb=
    run configs/ -> configs/mine.yaml
    run --force train.batch -> train.batch_tokens=
    explain train.batch -> train.batch_tokens train.batch_tokens=
    compare demo --dtype b -> bfloat16
    compare demo --validation t -> trial""", shlex.split))
def test_shells_complete_what_a_command_takes(shell, words, offered, tmp_path):
    for name in ("runs/demo", "runs/trial", "configs"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "configs/mine.yaml").touch()
    program, script = shell
    line = shlex.join(["drover", *words]).removesuffix("''")
    typed = SHELLS[program].format(script=script, words=shlex.join(["drover", *words]), number=len(words),
                                   last=shlex.quote(words[-1]), line=shlex.quote(line))
    complete = partial(subprocess.check_output, [program, "-c", typed], cwd=tmp_path, text=True)
    found = [line.partition("\t")[0].strip() for line in complete().splitlines()]
    assert " ".join(sorted(one for one in found if one.startswith(words[-1]))) == offered
    (tmp_path / "runs" / "$(touch executed)").mkdir(parents=True)
    complete()
    assert not (tmp_path / "executed").exists()


SCRIPTS = ("launch/submit.py", "launch/status.py", "pipeline/train.py")


@pytest.mark.parametrize("program", [("-m", "drover", "run"), ("-m", "drover.pipeline.encode"), *zip(SCRIPTS)])
def test_a_missing_package_is_named_without_a_traceback(program):
    """-S hides installed packages, as for a Python without an install."""
    message, advice = run_python("-S", *program, check=False).stderr.splitlines()
    assert re.fullmatch(r"error: the package \w+ is not installed for /.*python.*\.", message)
    assert advice.startswith("In the checkout: make setup, then source .venv/bin/activate")
    assert "Traceback" in run_python("-c", "import drover, absent", check=False).stderr, "it is not Drover's import"


def test_an_old_python_is_named_without_a_traceback():
    """What it reads before the check has no newer syntax."""
    for path in (*SCRIPTS, "drover/__init__.py"):
        ast.parse((REPOSITORY / path).read_text(), feature_version=(3, 8))
    result = run_python("-c", "import sys; sys.version_info = (3, 10, 1); import drover", check=False)
    message, advice = result.stderr.splitlines()
    assert result.returncode == 2 and message.startswith("error: Drover needs Python 3.11 or newer, and /")
    assert advice.startswith("In the checkout: make setup PYTHON=")


def test_code_that_imports_a_second_copy_is_refused():
    """As plugins did before everything was imported from drover."""
    for name in ("model", "pipeline", "launch", "tools"):
        output = run_python("-c", f"import {name}", check=False).stderr
        assert f"imported as drover.{name}" in output.splitlines()[-1]
