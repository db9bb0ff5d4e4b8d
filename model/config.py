"""The network's shape: `ModelConfig`, with sizes and costs computed from it.

Pure arithmetic on Python numbers: planners and config loaders import this without torch.
"""

import math
from collections.abc import Collection
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field

_MODEL_CONFIG = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, defer_build=True)


MOST_WIDTH = 1 << 20
_MOST = {"layers": 4096, "vocab_size": 1 << 28, "context_length": 1 << 28, "rope_theta": 1e30}
"""The largest sizes that are accepted, far above those in use. A damaged file could name any size."""
_DERIVED = {"head_dim": "head_width", "ffn_dim": "hidden"}
"""Settings that may be left out, and the attributes that then have the value."""
_WIDTH_RULE = ("ffn_dim_multiplier", "multiple_of")
"""Settings that only decide `hidden`."""


class RopeScaling(BaseModel):
    """Llama 3.1's stretching of the rotary wavelengths for contexts beyond those of pretraining."""

    model_config = _MODEL_CONFIG

    factor: float
    """How many times longer slow wavelengths become: 8 in Llama 3.1 and 3.3, 32 in Llama 3.2 1B and 3B."""
    low_freq_factor: float = 1.0
    """Wavelengths above original_context_length / low_freq_factor are stretched by the whole factor."""
    high_freq_factor: float = 4.0
    """Wavelengths below original_context_length / high_freq_factor stay as they are."""
    original_context_length: int = 8192
    """The context length, in tokens, that the model was trained with before the extension."""

    def __str__(self) -> str:
        return (f"factor {self.factor:g} from {self.original_context_length:,} tokens, between frequency factors "
                f"{self.low_freq_factor:g} and {self.high_freq_factor:g}")


