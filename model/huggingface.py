"""The network's shape as Hugging Face's config.json has it. Without torch; pipeline/formats reads the weights."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from drover.model.config import MOST_LAYERS, ModelConfig, RopeScaling, YarnScaling

FULL, SLIDING = "full_attention", "sliding_attention"
"""What `layer_types` says of a layer."""
CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
           "smollm3": "SmolLM3ForCausalLM", "mistral": "MistralForCausalLM", "ministral": "MinistralForCausalLM"}
"""The classes of transformers that are read and written, by their names in config.json."""
_PLAIN = ("dim", "layers", "heads", "kv_heads", "ffn_dim", "ffn_dim_multiplier", "multiple_of", "vocab_size",
          "context_length", "rope_theta", "norm_eps", "tied_embeddings")
"""The settings of the first Llamas."""
_ONLY = {
    "hidden_act": "silu", "mlp_bias": False, "use_qk_norm": False, "qk_norm": False,
    "partial_rotary_factor": 1.0, "quantization_config": None, "num_local_experts": None, "residual_multiplier": 1.0,
    "embedding_multiplier": 1.0, "logits_scaling": 1.0, "final_logit_softcapping": None,
}
"""Keys for features that our network lacks, with the value that means "not used"; an absent key means the same."""
_MISTRALS = ("mistral", "ministral")
_LLAMA_ONLY = {"sliding_window": None, "no_rope_layers": None}
"""The same for a Llama, which ignores these keys in transformers."""
_NEEDED = ("num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "rope_theta")
"""Required keys in a config.json of a type other than llama, since each type has its own defaults. transformers always
writes them."""


def shape_of(content: Mapping[str, Any]) -> ModelConfig:
    """The shape in the content of a Hugging Face config.json; ValueError, naming the key, if our network cannot be
    it."""
    kind = _only(content, "model_type", *CLASSES)
    if kind == "mistral" and "layer_types" in content:
        kind = "ministral"  # as AutoConfig reads it
    heads, width = content["num_attention_heads"], content.get("head_dim")
    if content["num_hidden_layers"] > MOST_LAYERS:
        raise ValueError(f"config.json has num_hidden_layers = {content['num_hidden_layers']!r}; at most "
                         f"{MOST_LAYERS:,} can be read.")
    for key, unused in {**_ONLY, **(_LLAMA_ONLY if kind == "llama" else {})}.items():
        _only(content, key, unused, None)
    rope = content.get("rope_parameters") or content.get("rope_scaling") or {}
    for key in () if kind == "llama" else (*_NEEDED, *(["head_dim"] if kind == "qwen3" else [])):
        if key not in content and key not in rope:  # rope_theta may be in either
            raise ValueError(f"config.json has no {key}. transformers has a default for {kind}, but Drover needs the "
                             f"value: write it.")
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
        # Mistral's classes have none, whatever their config.json says.
        qkv_bias=kind == "qwen2" or (kind not in _MISTRALS and bool(content.get("attention_bias"))),
        qk_norm=kind == "qwen3",
        **_layers(content, kind),
    )


def is_plain(model: ModelConfig) -> bool:
    """Whether the network is a Llama by sizes and constants alone, as every transformers has it."""
    return not model.differences(ModelConfig(**{name: getattr(model, name) for name in _PLAIN}))


def export_class(model: ModelConfig, *, qwens: bool) -> str:
    """The name in CLASSES of the class of transformers that an export of this network has.

    Args:
        qwens: whether its tokenizer is Qwen2's, or there is none. Next to a Qwen2, transformers splits text by Qwen2's
            rules, whatever the tokenizer. With another one, a network with biases is a Llama with `attention_bias`,
            which includes a fourth bias, of the output projection: zeros.

    Raises:
        ValueError: no class computes such a network.
    """
    windows, uneven = {model.window_of(layer) for layer in range(model.layers)}, model.dim % model.heads != 0
    unrotated = not all(model.rotates(layer) for layer in range(model.layers))
    if model.qk_norm and unrotated:
        raise ValueError("model.qk_norm (from Qwen3) and model.no_rope_layer_interval (from SmolLM3) cannot be "
                         "exported together: no class of transformers computes such a network. Leave one of them out.")
    if model.qk_norm or unrotated:
        return "qwen3" if model.qk_norm else "smollm3"
    limited = windows != {None}
    if model.qkv_bias and not qwens and (limited or uneven):
        other = "model.sliding_window" if limited else f"model.dim ({model.dim}) not divisible by heads ({model.heads})"
        raise ValueError(f"model.qkv_bias with {other} can be exported as a Qwen2 only, and next to a Qwen2 "
                         f"transformers splits text by Qwen2's rules, whatever the tokenizer: ids would be others than "
                         f"in training. Take Qwen2's tokenizer (kind huggingface), or leave out model.qkv_bias.")
    if model.qkv_bias and (qwens or limited):
        return "qwen2"
    if limited:
        return "ministral" if None in windows else "mistral"
    return "mistral" if uneven else "llama"  # transformers' Llama has only widths that are multiples of the heads


def _layers(content: Mapping[str, Any], kind: str) -> dict[str, int | None]:
    """Which layers have a window and which a rotary embedding, as fields of ModelConfig."""
    layers = range(content["num_hidden_layers"])
    rotated = [1] * len(layers)
    if kind == "smollm3":
        interval = content.get("no_rope_layer_interval", 4)
        rotated = content.get("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in layers]
    window = content.get("sliding_window") if content.get("use_sliding_window", kind in _MISTRALS) else None
    types = content.get("layer_types")
    if types is None:  # what the classes themselves make of that
        first = content.get("max_window_layers", 28)
        slides = {**dict.fromkeys(_MISTRALS, layers), "qwen2": layers[first:], "qwen3": layers[first:],
                  "smollm3": [layer for layer in layers if not rotated[layer]]}.get(kind, ())
        types = [SLIDING if window and layer in slides else FULL for layer in layers]
    for one in types:
        _only({"layer_types": one}, "layer_types", FULL, SLIDING)
    if SLIDING in types and not window:
        raise ValueError(f"config.json has layer_types with {SLIDING!r}, but no sliding_window in use.")
    return {"no_rope_layer_interval": _interval([not turns for turns in rotated], "no_rope_layers"),
            "sliding_window": window if SLIDING in types else None,
            "full_attention_interval": _interval([kind == FULL for kind in types], "layer_types")
            if SLIDING in types else None}


def _interval(holds: Sequence[bool], key: str) -> int | None:
    """The n if every n-th layer has the property and no other; None if no layer has. ValueError if there is no such
    n."""
    if True not in holds:
        return None
    interval = holds.index(True) + 1
    if any(held != ((layer + 1) % interval == 0) for layer, held in enumerate(holds)):
        raise ValueError(f"config.json has {key} that do not repeat every n layers (the first ones every {interval}); "
                         f"only such patterns can be read.")
    return interval


def _scaling(rope: Mapping[str, Any]) -> RopeScaling | YarnScaling | None:
    _only(rope, "partial_rotary_factor", 1.0)
    kind = _only(rope, "rope_type" if "rope_type" in rope else "type", "default", "llama3", "yarn")
    if kind == "yarn":
        return _yarn(rope)
    return None if kind == "default" else RopeScaling(
        factor=float(rope["factor"]), low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_context_length=rope["original_max_position_embeddings"])


def _yarn(rope: Mapping[str, Any]) -> YarnScaling:
    _only(rope, "truncate", True)
    factor, size = float(rope["factor"]), rope.get("attention_factor")
    powers = rope.get("mscale"), rope.get("mscale_all_dim")
    if size is None and all(powers):  # DeepSeek's way to say it
        above, below = (0.1 * float(power or 0) * math.log(max(factor, 1)) + 1 for power in powers)
        size = above / below
    return YarnScaling(kind="yarn", factor=factor, original_context_length=rope["original_max_position_embeddings"],
                       beta_fast=float(rope.get("beta_fast") or 32), beta_slow=float(rope.get("beta_slow") or 1),
                       attention_factor=None if size is None else float(size))


def _only(content: Mapping[str, Any], key: str, *readable: Any) -> Any:
    """The value of a key, by default the first that can be read. ValueError for any other than these."""
    value = content.get(key, readable[0])
    if value not in readable:
        raise ValueError(f"config.json has {key} = {value!r}; only {', '.join(map(repr, readable))} can be read.")
    return value
