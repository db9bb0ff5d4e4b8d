"""The shape of the weights in a folder, read from the folder's JSON and YAML files. Without torch; pipeline/formats
reads the weights themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from drover.model.config import MOST_LAYERS, ModelConfig, RopeScaling, YarnScaling
from drover.pipeline.config.yaml_source import read_yaml
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Record, read_json, typed

POSITIONS = ("context_length", "rope_theta", "rope_scaling")
"""The parts of a shape that may be changed by name for existing weights: these extend a context."""
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


def shape_from(values: Record) -> ModelConfig:
    """The shape in one of our records; ValueError, in one line, if it is none."""
    try:
        return ModelConfig(**values)
    except ValidationError as error:
        raise ValueError("; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
                         ) from None


def read_shape(path: Path) -> ModelConfig:
    """The shape in a Hugging Face config.json. UserError, naming the key, if our network cannot be it."""
    try:
        return shape_of(typed(read_json(path), Record))
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, OSError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise UserError(f"{path} does not describe a Llama that Drover can read: {what}") from None


def shape_of(content: Record) -> ModelConfig:
    """The shape in the content of a Hugging Face config.json; ValueError, naming the key, if our network cannot be
    it."""
    kind = content.get("model_type", "llama")
    if kind == "mistral" and "layer_types" in content:
        kind = "ministral"  # as AutoConfig reads it
    if kind not in CLASSES:
        raise ValueError(f"config.json has model_type = {kind!r}; only {', '.join(CLASSES)} can be read.")
    heads, count = content["num_attention_heads"], content["num_hidden_layers"]
    if not isinstance(count, int) or count > MOST_LAYERS:
        raise ValueError(f"config.json has num_hidden_layers = {count!r}; at most {MOST_LAYERS:,} can be read.")
    only = {**_ONLY, **(_LLAMA_ONLY if kind == "llama" else {})}
    for key, value in only.items():
        if content.get(key, value) not in (value, None):
            raise ValueError(f"config.json has {key} = {content[key]!r}; only {value!r} can be read.")
    where = "rope_parameters" if content.get("rope_parameters") else "rope_scaling"
    rope = content.get(where) or {}
    for key in () if kind == "llama" else (*_NEEDED, *(["head_dim"] if kind == "qwen3" else [])):
        if key not in content and key not in rope:  # rope_theta may be in either
            raise ValueError(f"config.json has no {key}. transformers has a default for {kind}, but Drover needs the "
                             f"value: write it.")
    width = content.get("head_dim")  # from here on, absent values mean LlamaConfig's defaults
    return ModelConfig(
        dim=content["hidden_size"],
        layers=content["num_hidden_layers"],
        heads=heads,
        kv_heads=content.get("num_key_value_heads") or heads,
        ffn_dim=content["intermediate_size"],
        vocab_size=content["vocab_size"],
        context_length=content.get("max_position_embeddings", 2048),
        rope_theta=float({**content, **rope}.get("rope_theta", 10000.0)),
        rope_scaling=_scaling(rope, where),
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


def _layers(content: Record, kind: str) -> dict[str, int | None]:
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
    if other := sorted(set(types) - {FULL, SLIDING}):
        raise ValueError(f"config.json has layer_types with {other[0]!r}; only {FULL} and {SLIDING} can be read.")
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
    if any(here != ((layer + 1) % interval == 0) for layer, here in enumerate(holds)):
        raise ValueError(f"config.json has {key} that do not repeat every n layers (the first ones every {interval}); "
                         f"only such patterns can be read.")
    return interval


def _scaling(rope: Record, where: str) -> RopeScaling | YarnScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"config.json has {where}.partial_rotary_factor = {rope['partial_rotary_factor']!r}; only 1.0 "
                         f"can be read.")
    if kind == "default":
        return None
    if kind == "yarn":
        return _yarn(rope, where)
    if kind != "llama3":
        raise ValueError(f"config.json has {where}.{'rope_type' if 'rope_type' in rope else 'type'} = {kind!r}: of "
                         f"rotary scalings only 'default', 'llama3' and 'yarn' can be read.")
    return RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_context_length=rope["original_max_position_embeddings"],
    )


def _yarn(rope: Record, where: str) -> YarnScaling:
    if rope.get("truncate", True) is not True:
        raise ValueError(f"config.json has {where}.truncate = {rope['truncate']!r}; only true can be read.")
    for key in ("factor", "original_max_position_embeddings"):  # for which transformers knows replacements
        if rope.get(key) is None:
            raise ValueError(f"config.json has no {where}.{key}: write it.")
    factor, size = float(rope["factor"]), rope.get("attention_factor")
    powers = rope.get("mscale"), rope.get("mscale_all_dim")
    if size is None and all(powers):  # DeepSeek's way to say it
        above, below = (0.1 * float(power or 0) * math.log(max(factor, 1)) + 1 for power in powers)
        size = above / below
    return YarnScaling(kind="yarn", factor=factor, original_context_length=rope["original_max_position_embeddings"],
                       beta_fast=float(rope.get("beta_fast") or 32), beta_slow=float(rope.get("beta_slow") or 1),
                       attention_factor=None if size is None else float(size))


def shape_in(folder: Path) -> ModelConfig:
    """The shape of the weights in a folder: a run, one of its checkpoints, a Hugging Face folder, or weights alone.

    `vocab_size` is None for a run that took it from its tokenizer. UserError if the folder describes no shape.
    """
    places = (folder, *folder.absolute().parents[2:3])
    run = next((place for place in places if (place / "config.yaml").is_file()), None)
    try:
        if (folder / "config.json").is_file():
            return read_shape(folder / "config.json")
        if (folder / "weights.json").is_file():
            return shape_from(typed(read_json(folder / "weights.json"), Record)["model"])
        if run is not None:
            return shape_from(read_yaml(run / "config.yaml").get("model", {}))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"the shape of the weights in {folder} cannot be read ({error}).") from None
    refuse_metas_format(folder)
    raise UserError(f"{folder} describes no shape: it is no run, no checkpoint of one, and has no config.json.")


def refuse_metas_format(folder: Path) -> None:
    """Raise UserError if a folder has weights in Meta's format alone, next to its other files or in `original`, as the
    Hub has it."""
    found = [path for pattern in ("consolidated.*.pth", "params.json", "original/consolidated.*.pth")
             for path in sorted(folder.glob(pattern))]
    if found and not any(path for pattern in ("*.safetensors", "pytorch_model*.bin") for path in folder.glob(pattern)):
        raise UserError(f"{folder} has weights in Meta's format ({found[0].relative_to(folder)}), which Drover does "
                        f"not read: download the safetensors of the same model from its Hugging Face repository (hf "
                        f"download meta-llama/NAME --exclude 'original/*' --local-dir FOLDER), and give that folder.")
