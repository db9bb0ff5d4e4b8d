"""Write a network's shape as Hugging Face's config.json. pipeline/config/shapes.py reads it.

A Llama becomes a LlamaForCausalLM. With normed queries and keys, or with layers that have a sliding window or no rotary
embedding, it becomes the class of transformers that computes the same: Qwen3 or SmolLM3. Biases of queries, keys and
values become `attention_bias`. In these classes it includes a fourth bias, of the output projection, which is written
as zeros. Qwen2 has the three biases only, but then transformers would split text by Qwen's rules, whatever the folder's
tokenizer. Qwen2 and Mistral are read.
"""

from __future__ import annotations

from typing import Any

import torch

from drover.model.config import ModelConfig, YarnScaling
from drover.pipeline.config.shapes import CLASSES, FULL, SLIDING, export_problem


def config_to_json(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The content of config.json without token ids. Raises ValueError if transformers has no such network."""
    if problem := export_problem(config):
        raise ValueError(problem)
    scaling = None
    if config.rope_scaling is not None:
        said = config.rope_scaling.model_dump(exclude={"kind"}, exclude_none=True)
        scaling = {"rope_type": "yarn" if isinstance(config.rope_scaling, YarnScaling) else "llama3",
                   "original_max_position_embeddings": said.pop("original_context_length"), **said}
    kind, extra = _family(config)
    return {
        "architectures": [CLASSES[kind]],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "hidden_act": "silu",
        "attention_bias": config.qkv_bias,
        "mlp_bias": False,
        **extra,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        # transformers 4 reads rope_theta and rope_scaling, transformers 5 rope_parameters.
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {**(scaling or {"rope_type": "default"}), "rope_theta": config.rope_theta},
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def _family(config: ModelConfig) -> tuple[str, dict[str, Any]]:
    """transformers' name for the network, and settings that depend on it."""
    types = [SLIDING if config.window_of(layer) else FULL for layer in range(config.layers)]
    windowed, rotated = SLIDING in types, [int(config.rotates(layer)) for layer in range(config.layers)]
    windows = {"use_sliding_window": windowed, "sliding_window": config.sliding_window if windowed else None,
               "layer_types": types}
    if config.qk_norm:
        # max_window_layers: what readers before layer_types ask, layers from there on have the window.
        first = types.index(SLIDING) if windowed else config.layers
        return "qwen3", {**windows, "max_window_layers": first}
    if windowed or not all(rotated):
        # Its default would be a token that small vocabularies do not have.
        return "smollm3", {**windows, "no_rope_layers": rotated, "pad_token_id": None,
                           "no_rope_layer_interval": config.no_rope_layer_interval or config.layers + 1}
    return "llama", {}
