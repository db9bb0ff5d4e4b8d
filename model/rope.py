"""Rotary position embedding (Su et al., 2021) in Meta's layout, with Llama 3.1's frequency scaling.

Dimensions 2i and 2i+1 of a head are one pair, rotated by position * theta^(-2i / head_dim). Hugging Face pairs
i with i + head_dim/2 instead; `drover.pipeline.formats.huggingface` permutes the weights between the two.
As a complex number, a pair is rotated by one product. Compilers fuse real arithmetic far better, so there are both
ways.
"""

import math

import torch
from torch import Tensor

from drover.model.config import ModelConfig, RopeScaling


def rotary_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> Tensor:
    """Angle per position of each pair: (head_dim / 2,) float64 on the CPU, from fast to slow.

    Llama 3.1's scaling follows llama-models' apply_scaling: wavelengths below original / high_freq_factor stay, those
    above original / low_freq_factor are stretched by the factor, those between are blended.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
    frequencies = theta**-exponents
    if scaling is None:
        return frequencies
    turns = scaling.original_context_length * frequencies / (2 * math.pi)  # within the original context
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the adjacent pairs of x, in real arithmetic.

    x: (batch, length, heads, head_dim); cos, sin: (batch or 1, length, head_dim / 2), float32 or float64.
    The arithmetic is in the table's precision, by type promotion; the result has x's dtype and shape.
    """
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)  # each (batch, length, heads, head_dim / 2)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return turned.flatten(-2).to(x.dtype)


class Rotation:
    """The cosines and sines of one forward's positions, shared by all layers. Call it to rotate x.

    NOTE: deliberately neither a tensor, a tuple nor a dataclass. FSDP's mixed precision looks for tensors in those, in
    the arguments of every wrapped block, and casts floats to bfloat16. That would silently ruin the angles.
    """

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos = cos
        self.sin = sin
        self.turns = None if torch.compiler.is_compiling() else torch.complex(cos, sin).unsqueeze(-2)

    def __call__(self, x: Tensor) -> Tensor:
        """`rotate` x: (batch, length, heads, head_dim).

        On a CPU, one complex product takes an eighth of the time of six real ones with their copies, forward and
        backward.
        """
        if self.turns is None or torch.compiler.is_compiling():
            return rotate(x, self.cos, self.sin)
        pairs = torch.view_as_complex(x.to(self.cos.dtype).contiguous().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * self.turns).flatten(-2).to(x.dtype)


class RotaryTable:
    """Cosines and sines of positions 0 .. context_length - 1, computed on first use on each device.

    Neither parameter nor buffer: after a model is built on the meta device and moved by to_empty, a buffer would
    silently contain whatever was in memory.

    Attributes:
        precision: of the angles, before their cosines and sines are rounded to the element type of the pass.
    """

    precision = torch.float64

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def at(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """The rotation for positions (batch or 1, length), int64. Raises IndexError for positions >= context_length."""
        cos, sin = self._table(positions.device, dtype)
        # Indexing copies. A slice of a table that was created in inference mode could not be used in training.
        return Rotation(cos[positions], sin[positions])

    def _table(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        key = (device, dtype)
        if key not in self._tables:
            config = self.config
            frequencies = rotary_frequencies(config.head_width, config.rope_theta, config.rope_scaling)
            positions = torch.arange(config.context_length, dtype=self.precision, device="cpu")
            angles = torch.outer(positions, frequencies.to(self.precision))
            self._tables[key] = angles.cos().to(device, dtype), angles.sin().to(device, dtype)
        return self._tables[key]
