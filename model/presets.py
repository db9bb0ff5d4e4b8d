"""The shapes of the published Llamas, by name, and a ladder of small models for experiments. Without torch."""

import difflib
from functools import partial

from drover.model.config import ModelConfig, RopeScaling


def preset(name: str) -> ModelConfig:
    """The shape with a name of PRESETS, such as `llama3_8b` or, the same, `Llama3-8B`.

    Raises ValueError, with the known names, for another name.
    """
    normalized = name.lower().replace("-", "_")
    if normalized not in PRESETS:
        close = difflib.get_close_matches(normalized, PRESETS, n=1)
        meant = f" Did you mean {close[0]}?" if close else ""
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


def ladder_step(depth: int) -> ModelConfig:
    """A step of the ladder: `depth` blocks, width 64 * depth, heads of width 64.

    With a constant ratio of width to depth, results of one step carry over to the next (Kaplan et al. 2020, figure 5:
    the ratio itself matters little). Heads share no keys or values, embeddings are tied, and the vocabulary is the
    tokenizer's.
    """
    return ModelConfig(dim=64 * depth, layers=depth, heads=depth, kv_heads=depth, multiple_of=64, context_length=1024,
                       rope_theta=10000.0, tied_embeddings=True)


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
    "ladder_1m": ladder_step(2),
    "ladder_15m": ladder_step(5),
    "ladder_42m": ladder_step(8),
    "ladder_110m": ladder_step(12),
    "ladder_350m": ladder_step(18),
}
