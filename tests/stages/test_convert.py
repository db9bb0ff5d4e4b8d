"""Conversion: what transformers loads computes what was trained, in both export types, and nothing half counts."""

from __future__ import annotations

import json

import pytest
import torch

from model.llama import Llama
from pipeline.manifest import read_manifest
from pipeline.training.checkpoint import load_weights
from tests.conftest import run_stage, write_config


@pytest.fixture(scope="module")
def trained(tmp_path_factory, encoded):
    """Config of a trained miniature run that reuses the encoded one."""
    folder = tmp_path_factory.mktemp("trained")
    config = write_config(folder, encoded.parent, reuse=str(encoded.parent / "runs/mini"),
                          shard={"sources": json.loads(json.dumps(_sources(encoded)))})
    run_stage("train", config, ranks=2)
    return config


def _sources(config):
    import yaml
    return yaml.safe_load(config.read_text())["shard"]["sources"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_export_computes_what_was_trained(trained, dtype):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    run_stage("convert", trained, f"convert.dtype={dtype}", "--force")
    folder = trained.parent / "runs/mini"
    exported = AutoModelForCausalLM.from_pretrained(folder / "convert/hf", dtype=torch.float32).eval()
    counts = read_manifest(folder / "train").counts
    weights = load_weights(folder / "train" / counts["checkpoint"])
    from pipeline.config.loading import load_config
    config = load_config(folder / "config.yaml").model.model_copy(update={"vocab_size": counts["vocab_size"]})
    model = Llama(config)
    model.load_state_dict(weights)
    ids = torch.randint(0, counts["vocab_size"], (2, 60), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        difference = (model(ids) - exported(ids).logits).abs().max()
    assert difference < (1e-5 if dtype == "float32" else 0.1)
    assert read_manifest(folder / "convert").counts["largest_logit_difference"] < 1e-5
    tokenizer = AutoTokenizer.from_pretrained(folder / "convert/hf")
    assert tokenizer("def f():").input_ids[0] == exported.config.bos_token_id


def test_weights_that_do_not_fit_are_not_committed(trained, monkeypatch, capsys):
    """A layout mistake (two matrices swapped) must be found by the stage itself."""
    import pipeline.formats.huggingface as huggingface
    from pipeline.convert import convert
    from pipeline.entry import stage_main
    original = huggingface.write_folder

    def swapped(path, state, *arguments, **options):
        names = ["layers.0.feed_forward.w1.weight", "layers.0.feed_forward.w3.weight"]
        state = {**state, names[0]: state[names[1]], names[1]: state[names[0]]}
        return original(path, state, *arguments, **options)
    monkeypatch.setattr(huggingface, "write_folder", swapped)
    assert stage_main("convert", convert, ["--config", str(trained), "name=mini", "--force"]) == 2
    assert "does not compute what the training model does" in capsys.readouterr().err
    assert read_manifest(trained.parent / "runs/mini/convert") is None
    monkeypatch.undo()
    run_stage("convert", trained)


def test_a_missing_checkpoint_file_is_made_again_by_train(trained):
    folder = trained.parent / "runs/mini/train"
    counts = read_manifest(folder).counts
    victim = next((folder / counts["checkpoint"]).glob("*.distcp"))
    victim.unlink()
    result = run_stage("train", trained, ranks=2)
    assert "making it again" in result.stdout and "is damaged" in result.stdout
    assert victim.is_file() and read_manifest(folder).counts["loss"] == counts["loss"]
