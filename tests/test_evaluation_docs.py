"""Every command of docs/evaluation.md on small models, in order; the stage is in tests/stages/test_evaluate.py."""

import shlex

import pytest

from drover.__main__ import main
from drover.pipeline.config.loading import load_config
from drover.tools.lm_eval import main as lm_eval_command
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
    assert [command.partition(" --")[0] for command in COMMANDS] == [
        "python -m drover.tools.lm_eval", "drover compare", "drover compare", "drover run"]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS[:3])
def test_every_command_runs(home, command, monkeypatch, capsys):
    import lm_eval.tasks
    original = lm_eval.tasks.TaskManager  # without the harness's own tasks, whose thousands of files take long to read
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", lambda **more: original(**{**more, "include_defaults": False}))
    monkeypatch.chdir(home)
    program, *arguments = (str(found) for word in shlex.split(command) for found in sorted(home.glob(word)) or [word])
    assert (main(arguments) if program == "drover" else lm_eval_command(arguments[2:])) == 0
    shown = capsys.readouterr().out
    assert "python_line" in shown
    if program == "drover":
        assert "validation text of demo" in shown


def test_the_override_of_the_stage_is_one():
    overrides = [word for word in COMMANDS[-1].split() if "=" in word]
    assert load_config(REPOSITORY / "configs/demo.yaml", overrides).evaluate.contamination
