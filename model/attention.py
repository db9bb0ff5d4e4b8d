"""Grouped-query attention (Ainslie et al., 2023), its mask between documents, and the cache for decoding."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig
from model.linear import Linear
from model.rope import Rotation


class KeyValueCache:
    """One layer's keys and values of the tokens seen so far.

    It holds kv_heads heads, after the rotation and before any repetition: (batch, capacity, kv_heads,
    head_dim) each, allocated at the first use in the dtype and on the device of what arrives. Only for
    inference.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append (batch, new, kv_heads, head_dim) each; returns all so far, (batch, length, kv_heads,
        head_dim).

        Raises ValueError beyond the capacity.
        """
        batch, new, heads, head_dim = keys.shape
        if self.keys is None or self.values is None:
            self.keys = keys.new_empty(batch, self.capacity, heads, head_dim)
            self.values = torch.empty_like(self.keys)
        end = self.length + new
        if end > self.capacity:
            raise ValueError(f"The cache holds {self.capacity} tokens; {self.length} + {new} do not fit.")
        self.keys[:, self.length : end] = keys
        self.values[:, self.length : end] = values
        self.length = end
        return self.keys[:, :end], self.values[:, :end]


def attention_mask(
    length: int, start: int, documents: Tensor | None, device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor | None:
    """What is added to the scores: (batch or 1, 1, length, start + length), 0 where a query may see a key, else -inf.

    The queries are tokens start .. start + length - 1, the keys all tokens up to there. documents: (batch,
    length) ints, only with start 0; tokens of different documents do not see each other. Returns None where
    attention's own causal rule says the same, because kernels without a mask are faster.

    A mask of truth values would be turned into this one by each layer for itself, and each copy be kept for the
    backward pass: at 8,192 tokens in bf16, 134 MB a layer.
    """
    if documents is None and (start == 0 or length == 1):
        return None
    assert documents is None or start == 0, "a cache holds one document"
    seen = torch.ones(length, start + length, dtype=torch.bool, device=device).tril(start)[None, None]
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, -torch.inf)


class Attention(nn.Module):
    """Causal self-attention whose key and value heads are each shared by a group of query heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.group = config.heads // config.kv_heads
        kv_width = config.kv_heads * config.head_dim
        self.wq = Linear(config.dim, config.dim)
        self.wk = Linear(config.dim, kv_width)
        self.wv = Linear(config.dim, kv_width)
        self.wo = Linear(config.dim, config.dim)

    def forward(
        self, x: Tensor, rotation: Rotation, mask: Tensor | None = None, cache: KeyValueCache | None = None
    ) -> Tensor:
        """x: (batch, length, dim) -> the same; mask: as `attention_mask` returns it."""
        batch, length, _ = x.shape
        # The number of heads is left open (-1): under tensor parallelism a rank holds only some of them.
        q = rotation(self.wq(x).view(batch, length, -1, self.head_dim))  # (batch, length, heads, head_dim)
        k = rotation(self.wk(x).view(batch, length, -1, self.head_dim))  # (batch, length, kv_heads, head_dim)
        v = self.wv(x).view(batch, length, -1, self.head_dim)
        if cache is not None:
            k, v = cache.extend(k, v)
        # Measured on CPU (2 x 256 tokens, 6 heads over 2, width 48, float32, forward + backward): enable_gqa
        # is 2-6 % faster than repeating k and v, on 1 and 2 threads, with and without a mask. On CUDA the
        # flash kernel knows groups but neither masks nor float32, and the memory-efficient kernel the other
        # way round: asking it for groups ends silently in the kernel that stores all scores, so there the
        # heads are repeated.
        kernel_groups = not x.is_cuda or (mask is None and q.dtype != torch.float32)
        if self.group > 1 and not kernel_groups:
            k, v = k.repeat_interleave(self.group, dim=2), v.repeat_interleave(self.group, dim=2)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None and length > 1,  # a single query sees everything there is
            enable_gqa=self.group > 1 and kernel_groups,
        )
        joined: Tensor = self.wo(out.transpose(1, 2).flatten(2))  # (batch, length, dim)
        return joined
