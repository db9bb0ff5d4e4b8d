"""Weights by our names from every form: whole and in rectangles, and what is no model refused in a sentence."""

import json
import random

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from drover.model.config import ModelConfig
from drover.pipeline.core.errors import UserError
from drover.pipeline.formats.weights import load_model, open_weights
from tests.formats.cutting import read_alike, write_checkpoint
from tests.formats.exporting import write_model
from tests.refusal import refused, table
from tests.tiny_models import as_checkpoint, opinionated

SHAPES = {
    "untied": ModelConfig(dim=48, layers=2, heads=6, kv_heads=2, ffn_dim=80, vocab_size=90, context_length=64),
    "tied": ModelConfig(dim=32, layers=1, heads=4, kv_heads=4, vocab_size=70, tied_embeddings=True),
}


@pytest.fixture(params=SHAPES)
def model(request):
    return opinionated(SHAPES[request.param])


def as_huggingface(folder, model, **options):
    folder.mkdir(parents=True)
    write_model(folder, model, **options)
    return folder


FORMS = {
    "one file": as_huggingface,
    "many files": lambda folder, model: as_huggingface(folder, model, max_shard_bytes=9000),
    "checkpoint": as_checkpoint,
}


@pytest.mark.parametrize("form", FORMS)
def test_every_rectangle_is_that_of_the_network_which_computes_the_same(form, model, tmp_path):
    tokens = torch.randint(0, 60, (2, 17), generator=torch.Generator().manual_seed(0))
    with open_weights(FORMS[form](tmp_path / "x", model)) as weights:
        assert weights.config.model_copy(update={"ffn_dim": None}) == \
            model.config.model_copy(update={"ffn_dim": None}) and weights.config.hidden == model.config.hidden
        read_alike(weights, model, random.Random(form))
        refused(ValueError, "does not lie in", weights.read, "norm.weight", (1,), (model.config.dim,))
        loaded = load_model(weights, torch.device("cpu"), torch.float32)
    assert torch.equal(loaded(tokens), model.eval()(tokens))
    assert (loaded.output.weight is loaded.tok_embeddings.weight) == model.config.tied_embeddings


@pytest.fixture
def folder(tmp_path):
    """One in Hugging Face's form, with its weights in one file and no index, as older ones have it."""
    folder = as_huggingface(tmp_path / "x", opinionated(SHAPES["untied"]))
    (folder / "model-00001-of-00001.safetensors").rename(folder / "model.safetensors")
    (folder / "model.safetensors.index.json").unlink()
    return folder


def reconfigured(folder, changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({key: value for key, value in (config | changes).items()
                                                    if value != "removed"}))


@pytest.mark.parametrize(("change", "message"), [
    (lambda tensors: tensors.pop("model.norm.weight"), "model.norm.weight is missing"),
    (lambda tensors: tensors.update(extra=torch.ones(1)), "extra is no parameter of a Llama of 2 layers"),
    (lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"].to(torch.int8)}),
     "model.norm.weight holds whole numbers .torch.int8.: quantised weights are not read")])
def test_tensors_that_do_not_fit_are_said(folder, change, message):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    refused(UserError, message, open_weights, folder)


def test_missing_files_and_paths_that_lead_out_are_refused(folder):
    """Files that are cut off or changed anywhere are tried by tests/test_fuzz.py."""
    (folder / "model.safetensors").unlink()
    refused(UserError, "is missing", open_weights, folder)
    for index, message in (('{"weight_map": {"a": "../../etc/passwd"}}', "is no path inside the folder"),
                        ('{"weight_map": {"a": "b/c"}}', "not a file in its folder")):
        (folder / "model.safetensors.index.json").write_text(index)
        refused(UserError, message, open_weights, folder)
    (folder / "config.json").write_text("{")
    refused(UserError, "does not describe a Llama", open_weights, folder)


@pytest.mark.parametrize(("changes", "message"), table(r"""
    {vocab_size: 91} -> is \[90, 48\]; by its config.json it is \[91, 48\]
    {num_hidden_layers: 3} -> layers.2.* is missing
    {hidden_size: removed} -> it has no 'hidden_size'
    {model_type: qwen3} -> model_type = 'qwen3'; only 'llama' can be read
    {attention_bias: true} -> attention_bias = True
    {hidden_act: gelu} -> hidden_act = 'gelu'
    {quantization_config: {bits: 4}} -> quantization_config
    {rope_parameters: null, rope_scaling: {type: linear, factor: 2.0}} -> type = 'linear'
    {rope_parameters: {rope_type: default, partial_rotary_factor: 0.25}} -> partial_rotary_factor = 0.25
    {num_attention_heads: 5} -> cannot be built""", yaml.safe_load))
def test_what_the_config_says_of_another_network_is_refused_by_the_key(changes, message, folder):
    reconfigured(folder, changes)
    assert "\n" not in refused(UserError, message, open_weights, folder)


def test_a_folder_of_something_else_names_what_is_known(tmp_path):
    refused(UserError, r"has no weights .* a training checkpoint .* a Hugging Face folder", open_weights, tmp_path)
    refused(UserError, "is no folder", open_weights, tmp_path / "none")


def with_head(form, folder, model, head):
    """A folder of a tied model that also stores an output matrix."""
    FORMS[form](folder, model)
    if form == "checkpoint":
        write_checkpoint(folder, {f"model.{name}": each.detach() for name, each in model.named_parameters()}
                         | {"model.output.weight": head})
    else:  # in a file of its own
        save_file({"lm_head.weight": head}, folder / "model-head.safetensors")
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        index["weight_map"]["lm_head.weight"] = "model-head.safetensors"
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_a_stored_output_matrix_of_a_tied_model_must_be_the_embedding(form, tmp_path):
    """transformers computes with the stored one: without it, the model would be another."""
    model = opinionated(SHAPES["tied"])
    embedding = model.tok_embeddings.weight.detach()
    with open_weights(with_head(form, tmp_path / "equal", model, embedding.clone())) as weights:
        assert "output.weight" not in weights.shapes
    other = embedding.clone()
    other[-1, -1] += 1e-6
    folder = with_head(form, tmp_path / "other", model, other)
    keys = ("tied_embeddings is true", "output") if form == "checkpoint" else ("tie_word_embeddings is true", "lm_head")
    message = refused(UserError, f"{keys[0]}.*{keys[1]}.weight has other values", open_weights, folder)
    assert f"set {keys[0].removesuffix(' is true')} to false" in message
    if form != "checkpoint":  # the advice
        reconfigured(folder, {"tie_word_embeddings": False})
        with open_weights(folder) as weights:
            assert torch.equal(weights.read("output.weight"), other)
    refused(UserError, rf"{keys[1]}.weight is \[71, 32\]; by .* it is \[70, 32\]", open_weights,
            with_head(form, tmp_path / "larger", model, torch.ones(71, 32)))


def test_what_transformers_would_compute_with_is_not_dropped(folder, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    (folder / "adapter_config.json").write_text("{}")
    refused(UserError, "adapter_config.json says that an adapter belongs to the weights", open_weights, folder)
    (folder / "adapter_config.json").unlink()
    save_file({name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, folder / "old.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "old.safetensors"}}))
    with open_weights(folder) as weights:  # the single file, as in transformers
        assert torch.equal(weights.read("norm.weight"), tensors["model.norm.weight"])
    (folder / "model.safetensors").rename(folder / "new.safetensors")
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "old.safetensors", "x": "new.safetensors"}}))
    refused(UserError, r"is both in .*new.safetensors and in .*old.safetensors", open_weights, folder)
