"""fp8: which layers, in what they differ from others, under every layout, and where it is refused."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from drover.model.config import ModelConfig
from drover.model.llama import Llama, initialise
from drover.model.presets import PRESETS
from drover.pipeline.config.training import TrainConfig
from drover.pipeline.config.tree import Config
from drover.pipeline.core.errors import UserError
from drover.pipeline.parallel.blocks import checkpoint_activations
from drover.pipeline.parallel.fp8 import convert_to_fp8, division, refuse_without_fp8
from tests.conftest import slow
from tests.parallel.groups import run_case
from tests.parallel.test_blocks import CONFIG, loss
from tests.parallel.train_steps import MODEL, train_steps
from tests.refusal import refused, table

pytest.importorskip("torchao", reason="torchao is not installed, which fp8 needs: pip install --editable '.[fp8]'")

RECIPES = ["rowwise", "rowwise_with_gw_hp", "tensorwise"]
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def settings(**train):
    return TrainConfig(precision="fp8", **train)


def converted(recipe):
    """CONFIG with its initial weights in bfloat16."""
    with torch.device("meta"):
        model = Llama(CONFIG)
    convert_to_fp8(model, settings(fp8_recipe=recipe), CPU)
    model = model.to_empty(device="cpu").bfloat16()
    initialise(model, CONFIG, seed=0)
    return model


def step(model):
    (result := loss(model)).backward()
    return result.detach()


def test_the_converted_layers_are_those_that_were_written_down():
    result = division(MODEL, settings(fp8_skip=["layers.0.*", "*.wk"]))
    assert result.converted == tuple(f"layers.{layer}.{name}" for layer in (1, 2) for name in (
        "attention.wq", "attention.wv", "attention.wo", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3"))
    with torch.device("meta"):
        model = Llama(MODEL)
    convert_to_fp8(model, settings(fp8_skip=["layers.0.*", "*.wk"]), CPU)
    assert tuple(name for name, module in model.named_modules()
                 if type(module).__name__ == "Float8Linear") == result.converted
    assert result.lines("rowwise") == [
        "fp8 (rowwise) in 12 linear layers (2 wq, 2 wv, 2 wo, 2 w1, 2 w2, 2 w3); not in the output head",
        "bf16 in 7 linear layers (1 wq, 1 wk, 1 wv, 1 wo, 1 w1, 1 w2, 1 w3): train.fp8_skip has 'layers.0.*'",
        "bf16 in 2 linear layers (2 wk): train.fp8_skip has '*.wk'"]


@pytest.mark.parametrize(("ffn_dim", "tensor", "left_out", "reason"), [
    (96, 1, set(), ""), (96, 2, {"wk", "wv"}, "16 x 96 over 2 ranks is no multiple of 16"),
    (104, 1, {"w1", "w2", "w3"}, "104 x 96 is no multiple of 16, which fp8 needs")])
def test_layers_whose_parts_are_no_multiples_of_16_stay_in_bf16(ffn_dim, tensor, left_out, reason):
    model = ModelConfig(dim=96, layers=1, heads=6, kv_heads=1, ffn_dim=ffn_dim, vocab_size=64, context_length=32)
    result = division(model, settings(), tensor)
    assert {name.rpartition(".")[2] for name in result.left_out} == left_out
    assert not reason or any(reason in line for line in result.lines("rowwise"))


def test_a_pattern_that_fits_nothing_and_nothing_left_are_refused():
    refused(UserError, r"'output' *, which matches no linear layer .* like layers.0.attention.wq", division, MODEL,
            settings(fp8_skip=["output"]))
    refused(UserError, r"no layer is left to convert: train.fp8_skip has 'layers.\*'", division, MODEL,
            settings(fp8_skip=["layers.*"]))


@pytest.mark.parametrize(("name", "recipe"), [("llama3_8b", "tensorwise"), ("llama3.2_1b", "rowwise")])
def test_small_leaves_out_what_torchao_leaves_out(name, recipe):
    from torchao.float8.float8_linear_utils import _auto_filter_for_recipe
    model = PRESETS[name].model_copy(update={"vocab_size": 128256, "layers": 1})
    everything, result = (division(model, settings(fp8_recipe=recipe, fp8_skip=skip)) for skip in ([], ["small"]))
    assert tuple(result.left_out) == everything.slower and not result.slower and not everything.left_out
    with torch.device("meta"):
        layers, keeps = dict(Llama(model).named_modules()), _auto_filter_for_recipe(recipe, [])
    assert all(keeps(layers[layer], layer) == (layer in result.converted) for layer in everything.converted)


@pytest.mark.parametrize("recipe", [*slow(*RECIPES[:-1]), RECIPES[-1]])
def test_bits_are_equal_over_layouts(recipe):
    """Of the same micro-batches. tests/parallel/matrix.py has others, in which sums are made in another order."""
    def train(ranks, **given):
        return run_case(ranks, train_steps, precision="fp8", steps=3, train={"fp8_recipe": recipe, "clip_norm": 1e9},
                        **given)

    expected = train(1, accumulation=2)
    for result in (train(2), train(2, parallel={"dp_replicate": 2})):
        np.testing.assert_allclose(*([value for value, _ in one["results"]] for one in (result, expected)), rtol=1e-14)
        for ours, theirs in zip(result["gradients"], expected["gradients"], strict=True):
            assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("recipe", RECIPES)
def test_checkpointing_is_bit_equal_and_parameters_are_what_they_were(recipe):
    """Names, order, shapes, type and gradients: what a checkpoint holds does not change."""
    plain, model, bf16 = converted(recipe), converted(recipe), Llama(CONFIG).bfloat16()
    initialise(bf16, CONFIG, seed=0)
    checkpoint_activations(model, settings(activation_checkpointing="selective", kept_activations=["wo", "w3"]))
    assert torch.equal(step(model), step(plain)) and list(model.state_dict()) == list(bf16.state_dict())
    for (name, ours), theirs, before in zip(model.named_parameters(), plain.parameters(), bf16.parameters(),
                                            strict=True):
        assert torch.equal(ours.grad, theirs.grad) and torch.equal(ours, before), name
        assert type(ours) is type(before) and ours.requires_grad


@pytest.mark.parametrize(("recipe", "card", "words"), table("""
    rowwise -> [8, 9] -> capability 9.0; this one (a card) has 8.9. train.fp8_recipe=tensorwise would run here
    tensorwise -> [8, 0] -> needs a GPU of compute capability 8.9; this one (a card) has 8.0. Take
    rowwise -> [9, 0] -> taken
    rowwise -> "gfx90a:sramecc+" -> which this GPU (a card, gfx90a:sramecc+) does not have
    rowwise -> "gfx942:sramecc+" -> taken
    """, str, json.loads))
def test_hardware_without_it_is_refused_with_the_reason(monkeypatch, recipe, card, words):
    """NVIDIA's by their compute capability, AMD's by their kind."""
    monkeypatch.setattr(torch.version, "hip", "7.0" if isinstance(card, str) else None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: tuple(card))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName=card))
    config = Config(train=settings(fp8_recipe=recipe))
    if words == "taken":
        refuse_without_fp8(config, GPU)
    else:
        refused(UserError, re.escape(words), refuse_without_fp8, config, GPU)


def test_without_torchao_it_is_refused_and_other_precisions_are_not(monkeypatch):
    monkeypatch.setattr("drover.pipeline.core.errors.find_spec", lambda name: None)
    refused(UserError, r"needs the package torchao, which is not installed here: `pip install", refuse_without_fp8,
            Config(train=settings()), CPU)
    refuse_without_fp8(Config(train=TrainConfig(precision="bf16")), CPU)
