"""Export and import against transformers, which is the oracle for the whole network."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

from drover.model.config import ModelConfig, RopeScaling
from drover.model.huggingface import config_to_json, shape_of
from drover.model.llama import Llama, initialise
from drover.pipeline import convert
from drover.pipeline.config.tree import Config
from drover.pipeline.contract.stages import STAGES
from tests.formats.exporting import state_in, write_model

SMALL = {"dim": 48, "layers": 4, "heads": 6, "kv_heads": 2, "ffn_dim": 80, "vocab_size": 90}
SCALING = {"context_length": 512, "rope_scaling": RopeScaling(factor=8, original_context_length=64)}
CONFIGS = {
    "tied": ModelConfig(dim=32, layers=1, heads=4, kv_heads=4, vocab_size=70, tied_embeddings=True),
    "scaled": ModelConfig(**SMALL, head_dim=16, **SCALING),
    "odd": ModelConfig(dim=42, layers=3, heads=7, kv_heads=1, ffn_dim=37, vocab_size=53, context_length=77,
                       rope_theta=1e4, norm_eps=1e-6),
}


def built(config, dtype=torch.float32):
    model = Llama(config)
    initialise(model, config, seed=5)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Strong attention and uneven norms: a wrong layout or a forgotten norm must show.
            parameter.mul_(5 if "attention.w" in name else 1)
            if "norm" in name:
                parameter.mul_(0.5 + torch.rand(parameter.shape, generator=generator))
    return model.to(dtype)


@torch.no_grad()
def difference(theirs, ours, tokens):
    """The largest of a logit."""
    return (theirs(tokens).logits - ours(tokens)).abs().max().item()


@pytest.mark.parametrize("name", CONFIGS)
def test_an_export_computes_the_same_in_transformers_and_is_read_back_to_the_bit(name, tmp_path):
    config = CONFIGS[name]
    model = built(config)
    write_model(tmp_path, model, max_shard_bytes=30_000, eos_id=[2, 3])
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [file.name for file in files] == [f"model-{number:05d}-of-{len(files):05d}.safetensors"
                                             for number in range(1, len(files) + 1)]
    sizes = [[tensor.nbytes for tensor in load_file(file).values()] for file in files]
    assert all(len(own) == 1 or sum(own) <= 30_000 for own in sizes) and max(map(len, sizes)) > 1
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(map(sum, sizes))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert theirs.generation_config.eos_token_id == [2, 3] and theirs.generation_config.bos_token_id == 1
    assert theirs.config.max_position_embeddings == config.context_length
    assert theirs.config.architectures == [type(theirs).__name__]  # vLLM takes the class of this name
    length = min(config.context_length, 200)
    tokens = torch.randint(config.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert theirs(tokens).logits.std() > 0.1
    assert difference(theirs, model, tokens) <= 1e-5
    read_back, state = state_in(tmp_path)
    assert read_back == config.model_copy(update={"ffn_dim": config.hidden})
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[key], tensor) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize(("settings", "read"), [
    ({"tie_word_embeddings": True, "head_dim": 16}, {"tied_embeddings": True, "head_dim": 16}),
    ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0,
                          "high_freq_factor": 4.0, "original_max_position_embeddings": 32}},
     {"rope_scaling": RopeScaling(factor=4, original_context_length=32)})])
def test_a_folder_that_transformers_wrote_computes_the_same_here(settings, read, tmp_path):
    """With its own random weights, as its own class writes them."""
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=90, hidden_size=48, intermediate_size=64, num_hidden_layers=6, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2, **settings)).eval()
    theirs.save_pretrained(tmp_path)
    config, state = state_in(tmp_path)
    shape = {"head_dim": None, "rope_scaling": None, "tied_embeddings": False}
    assert {name: getattr(config, name) for name in shape} == shape | read
    ours = Llama(config)
    ours.load_state_dict(state)
    tokens = torch.randint(90, (2, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert difference(theirs, ours, tokens) <= 1e-5 * theirs(tokens).logits.abs().max().item()


def test_config_json_has_both_generations_of_rope_keys_and_the_older_one_is_read():
    """The tests here run under transformers 5, which reads the newer one."""
    content = config_to_json(CONFIGS["scaled"], torch.bfloat16)
    assert content.pop("rope_parameters") == {**content["rope_scaling"], "rope_theta": content["rope_theta"]}
    assert (content["rope_theta"], content["rope_scaling"]["rope_type"], content["torch_dtype"]) == (
        500000.0, "llama3", "bfloat16")
    content["rope_scaling"]["type"] = content["rope_scaling"].pop("rope_type")
    older = shape_of(content)
    assert (older.rope_scaling, older.rope_theta) == (CONFIGS["scaled"].rope_scaling, 5e5)


def test_a_field_that_config_json_does_not_hold_is_refused_before_training(monkeypatch):
    """As of somebody who has added it to the network alone: here the export forgets one."""
    config = Config(model=CONFIGS["scaled"])
    assert STAGES["convert"].call("problems", config) == []
    monkeypatch.setattr(convert, "config_to_json", lambda *given: {**config_to_json(*given), "rms_norm_eps": 0.5})
    [problem] = STAGES["convert"].call("problems", config)
    assert problem.startswith("model.norm_eps cannot be exported") and "--stage shard,tokenizer,encode,train" in problem
