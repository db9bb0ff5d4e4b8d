"""docs/weights.md does what it says: its commands and its Python, in order, on a miniature run and a miniature 1B."""

from __future__ import annotations

import json
import re
import shlex

import pytest
import torch

from model.config import ModelConfig
from model.llama import Llama, initialise
from pipeline.formats.weights import open_weights
from tests.conftest import REPOSITORY, write_config
from tests.formats.cutting import write_checkpoint
from tests.formats.exporting import write_model
from tools.weights import main

PAGE = (REPOSITORY / "docs/weights.md").read_text()
COMMANDS = [line.split("  #")[0].split(" # ")[0].strip() for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
            for line in block.splitlines()]
[SNIPPET] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SHAPE = ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=48, vocab_size=128, context_length=64)


@pytest.fixture
def home(tmp_path, corpus, monkeypatch):
    """A folder with what the page names: a run and a Hugging Face folder."""
    monkeypatch.chdir(tmp_path)
    model = Llama(SHAPE)
    initialise(model, SHAPE, seed=1)
    (tmp_path / "Llama-3.2-1B").mkdir()
    write_model(tmp_path / "Llama-3.2-1B", model, dtype=torch.bfloat16, bos_id=1, eos_id=2)
    checkpoint = tmp_path / "runs/demo/train/checkpoints/step-00000003"
    records = write_checkpoint(checkpoint, {f"model.{name}": each.detach() for name, each in model.named_parameters()})
    (checkpoint / "COMPLETE.json").write_text(json.dumps({
        "format": 2, "progress": {}, "files": records, "config": {"model": SHAPE.model_dump(mode="json")}}))
    write_config(tmp_path / "runs/demo", corpus).rename(tmp_path / "runs/demo/config.yaml")
    return tmp_path


def test_every_command_of_the_page_works(home, capsys):
    assert len(COMMANDS) >= 4
    for command in COMMANDS:
        assert command.startswith("python -m tools.weights ")
        assert main(shlex.split(command)[3:]) == 0, capsys.readouterr().err
    with open_weights(home / "demo-back") as weights, open_weights(home / "runs/demo") as run:
        assert weights.config.context_length == 64
        assert all(torch.equal(weights.read(name), run.read(name)) for name in run.names())
    exec(compile(SNIPPET, "docs/weights.md", "exec"), {})  # noqa: S102 - the page is ours
    assert capsys.readouterr().out.rstrip().endswith("2 torch.float32")


def test_the_page_names_every_form_and_option():
    for word in ("--from", "--to", "--format hf", "--format meta", "--format drover", "--dtype", "--shard-gb",
                 "--parts", "weights.json", "params.json", "tokenizer.model"):
        assert word in PAGE
