"""docs/generation.md is true: its commands and its Python run on a small model, in their order."""

import argparse
import ast
import shlex

import pytest

from drover.__main__ import main
from drover.pipeline.tokenization.conversion import byte_tokenizer
from drover.tools.chat import add_options
from tests.conftest import REPOSITORY
from tests.pages import commands, run_program
from tests.tiny_models import for_tokenizer, write_huggingface, write_run

PAGE = (REPOSITORY / "docs/generation.md").read_text()
COMMANDS = commands("generation", needs=[])
TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a small run in the place of the demo's."""
    folder = tmp_path_factory.mktemp("home")
    model = for_tokenizer(TOKENIZER)
    write_huggingface(write_run(folder / "runs/demo", {5: model}, TOKENIZER) / "convert/hf", model, TOKENIZER)
    return folder


@pytest.mark.slow
def test_the_commands_of_the_terminal(home, monkeypatch, capsys):
    monkeypatch.chdir(home)
    chats = [command for command in COMMANDS if command.startswith("drover chat")]
    assert chats
    for command in chats:
        assert main(shlex.split(command)[1:]) == 0
        assert capsys.readouterr().out.startswith("def main():")


@pytest.mark.slow
def test_the_python_of_the_page(home, monkeypatch, capsys):
    monkeypatch.chdir(home)
    run_program("generation")
    texts = ast.literal_eval(capsys.readouterr().out)
    assert len(texts) == 2 and all(texts)


def test_every_option_is_on_the_page():
    parser = argparse.ArgumentParser(add_help=False)
    add_options(parser)
    options = {option for action in parser._actions for option in action.option_strings}
    assert options - {"--plugin"} == {option for option in options if option in PAGE}
