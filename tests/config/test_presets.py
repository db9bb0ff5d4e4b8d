"""`model.preset`: a published shape, over which the other keys of the section are laid."""

import re

import pytest
import torch

from drover.model.huggingface import config_to_json
from drover.model.presets import PRESETS
from drover.pipeline.config.loading import load_config
from drover.pipeline.core.files import write_json
from tests.config.files import refusal
from tests.conftest import REPOSITORY
from tests.tiny_models import TOKENIZER_OF_BYTES, for_tokenizer, write_huggingface, write_run


def shape(path, *overrides):
    return load_config(path, overrides, check=False).model


@pytest.mark.parametrize("name", ["llama3.1_8b", "llama2_7b", "ladder_15m"])
def test_a_preset_is_the_published_shape_over_which_other_keys_are_laid(written, name):
    published = PRESETS[name].model_copy(update={"ffn_dim": PRESETS[name].hidden, "ffn_dim_multiplier": None})
    for keys, changes in (("", {}), (", layers: 2, vocab_size: null", {"layers": 2, "vocab_size": None})):
        result = shape(written(f"model: {{preset: {name}{keys}}}"))
        assert result.model_copy(update={"multiple_of": published.multiple_of}) == published.model_copy(update=changes)


def test_the_width_may_be_told_by_the_rule(written):
    result = shape(written("model: {preset: llama3_8b, ffn_dim_multiplier: 1.0}"))
    assert result.problems() == [] and result.hidden == 11264


def test_who_names_a_preset_means_all_of_it(written):
    written("model: {dim: 64, heads: 2, kv_heads: 1, layers: 2}", "small.yaml")
    child = written("base: small.yaml\nmodel: {preset: llama3_8b}")
    assert shape(child).parameter_count == PRESETS["llama3_8b"].parameter_count
    written("model: {preset: llama3_8b}", "large.yaml")
    assert shape(written("base: [small.yaml, large.yaml]")) == shape(child)
    other = shape(written("model: {dim: 64, layers: 3}"), "model.layers=4", "model.preset=llama3.2_1b")
    assert (other.dim, other.layers) == (2048, 4)
    assert shape(child, "model.preset=null", "model.dim=32").dim == 32


def test_a_folder_with_weights_is_a_shape_too(written, tmp_path):
    model = for_tokenizer(TOKENIZER_OF_BYTES, tied_embeddings=True, rope_theta=1e4)
    run = write_run(tmp_path / "run", {3: model}, TOKENIZER_OF_BYTES, model=model.config.model_dump(mode="json"))
    exported = write_huggingface(tmp_path / "hf", model, TOKENIZER_OF_BYTES)
    for folder in (run, run / "train/checkpoints/step-00000003", exported):
        size = TOKENIZER_OF_BYTES.size
        result = shape(written(f"model: {{preset: {folder}, context_length: 512, vocab_size: {size}}}"))
        assert result.model_copy(update={"context_length": model.config.context_length}) == model.config
    (tmp_path / "empty").mkdir()
    assert "/empty describes no shape" in refusal(written(f"model: {{preset: {tmp_path}/empty}}"))


def test_the_configuration_of_the_page_extends_a_llama_of_the_hub(written, tmp_path, monkeypatch):
    [text] = re.findall(r"```yaml\n(name: longer\n.*?)```", (REPOSITORY / "docs/continue.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    published = PRESETS["llama3.2_1b"]
    write_json(tmp_path / "models/Llama-3.2-1B/config.json", config_to_json(published, torch.bfloat16))
    result = shape(written(text))
    assert result.problems() == [] and result.context_length == 262144
    assert result.rope_scaling == published.rope_scaling.model_copy(update={"factor": 64.0})
    assert (result.parameter_count, result.hidden, result.tied_embeddings, result.vocab_size) == (
        published.parameter_count, 8192, True, 128256)


def test_names_are_spelt_as_the_models_are_and_unknown_ones_answered_with_the_known(written):
    assert shape(written("model: {preset: Llama3.1-8B}")) == shape(written("model: {preset: llama3.1_8b}"))
    assert "c.yaml:3: There is no preset 'llama3-8'. Did you mean llama3_8b" in \
        refusal(written("seed: 1\nmodel:\n  preset: llama3-8\n"))
