"""Export and import against transformers, which is the oracle for the whole network."""

import json
import math
from itertools import product

import pytest
import torch
import transformers
from safetensors.torch import load_file

from drover.model import huggingface as shapes
from drover.model.config import ModelConfig, RopeScaling, YarnScaling
from drover.model.huggingface import shape_of
from drover.model.llama import Llama, initialise
from drover.pipeline.core.errors import UserError
from drover.pipeline.formats import huggingface
from drover.pipeline.formats.huggingface import config_to_json, refuse_unexportable
from drover.pipeline.tokenization.conversion import write_hugging_face
from tests.conftest import slow
from tests.formats.exporting import state_in, write_model
from tests.refusal import refused
from tests.tiny_models import TOKENIZER_OF_BYTES

SMALL = {"dim": 48, "layers": 4, "heads": 6, "kv_heads": 2, "ffn_dim": 80, "vocab_size": 90}
SCALING = {"context_length": 512, "rope_scaling": RopeScaling(factor=8, original_context_length=64)}
YARN = {"context_length": 512, "rope_scaling": YarnScaling(kind="yarn", factor=8, original_context_length=64)}
CONFIGS = {
    "tied": ModelConfig(dim=32, layers=1, heads=4, kv_heads=4, vocab_size=70, tied_embeddings=True),
    "scaled": ModelConfig(**SMALL, **SCALING),
    "biases, Qwen3, YaRN": ModelConfig(**SMALL, head_dim=16, qkv_bias=True, qk_norm=True, **YARN),
    "Llama, YaRN with an amplitude": ModelConfig(**SMALL, head_dim=16, **{**YARN, "rope_scaling": YarnScaling(
        kind="yarn", factor=4, original_context_length=64, beta_fast=16, beta_slow=2, attention_factor=1.3)}),
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
            if name.endswith("bias"):
                parameter.normal_(generator=generator)
            if "norm" in name:
                parameter.mul_(0.5 + torch.rand(parameter.shape, generator=generator))
    return model.to(dtype)


@torch.no_grad()
def difference(theirs, ours, tokens):
    """The largest of a logit."""
    return (theirs(tokens).logits - ours(tokens)).abs().max().item()


@pytest.mark.parametrize("name", CONFIGS)
def test_an_export_computes_the_same_in_transformers_and_is_read_back_to_the_bit(name, tmp_path):
    """What the crossings of the next test do not have."""
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


WINDOWS = {"": {}, "window": {"sliding_window": 7}, "windows": {"sliding_window": 7, "full_attention_interval": 3}}
WIDTHS = {"": {}, "wide": {"head_dim": 10}, "uneven": {"heads": 5, "kv_heads": 5, "head_dim": 10}}
WRITTEN = {"": "Llama", "uneven": "Mistral", "window": "Mistral", "windows": "Ministral", "bias": "Qwen2",
           "norm": "Qwen3", "norope": "SmolLM3", "norm norope": None}
"""The class for a network with this, from the last line that applies up: only "norm norope" has none."""


@pytest.mark.parametrize("qwens", [True, *slow(False)])
@pytest.mark.parametrize("norm", ["", "norm"])
@pytest.mark.parametrize("norope", ["", "norope"])
@pytest.mark.parametrize("bias", ["", "bias"])
def test_every_crossing_is_written_as_the_class_that_computes_it_or_refused(bias, norope, norm, qwens, tmp_path):
    """Next to a Qwen2, transformers would misread any tokenizer but Qwen2's own."""
    tokens = torch.randint(90, (2, 40), generator=torch.Generator().manual_seed(0))
    for number, (window, width) in enumerate(product(WINDOWS, WIDTHS)):
        config = ModelConfig(**{**SMALL, "layers": 3, **WINDOWS[window], **WIDTHS[width], "qkv_bias": bool(bias),
                                "qk_norm": bool(norm), "no_rope_layer_interval": 2 if norope else None,
                                "tied_embeddings": number % 2 == 0, **(SCALING if number % 3 else {})})
        *_, known = (WRITTEN[name] for name in WRITTEN if set(name.split()) <= {bias, norm, norope, window, width})
        if known == "Qwen2" and not qwens:
            known = None if window or width == "uneven" else "Llama"
        if known is None:
            message = "qk_norm .* and .*no_rope_layer_interval" if norope else \
                "model.qkv_bias with model.(sliding_w|dim)"
            refused(UserError, message, refuse_unexportable, config, qwens=qwens)
            refused(ValueError, message, write_model, tmp_path, built(config), qwens=qwens)
            continue
        refuse_unexportable(config.model_copy(update={"vocab_size": None}), qwens=qwens)
        model = built(config)
        write_model(folder := tmp_path / f"{number}", model, qwens=qwens)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert type(theirs).__name__ == f"{known}ForCausalLM" == theirs.config.architectures[0], config
        assert difference(theirs, model, tokens) <= 1e-5, config
        assert config.differences(state_in(folder)[0]) == {}


def test_what_the_installed_transformers_refuses_is_the_users_error_before_training(monkeypatch):
    """Each version checks more: today's Llama, widths that are no multiple of the heads."""
    uneven = ModelConfig(**{**SMALL, "heads": 5, "kv_heads": 5, "head_dim": 10})
    refuse_unexportable(uneven, qwens=False)
    monkeypatch.setattr(huggingface, "export_class", lambda config, qwens: "llama")
    refused(UserError, r"transformers 5\S+ refuses .* as a LlamaForCausalLM: .*hidden size \(48\).* section model",
            refuse_unexportable, uneven, qwens=False)
    monkeypatch.undo()

    class Later(ModelConfig):
        activation: str = "silu"
    monkeypatch.setattr(shapes, "ModelConfig", Later)
    refused(UserError, "model.activation cannot be exported", refuse_unexportable,
            Later(**SMALL, activation="relu2"), qwens=False)


@pytest.mark.parametrize("config", [{"sliding_window": 8}, {"qkv_bias": True}])
def test_transformers_reads_the_tokenizer_beside_every_class_by_its_own_rules(config, tmp_path, caplog):
    """Next to a Qwen2 it would not; next to a Mistral it would warn that they are wrong."""
    config = ModelConfig(**{**SMALL, "vocab_size": 512, **config})
    write_model(tmp_path, built(config), qwens=False)
    write_hugging_face(TOKENIZER_OF_BYTES, tmp_path)
    text = "Numbers 1234567, e\u0301 and  spaces\n\n don't"
    assert transformers.AutoTokenizer.from_pretrained(tmp_path).encode(text, add_special_tokens=False) \
        == TOKENIZER_OF_BYTES.encode(text)
    assert "regex" not in caplog.text


@pytest.mark.parametrize("class_name, settings, read", [
    ("MistralForCausalLM", {"sliding_window": 6, "head_dim": 16}, {"sliding_window": 6, "head_dim": 16}),
    ("Qwen2ForCausalLM", {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32, "mscale": 1.0,
        "mscale_all_dim": 0.5}}, {"qkv_bias": True, "rope_scaling": YarnScaling(
            kind="yarn", factor=4, original_context_length=32,
            attention_factor=(0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1))}),
    ("Qwen3ForCausalLM", {"head_dim": 8, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0},
     {"qk_norm": True, "sliding_window": 6}),
    ("SmolLM3ForCausalLM", {"use_sliding_window": True, "sliding_window": 6, "no_rope_layer_interval": 2,
                            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2},
     {"no_rope_layer_interval": 2, "sliding_window": 6, "full_attention_interval": 3})])
def test_a_folder_that_transformers_wrote_computes_the_same_here(class_name, settings, read, tmp_path):
    """With its own random weights, as its own classes write them."""
    torch.manual_seed(0)
    kind = getattr(transformers, class_name)
    theirs = kind(kind.config_class(
        vocab_size=90, hidden_size=48, intermediate_size=64, num_hidden_layers=6, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2, pad_token_id=None, **settings)).eval()
    theirs.save_pretrained(tmp_path)
    config, state = state_in(tmp_path)
    shape = {"head_dim": None, "qkv_bias": False, "rope_scaling": None, "qk_norm": False, "sliding_window": None,
             "full_attention_interval": None, "no_rope_layer_interval": None}
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
