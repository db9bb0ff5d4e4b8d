"""Commands of docs/evaluation.md on small models; the stage is in tests/stages/test_evaluate.py, and the scores while
training are in test_watch.py there."""

import shlex

import pytest

from drover.__main__ import main
from drover.pipeline.config.loading import load_config
from tests.conftest import REPOSITORY
from tests.pages import commands
from tests.tiny_models import for_tokenizer
from tests.tools.test_compare import STEPS, TOKENIZER, write_trained

COMMANDS = commands("evaluation")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder that looks like the checkout, with two runs."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "configs").symlink_to(REPOSITORY / "configs")
    for name, seed in (("demo", 0), ("trial", 100)):
        write_trained(folder / "runs" / name, {step: for_tokenizer(TOKENIZER, seed=seed + step) for step in STEPS})
    return folder


def test_the_page_has_the_promised_commands():
    assert [" ".join(command.split()[:2]) for command in COMMANDS] == [
        "drover compare", "drover compare", "drover evaluate", "drover evaluate", "drover run"]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS[:2])
def test_every_command_runs(home, command, monkeypatch, capsys):
    monkeypatch.chdir(home)
    program, *arguments = (str(result) for word in shlex.split(command) for result in sorted(home.glob(word)) or [word])
    assert program == "drover" and main(arguments) == 0
    shown = capsys.readouterr().out
    assert "python_line" in shown and "validation text of demo" in shown


def test_the_override_of_the_stage_is_one():
    overrides = [word for word in COMMANDS[-1].split() if "=" in word]
    assert load_config(REPOSITORY / "configs/demo.yaml", overrides).evaluate.contamination
