"""The network's shape as Hugging Face's config.json has it. Without torch; pipeline/formats reads the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drover.model.config import ModelConfig, RopeScaling

_ONLY = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 1.0,
         "quantization_config": None}
"""Keys for features that our network lacks, with the value that means "not used"; an absent key means the same."""


def shape_of(content: Mapping[str, Any]) -> ModelConfig:
    """The shape in the content of a Hugging Face config.json; ValueError, naming the key, if our network cannot be
    it."""
    _only(content, "model_type", "llama")
    heads, width = content["num_attention_heads"], content.get("head_dim")
    for key, unused in _ONLY.items():
        _only(content, key, unused, None)
    rope = content.get("rope_parameters") or content.get("rope_scaling") or {}
    return ModelConfig(  # absent values mean LlamaConfig's defaults
        dim=content["hidden_size"],
        layers=content["num_hidden_layers"],
        heads=heads,
        kv_heads=content.get("num_key_value_heads") or heads,
        ffn_dim=content["intermediate_size"],
        vocab_size=content["vocab_size"],
        context_length=content.get("max_position_embeddings", 2048),
        rope_theta=float({**content, **rope}.get("rope_theta", 10000.0)),
        rope_scaling=_scaling(rope),
        norm_eps=content.get("rms_norm_eps", 1e-6),
        tied_embeddings=content.get("tie_word_embeddings", False),
        head_dim=None if width is not None and width * heads == content["hidden_size"] else width,
    )


def _scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    _only(rope, "partial_rotary_factor", 1.0)
    kind = _only(rope, "rope_type" if "rope_type" in rope else "type", "default", "llama3")
    return None if kind == "default" else RopeScaling(
        factor=float(rope["factor"]), low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_context_length=rope["original_max_position_embeddings"])


def _only(content: Mapping[str, Any], key: str, *readable: Any) -> Any:
    """The value of a key, by default the first that can be read. ValueError for any other than these."""
    value = content.get(key, readable[0])
    if value not in readable:
        raise ValueError(f"config.json has {key} = {value!r}; only {', '.join(map(repr, readable))} can be read.")
    return value


def config_to_json(config: ModelConfig, dtype: object) -> dict[str, Any]:
    """The content of config.json, of a LlamaForCausalLM, without token ids. dtype: torch's, or its name."""
    scaling = None
    if config.rope_scaling is not None:
        settings = config.rope_scaling.model_dump()
        scaling = {"rope_type": "llama3",
                   "original_max_position_embeddings": settings.pop("original_context_length"), **settings}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        # transformers 4 reads rope_theta and rope_scaling, transformers 5 rope_parameters.
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {**(scaling or {"rope_type": "default"}), "rope_theta": config.rope_theta},
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
