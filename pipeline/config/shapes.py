"""The shape of the weights that lie in a folder, from the texts beside them. Without torch, and without a look at the
weights; pipeline/formats reads those."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from model.config import ModelConfig, RopeScaling
from pipeline.config.yaml_source import read_yaml
from pipeline.errors import UserError
from pipeline.files import read_json

_ONLY = {
    "model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "sliding_window": None,
    "use_qk_norm": False, "qk_norm": False, "partial_rotary_factor": 1.0, "quantization_config": None,
    "num_local_experts": None, "residual_multiplier": 1.0, "embedding_multiplier": 1.0, "logits_scaling": 1.0,
    "final_logit_softcapping": None, "no_rope_layers": None,
}
"""What our network cannot do otherwise, with the value that means "does not"; absent means the same."""


def shape_of(content: dict[str, Any]) -> ModelConfig:
    """The shape that a Hugging Face config.json describes; ValueError where it describes what is no Llama of ours."""
    heads = content["num_attention_heads"]
    for key, value in {**_ONLY, "head_dim": content["hidden_size"] // heads}.items():
        if content.get(key, value) not in (value, None):
            raise ValueError(f"config.json has {key} = {content[key]!r}; only {value!r} can be read.")
    # Absent values mean LlamaConfig's defaults.
    where = "rope_parameters" if content.get("rope_parameters") else "rope_scaling"
    rope = content.get(where) or {}
    return ModelConfig(
        dim=content["hidden_size"],
        layers=content["num_hidden_layers"],
        heads=heads,
        kv_heads=content.get("num_key_value_heads") or heads,
        ffn_dim=content["intermediate_size"],
        vocab_size=content["vocab_size"],
        context_length=content.get("max_position_embeddings", 2048),
        rope_theta=float(rope.get("rope_theta", content.get("rope_theta", 10000.0))),
        rope_scaling=_scaling(rope, where),
        norm_eps=content.get("rms_norm_eps", 1e-6),
        tied_embeddings=content.get("tie_word_embeddings", False),
    )


def _scaling(rope: dict[str, Any], where: str) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"config.json has {where}.partial_rotary_factor = {rope['partial_rotary_factor']!r}; only 1.0 "
                         f"can be read.")
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"config.json has {where}.{'rope_type' if 'rope_type' in rope else 'type'} = {kind!r}: of "
                         f"rotary scalings only 'default' and 'llama3' can be read.")
    return RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_context_length=rope["original_max_position_embeddings"],
    )


def shape_in(folder: Path) -> ModelConfig:
    """The shape of the weights in a folder: a run, a checkpoint of one, a Hugging Face folder, weights alone.

    `vocab_size` of a run that took it from its tokenizer is None. UserError where no shape is told.
    """
    places = (folder, *folder.absolute().parents[2:3])
    run = next((place for place in places if (place / "config.yaml").is_file()), None)
    try:
        if (folder / "config.json").is_file():
            return shape_of(read_json(folder / "config.json"))
        if (folder / "weights.json").is_file():
            return ModelConfig(**read_json(folder / "weights.json")["model"])
        if run is not None:
            return ModelConfig(**read_yaml(run / "config.yaml").tree.get("model", {}))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"the shape of the weights in {folder} cannot be read ({error}).") from None
    raise UserError(f"{folder} says no shape: it is no run, no checkpoint of one, and has no config.json.")