class ModelConfig(BaseModel):
    """All settings of the network's shape and arithmetic.

    Impossible combinations are accepted here and listed by `problems()`, so that a loader can report all of
    them at once. `Llama` refuses them.
    """

    model_config = _MODEL_CONFIG

    dim: int = 256
    """Width of the residual stream. Multiples of 128 use GPUs' matrix units fully."""
    layers: int = 6
    """Number of blocks. At equal size, deeper and narrower learns a little better and runs slower."""
    heads: int = 8
    """Query heads of each layer. Their width is dim / heads, unless head_dim is set (Llama: 128; 64 for the 1B)."""
    kv_heads: int = 4
    """Key and value heads of grouped-query attention (GQA), each shared by heads / kv_heads query heads. Fewer make the
    cache smaller when generating; equal to `heads` is classic multi-head attention."""
    ffn_dim: int | None = None
    """Width of the feed-forward layer. null derives it by Llama's rule from the two settings below."""
    ffn_dim_multiplier: float | None = None
    """Llama's rule: int(8 dim / 3), times this, rounded up to multiple_of. null means 1."""
    multiple_of: int = 256
    """The derived feed-forward width is rounded up to a multiple of this."""
    vocab_size: int | None = None
    """Rows of the embedding and output matrices. null, the usual choice, takes it from the tokenizer. It must be known
    before a model is built or its parameters are counted."""
    context_length: int = 2048
    """Longest sequence in tokens, in training and generation. Attention's share of the cost grows with it."""
    rope_theta: float = 500000.0
    """Base of the rotary wavelengths: 500000 in Llama 3, 10000 in Llama 2. Larger suits longer contexts."""
    rope_scaling: RopeScaling | None = None
    """Only for extending a trained model's context, as in Llama 3.1 and later. null for training from scratch."""
    norm_eps: float = 1e-5
    """Added to the mean square inside RMSNorm: 1e-5 since Llama 1 65B, 1e-6 in the smaller models of Llama 1."""
    tied_embeddings: bool = False
    """One matrix for embedding and output (Llama 3.2 1B and 3B). Worth it while vocab_size * dim is a large
    part of all parameters."""
    head_dim: int | None = Field(None, json_schema_extra={"added": True})  # as by `added` of pipeline/config/section.py
    """Width of a head if it is not dim / heads. null: dim / heads."""

    def problems(self) -> list[str]:
        """Every impossible combination as a sentence with its numbers; empty if the model can be built."""
        problems = []
        for name in ("dim", "layers", "heads", "kv_heads", "multiple_of", "context_length", "rope_theta", "norm_eps",
                     "ffn_dim", "ffn_dim_multiplier", "vocab_size", "head_dim"):
            value, most = getattr(self, name), _MOST.get(name, MOST_WIDTH)
            if value is None:
                continue
            if value <= 0:
                problems.append(f"{name} must be above 0, not {value}.")
            elif value > most:
                problems.append(f"{name} must be at most {most:,}, not {value:,}.")
        if self.dim > 0 and self.heads > 0:
            if self.dim % self.heads:  # with head_dim too: transformers refuses such a Llama
                problems.append(f"dim ({self.dim}) must be divisible by heads ({self.heads}).")
            elif self.head_width % 2:
                problems.append((f"dim / heads ({self.dim} / {self.heads} = {self.head_width})" if self.head_dim is None
                              else f"head_dim ({self.head_dim})")
                             + " must be even: rotary embedding turns pairs of dimensions.")
        if self.heads > 0 and self.kv_heads > 0 and self.heads % self.kv_heads:
            problems.append(f"heads ({self.heads}) must be divisible by kv_heads ({self.kv_heads}).")
        if self.ffn_dim is not None and self.ffn_dim_multiplier is not None:
            problems.append(
                f"ffn_dim ({self.ffn_dim}) and ffn_dim_multiplier ({self.ffn_dim_multiplier}) "
                "both decide the feed-forward width: set one of them."
            )
        return problems + self._scaling_problems()

    def _scaling_problems(self) -> list[str]:
        if (scaling := self.rope_scaling) is None:
            return []
        original = scaling.original_context_length
        rules = [
            (scaling.low_freq_factor <= 0,
             f"rope_scaling.low_freq_factor must be above 0, not {scaling.low_freq_factor}."),
            (scaling.high_freq_factor <= scaling.low_freq_factor,
             f"rope_scaling.high_freq_factor ({scaling.high_freq_factor}) must be above low_freq_factor "
             f"({scaling.low_freq_factor})."),
            (scaling.factor < 1, f"rope_scaling.factor must be at least 1, not {scaling.factor}."),
            (original <= 0, f"rope_scaling.original_context_length must be above 0, not {original}."),
            (original >= self.context_length,
             f"rope_scaling.original_context_length ({original}) must be below context_length ({self.context_length}), "
             f"because rope_scaling extends the context (transformers warns of such a model). Raise context_length, or "
             f"leave rope_scaling out to train from scratch.")]
        return [sentence for holds, sentence in rules if holds]

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads if self.head_dim is None else self.head_dim

    @property
    def hidden(self) -> int:
        """Width of the feed-forward layer: ffn_dim, or Llama's rule (llama-models, llama3/model.py).

        The two truncations happen in this order: Llama 3.2 1B is 5461 -> 8191 -> 8192.
        """
        if self.ffn_dim is not None:
            return self.ffn_dim
        width = int(2 * (4 * self.dim) / 3)
        if self.ffn_dim_multiplier is not None:
            width = int(min(self.ffn_dim_multiplier * width, MOST_WIDTH**2))
        multiple = max(1, self.multiple_of)  # `problems` refuses what is impossible
        return multiple * math.ceil(width / multiple)

    @property
    def matmul_parameter_count(self) -> int:
        """Parameters in matrix products with every token: the blocks' matrices and the output layer (even if tied)."""
        attention = 2 * self.dim * (self.heads + self.kv_heads) * self.head_width
        feed_forward = 3 * self.dim * self.hidden
        return self.layers * (attention + feed_forward) + self._known_vocab_size() * self.dim

    @property
    def non_embedding_parameter_count(self) -> int:
        """Parameters of blocks and norms: without the token embedding and without the output layer."""
        norms = (2 * self.layers + 1) * self.dim
        return self.matmul_parameter_count - self._known_vocab_size() * self.dim + norms

    @property
    def parameter_count(self) -> int:
        """All parameters, a tied matrix counted once."""
        matrices = 1 if self.tied_embeddings else 2
        return self.non_embedding_parameter_count + matrices * self._known_vocab_size() * self.dim

    def differences(self, other: "ModelConfig", free: Collection[str] = ()) -> dict[str, tuple[Any, Any]]:
        """The settings in which another network is not this one, each with the value here and the value there.

        All fields are compared but those in `free`, a later field too. A width that is derived equals one that is set.
        """
        differing = {}
        for name in type(self).model_fields:
            if name in free or name in _WIDTH_RULE:
                continue
            own, others = (getattr(shape, _DERIVED.get(name, name)) for shape in (self, other))
            if own != others:
                differing[name] = own, others
        return differing

    def flops_per_token(self, sequence_length: int, causal: bool) -> float:
        """Floating-point operations to train on one token: forward, and twice as many backward.

        full attention:   6 * matmul_parameter_count + 12 * layers * width * sequence_length
        causal attention: 6 * matmul_parameter_count +  6 * layers * width * sequence_length

        A multiply-add counts 2; width is heads * head_width, which is dim in every Llama. The attention term is the two
        products QK^T and PV, 2 * 2 * width * sequence_length forward per layer; a causal query sees half of the keys on
        average. The full form is PaLM's (appendix B), which most published MFU numbers use; the causal one is closer to
        what fused kernels compute. Neither counts the embedding lookup, norms or recomputation.
        """
        seen = self.layers * sequence_length / (2 if causal else 1)
        return 6.0 * self.matmul_parameter_count + 12.0 * self.heads * self.head_width * seen

    def kv_cache_bytes(self, batch: int, length: int, bytes_per_value: int) -> int:
        """Bytes of keys and values kept for `batch` sequences of `length` tokens, all layers together."""
        return 2 * self.layers * batch * length * self.kv_heads * self.head_width * bytes_per_value

    def with_vocabulary(self, size: int | None) -> Self:
        """The network with a vocabulary of `size`, unless it has one of its own. None: not known yet."""
        return self.model_copy(update={"vocab_size": self.vocab_size or size})

    def _known_vocab_size(self) -> int:
        if self.vocab_size is None:
            raise ValueError("vocab_size is None: take it from the tokenizer before counting or building.")
        return self.vocab_size
