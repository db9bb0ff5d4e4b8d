"""docs/weights.md does what it says: its commands and its Python, in order, on a miniature run."""

import shlex

import pytest
import torch

from drover.__main__ import main
from drover.pipeline.formats.weights import open_weights
from tests.pages import commands, run_program
from tests.tiny_models import TOKENIZER_OF_BYTES, for_tokenizer, write_run

COMMANDS = commands("weights")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder with what the page names: a run."""
    monkeypatch.chdir(tmp_path)
    model = for_tokenizer(TOKENIZER_OF_BYTES, context_length=64)
    write_run(tmp_path / "runs/demo", {3: model}, TOKENIZER_OF_BYTES)
    return tmp_path


def test_every_command_of_the_page_works(home, capsys):
    assert len(COMMANDS) >= 3
    for command in COMMANDS:
        assert main(shlex.split(command)[1:]) == 0, capsys.readouterr().err
    with open_weights(home / "demo-back") as weights, open_weights(home / "runs/demo") as run:
        assert weights.config.context_length == 64
        assert all(torch.equal(weights.read(name), run.read(name)) for name in run.shapes)
    run_program("weights")
    assert capsys.readouterr().out.rstrip().endswith("2 torch.float32")
