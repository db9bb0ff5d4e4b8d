"""The judgement of an export: sharp and rounded models pass, each planted defect is named."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import drover.model.names as names
import drover.pipeline.formats.comparison as comparison
import drover.pipeline.formats.weights as reading
from drover.model.config import ModelConfig
from drover.pipeline.core.errors import UserError
from drover.pipeline.formats.comparison import (
    FACTOR,
    agreement,
    compare_folder,
    compare_logits,
    transformers_pass,
)
from tests.formats.exporting import write_state
from tests.formats.test_huggingface import built
from tests.refusal import refused

CONFIG = ModelConfig(dim=64, layers=3, heads=4, kv_heads=2, ffn_dim=96, vocab_size=160, context_length=256)
IDS = torch.randint(0, 160, (1, 200), generator=torch.Generator().manual_seed(1))


def sharp(config=CONFIG, output=8.0):
    """Weights of a model that is sure of itself: logits between 20 and 50, attention on few tokens."""
    model = built(config)
    with torch.no_grad():
        model.output.weight.mul_(output)
        for layer in model.layers:
            layer.attention.wq.weight.mul_(6)
            layer.feed_forward.w2.weight.mul_(6)
    return {name: weight.detach() for name, weight in model.named_parameters()}


def exported(folder, weights, config=CONFIG, dtype=torch.float32):
    write_state(folder, weights, config, dtype=dtype)
    return folder


def judged(folder, weights, config=CONFIG, dtype=torch.float32):
    """All that convert asks of a folder: its agreement, or UserError."""
    def read(name):
        return weights[name].to(dtype)
    assert compare_folder(folder, config, read) == len(weights)
    return compare_logits(folder, config, read, IDS)


@pytest.mark.parametrize(("changes", "dtype"), [
    ({}, torch.bfloat16), ({"tied_embeddings": True}, torch.float32)], ids=["untied", "tied"])
def test_a_sharp_model_passes_and_block_by_block_transformers_computes_what_it_computes_whole(tmp_path, changes, dtype):
    """To the last bit, so the proof is as strong for a model that nobody can load."""
    config = CONFIG.model_copy(update=changes)
    weights = sharp(config, output=25.0 if config.tied_embeddings else 12.0)
    exported(tmp_path, weights, config, dtype)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    streamed, absent = transformers_pass(tmp_path, IDS, lambda name, output: None)
    with torch.no_grad():
        assert torch.equal(whole(IDS).logits, streamed) and not absent
    result = judged(tmp_path, weights, config, dtype)
    assert result.layers_compared == 3 and 20 < result.largest_logit < 60
    assert changes or result.training_logit_error > 1e-5, "an absolute limit would refuse it"
    assert 0 < result.transformers_logit_error <= FACTOR * result.single_precision_logit_error < 0.05
    assert result.argmax_equal >= result.argmax_decided > 150 and result.argmax_wrong == 0


def edited(change):
    """A defect of the files: `change(tensors)` of the safetensors file."""
    def plant(folder, monkeypatch):
        path, = folder.glob("*.safetensors")
        tensors = load_file(path)
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return plant


def reconfigured(**values):
    """A defect of config.json."""
    def plant(folder, monkeypatch):
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(content | values))
    return plant


def one_element(tensors):
    tensors["model.layers.1.mlp.up_proj.weight"][17, 3] += 1e-6


def rounded(tensors):
    tensors["model.layers.2.self_attn.q_proj.weight"] = tensors["model.layers.2.self_attn.q_proj.weight"].bfloat16()


THETA = {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}


@pytest.mark.parametrize(("plant", "message"), [
    (edited(one_element), r"layers.1.feed_forward.w3.weight .* 1 of 6,144 values differ, the first at \[17, 3\]"),
    (edited(rounded), r"2.attention.wq.weight .* of torch.bfloat16, not"),
    (reconfigured(**THETA), r"rope_theta is 10000.0; trained with 500000.0"),
    (reconfigured(rms_norm_eps=1e-6, num_key_value_heads=4),
     r"(?s)kv_heads is 4; trained with 2.*norm_eps is 1e-06; trained with 1e-05"),
    (reconfigured(hidden_act="gelu"), r"can read: config.json has hidden_act"),
])
def test_a_defect_of_the_files_is_named(tmp_path, monkeypatch, plant, message):
    weights = sharp()
    plant(exported(tmp_path, weights), monkeypatch)
    refused(UserError, message, judged, tmp_path, weights)


def same_order(folder, monkeypatch):
    """Rows of wq and wk written and read as they are: what is read back is the checkpoint's."""
    for room, name in ((names, "half_rows"), (reading, "pair_rows")):
        monkeypatch.setattr(room, name, lambda weight, heads: weight)
    exported(folder, sharp())


def believed(**values):
    """A wrong config.json that our reader takes for right."""
    def plant(folder, monkeypatch):
        reconfigured(**values)(folder, monkeypatch)
        for room in (comparison, reading):
            monkeypatch.setattr(room, "read_shape", lambda path: CONFIG)
    return plant


@pytest.mark.parametrize("plant", [same_order, believed(**THETA)])
def test_a_defect_that_reads_back_as_it_was_written_is_seen_by_transformers(tmp_path, monkeypatch, plant):
    """Writer and reader of one program agree on anything; what transformers makes of it is the proof."""
    weights = sharp()
    plant(exported(tmp_path, weights), monkeypatch)
    refused(UserError, "(?s)transformers' logits are off by up to .*They agree before layers.0; after it", judged,
            tmp_path, weights)


def test_numbers_that_are_none_are_refused(tmp_path):
    weights = sharp()
    weights["norm.weight"][3] = float("inf")
    exported(tmp_path, weights)
    refused(UserError, "logits that are NaN or infinite", compare_logits, tmp_path, CONFIG, weights.__getitem__, IDS)


def test_each_side_is_judged():
    """Whichever of them is wrong, and NaN, is told; single precision's own error is the yardstick."""
    reference = torch.randn(1, 50, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 10
    near = reference.float()
    off = near + 1e-3
    bent = near.clone()
    bent[0, 7] = -bent[0, 7]

    def problems(ours, theirs, single):
        return agreement(reference, ours, theirs, single, 1).problems
    assert problems(near, near, near) == []
    assert problems(off, off, off) == [], "what float32 itself is off is no defect"
    assert "transformers' logits" in problems(near, off, near)[0]
    assert any("where transformers' are off" in line for line in problems(off, near, off)), "ours is as near"
    assert any("the argmax differs on 1 of" in line for line in problems(near, bent, near))
    assert len(problems(near, near * float("nan"), near)) >= 2
