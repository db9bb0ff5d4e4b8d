"""The shapes of the published Llamas, by name, and a ladder of small models for experiments. Without torch."""

import difflib
import math
from functools import partial

from drover.model.config import ModelConfig, RopeScaling


def preset(name: str) -> ModelConfig:
    """The shape with a name of PRESETS, such as `llama3_8b` or, the same, `Llama3-8B`.

    Raises ValueError, with the known names, for another name.
    """
    normalized = name.lower().replace("-", "_")
    if normalized not in PRESETS:
        of_this_size = [own for own in PRESETS if own.endswith(f"_{normalized.rpartition('_')[2]}")]
        close = of_this_size or difflib.get_close_matches(normalized, PRESETS, n=1)
        meant = f" Did you mean {' or '.join(close)}?" if close else ""
        raise ValueError(f"There is no preset {name!r}.{meant} Known are {', '.join(PRESETS)}; and "
                         f"folders with weights.")
    return PRESETS[normalized]


def _llama(dim: int, layers: int, heads: int, multiplier: float | None, multiple: int, kv_heads: int = 8,
           vocab_size: int = 128256, context_length: int = 8192, rope_theta: float = 500000.0) -> ModelConfig:
    """A shape of Meta's, by default of Llama 3."""
    return ModelConfig(dim=dim, layers=layers, heads=heads, kv_heads=kv_heads, ffn_dim_multiplier=multiplier,
                       multiple_of=multiple, vocab_size=vocab_size, context_length=context_length,
                       rope_theta=rope_theta)


_llama2 = partial(_llama, vocab_size=32000, context_length=4096, rope_theta=10000.0)


def _llama1(dim: int, layers: int, heads: int, norm_eps: float = 1e-6) -> ModelConfig:
    shape = _llama2(dim=dim, layers=layers, heads=heads, kv_heads=heads, multiplier=None, multiple=256)
    return shape.model_copy(update={"context_length": 2048, "norm_eps": norm_eps})


def _step(layers: int, dim: int, multiplier: float | None = None) -> ModelConfig:
    """A step of the ladder: heads of width 64, above a width of 2048 of 128, which share no keys or values. Embeddings
    are tied, and the vocabulary is the tokenizer's."""
    heads = dim // (64 if dim <= 2048 else 128)
    return ModelConfig(dim=dim, layers=layers, heads=heads, kv_heads=heads, ffn_dim_multiplier=multiplier,
                       multiple_of=64, context_length=1024, rope_theta=10000.0, tied_embeddings=True)


LADDER = [_step(*sizes) for sizes in (
    (2, 128), (3, 192), (4, 256), (5, 320), (6, 384), (8, 512), (10, 640), (12, 768), (16, 1024), (24, 1024),
    (24, 1536), (16, 2048, 1.5), (24, 2048, 1.5), (28, 3072), (32, 4096))]
"""Shapes from small to large. Up to 12 blocks the width is 64 times the depth: the ratio itself matters little (Kaplan
et al. 2020, figure 5). Then come sizes of published models: GPT-2's 12 x 768 and 24 x 1024, Llama's 16 x 2048 (3.2 1B),
28 x 3072 (3.2 3B) and 32 x 4096 (7B), SmolLM2's 24 x 2048 (1.7B)."""
SMALLEST = _step(1, 64)
"""The step below them: one head. It learns too little to be of use, but in seconds, as the first of an experiment."""


def step_near(parameters: int, vocabulary: int) -> ModelConfig:
    """The step that has, with a vocabulary of so many ids, about so many parameters: next to it as a ratio."""
    return min((step.with_vocabulary(vocabulary) for step in [SMALLEST, *LADDER]),
               key=lambda step: abs(math.log(step.parameter_count / parameters)))


def _extended(base: ModelConfig, factor: float, tied: bool = False) -> ModelConfig:
    changes = {"context_length": 131072, "rope_scaling": RopeScaling(factor=factor), "tied_embeddings": tied}
    return base.model_copy(update=changes)


# Values of Meta's params.json files (of Llama 1, the largest already had Llama 2's norm_eps), except two that circulate
# wrongly: Llama 2 7B and 13B have no grouped queries, and the 3.2 models stretch by 32 (llama-models issues 166 and
# 241), not by the hard-coded 8.
_8B = _llama(dim=4096, layers=32, heads=32, multiplier=1.3, multiple=1024)
_70B = _llama(dim=8192, layers=80, heads=64, multiplier=1.3, multiple=4096)
_405B = _llama(dim=16384, layers=126, heads=128, multiplier=1.2, multiple=4096)
_1B = _llama(dim=2048, layers=16, heads=32, multiplier=1.5, multiple=256)
_3B = _llama(dim=3072, layers=28, heads=24, multiplier=1.0, multiple=256)

PRESETS: dict[str, ModelConfig] = {
    "llama1_7b": _llama1(dim=4096, layers=32, heads=32),
    "llama1_13b": _llama1(dim=5120, layers=40, heads=40),
    "llama1_33b": _llama1(dim=6656, layers=60, heads=52),
    "llama1_65b": _llama1(dim=8192, layers=80, heads=64, norm_eps=1e-5),
    "llama2_7b": _llama2(dim=4096, layers=32, heads=32, kv_heads=32, multiplier=None, multiple=256),
    "llama2_13b": _llama2(dim=5120, layers=40, heads=40, kv_heads=40, multiplier=None, multiple=256),
    "llama2_70b": _llama2(dim=8192, layers=80, heads=64, kv_heads=8, multiplier=1.3, multiple=4096),
    "llama3_8b": _8B,
    "llama3_70b": _70B,
    "llama3.1_8b": _extended(_8B, factor=8.0),
    "llama3.1_70b": _extended(_70B, factor=8.0),
    "llama3.1_405b": _extended(_405B, factor=8.0),
    "llama3.2_1b": _extended(_1B, factor=32.0, tied=True),
    "llama3.2_3b": _extended(_3B, factor=32.0, tied=True),
    "llama3.3_70b": _extended(_70B, factor=8.0),
    "tinyllama_1.1b": ModelConfig(dim=2048, layers=22, heads=32, kv_heads=4, ffn_dim=5632, vocab_size=32000,
                                  context_length=2048, rope_theta=10000.0),
    # Named after their parameters with a vocabulary of 32,000; the smallest with one of 4,096.
    "ladder_1m": _step(2, 128),
    "ladder_15m": _step(5, 320),
    "ladder_42m": _step(8, 512),
    "ladder_110m": _step(12, 768),
    "ladder_350m": _step(24, 1024),
}
