"""Convert between Meta's params.json and our ModelConfig.

The keys are those of llama-models' ModelArgs. Three properties of a network are missing there:

- the context length: we take that of the published model with this shape, else that of its generation;
- the factor of `use_scaled_rope`: 32 for the shapes of Llama 3.2 1B and 3B, else 8, always from 8,192 tokens (the
  reference has 8 for all, which is wrong for those two: llama-models issues 166 and 241);
- whether embedding and output are one matrix: the weights show it.
"""

from __future__ import annotations

from pathlib import Path

from drover.model.config import ModelConfig, RopeScaling
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Record, read_json

PARAMS = "params.json"
PARTS = (1, 2, 4, 8, 16)
"""Numbers of parts into which Meta's format divides a model."""
LLAMA2_THETA = 10000.0
"""The rotary base of Llama 1 and 2. Their files do not state it; later ones do."""
_LLAMA3_CONTEXT, _LLAMA31_CONTEXT, _LLAMA2_CONTEXT = 8192, 131072, 4096
_FACTOR = 8.0
_CHANGES_ARITHMETIC = ("moe_args", "lora_args", "quantization_args", "use_qk_norm", "attention_chunk_size",
                       "nope_layer_interval", "vision_args")
"""Keys of descendants that compute something else. Other unknown keys are ignored, as in the reference."""


def read_params(folder: Path) -> Record:
    """The parameters in a folder's params.json, nested under "model" or not.

    Raises UserError if there are none, or if the network is not one of our Llamas.
    """
    path = folder / PARAMS
    try:
        content = read_json(path)
        params = content.get("model", content)
        found = [key for key in _CHANGES_ARITHMETIC if params.get(key)]
        absent = [key for key in ("dim", "n_layers", "n_heads") if key not in params]
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{path} cannot be read as Meta's parameters ({error}).") from None
    if found:
        raise UserError(f"{path} has {found[0]} = {params[found[0]]!r}: that network computes something else than the "
                        f"Llamas that Drover reads.")
    if absent:
        raise UserError(f"{path} has no {', '.join(absent)}: these are not Meta's parameters of a Llama.")
    return dict(params)


def config_of(params: Record, *, vocab_size: int, kv_heads: int, tied: bool) -> ModelConfig:
    """The shape, from the parameters and from what only the weights show.

    Raises ValueError, TypeError or KeyError for invalid values.
    """
    scaled, multiplier = bool(params.get("use_scaled_rope")), params.get("ffn_dim_multiplier")
    plain = ModelConfig(
        dim=params["dim"], layers=params["n_layers"], heads=params["n_heads"], kv_heads=kv_heads,
        ffn_dim_multiplier=None if multiplier is None else float(multiplier),
        multiple_of=params.get("multiple_of", 256), vocab_size=vocab_size,
        rope_theta=float(params.get("rope_theta", LLAMA2_THETA)), norm_eps=float(params.get("norm_eps", 1e-5)),
        tied_embeddings=tied)
    published = _published(plain, scaled)
    scaling = None
    if scaled:
        known = published.rope_scaling.factor if published and published.rope_scaling else _FACTOR
        scaling = RopeScaling(factor=float(params.get("rope_scaling_factor") or known))
    if published:
        context = published.context_length
    elif scaled:
        context = _LLAMA31_CONTEXT
    else:
        context = _LLAMA2_CONTEXT if plain.rope_theta == LLAMA2_THETA else _LLAMA3_CONTEXT
    return plain.model_copy(update={"rope_scaling": scaling, "context_length": context})


def params_of(config: ModelConfig, parts: int) -> Record:
    """The parameters for Meta's tools, with a model in `parts` parts.

    With more parts than KV heads, each part has a copy of one head, and the parameters have as many KV heads as parts
    (as the published Llama 3.1 405B in 16 parts). `config_of` shows what is lost.
    """
    multiplier, multiple_of = _width_rule(config)
    params: Record = {"dim": config.dim, "n_layers": config.layers, "n_heads": config.heads,
                              "n_kv_heads": max(config.kv_heads, parts), "vocab_size": config.vocab_size}
    if multiplier is not None:
        params["ffn_dim_multiplier"] = multiplier
    params.update(multiple_of=multiple_of, norm_eps=config.norm_eps, rope_theta=config.rope_theta)
    if config.rope_scaling is not None:
        params["use_scaled_rope"] = True
    return params


def _width_rule(config: ModelConfig) -> tuple[float | None, int]:
    """ffn_dim_multiplier and multiple_of by which Llama's rule gives the feed-forward width."""
    if config.ffn_dim is None:
        return config.ffn_dim_multiplier, config.multiple_of
    from drover.model.presets import PRESETS

    for known in sorted(PRESETS.values(), key=lambda shape: shape.dim != config.dim):  # presets of the same width first
        rule = {"ffn_dim_multiplier": known.ffn_dim_multiplier, "multiple_of": known.multiple_of}
        if known.ffn_dim is None and config.model_copy(update={"ffn_dim": None, **rule}).hidden == config.ffn_dim:
            return known.ffn_dim_multiplier, known.multiple_of
    return (config.ffn_dim + 0.5) / int(2 * (4 * config.dim) / 3), 1  # rounded down, this is the width


def _published(config: ModelConfig, scaled: bool) -> ModelConfig | None:
    """The published model of this shape and generation."""
    from drover.model.presets import PRESETS

    def shape(of: ModelConfig) -> tuple[float, ...]:
        return of.dim, of.layers, of.heads, of.kv_heads, of.hidden, of.rope_theta, of.norm_eps
    return next((known for known in PRESETS.values()
                 if shape(known) == shape(config) and (known.rope_scaling is not None) == scaled), None)
