"""Keys and values of several sequences of unequal length. Each forward pass adds one token to all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from drover.model.attention.module import KeyValueCache

STEP = 256
"""The capacity grows by so many tokens at least."""


class RowCache:
    """One layer's keys and values, (rows, capacity, kv_heads, head_dim) each. See KeyValueCache."""

    def __init__(self, rows: RowCaches, prompts: Sequence[KeyValueCache]) -> None:
        self._rows = rows
        # Places after a row's end are zero: attention multiplies masked values by zero, which must not give NaN.
        self._keys = _padded([cache.keys for cache in prompts])
        self._values = _padded([cache.values for cache in prompts])

    @property
    def length(self) -> int:
        """Tokens of the longest row."""
        return max(self._rows.lengths)

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append one token to each row, (rows, 1, kv_heads, head_dim) each; returns all so far, (rows, length of the
        longest, kv_heads, head_dim)."""
        capacity, end = self._keys.shape[1], self.length + 1
        if end > capacity:
            more = (0, 0, 0, 0, 0, max(STEP, capacity // 2))
            self._keys = pad(self._keys, more)
            self._values = pad(self._values, more)
        self._keys[self._rows.ends] = keys[:, 0]
        self._values[self._rows.ends] = values[:, 0]
        return self._keys[:, :end], self._values[:, :end]

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows."""
        self._keys = self._keys[rows]
        self._values = self._values[rows]


class RowCaches:
    """Every row begins at place 0. Places after its end are masked.

    Args:
        prompts: the caches of each row's prompt, one for each layer, with a batch of one.

    Attributes:
        lengths: tokens in each row.
        ends: row numbers and the places of their next tokens, (rows,) int64 each, as indices.
        layers: the cache of each layer, for `Llama.forward`.
    """

    def __init__(self, prompts: Sequence[Sequence[KeyValueCache]]) -> None:
        self.lengths = [caches[0].length for caches in prompts]
        self.ends: tuple[Tensor, Tensor]
        self.layers = [RowCache(self, caches) for caches in zip(*prompts, strict=True)]

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows. rows: numbers, ascending."""
        if len(rows) < len(self.lengths):
            self.lengths = [self.lengths[row] for row in rows]
            for layer in self.layers:
                layer.keep(rows)

    def begin(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Prepare for one more token in every row. Returns positions and mask for the forward pass.

        positions: (rows, 1) int64. mask: (rows, 1, 1, keys), added to the scores: 0 for a row's own tokens and -inf for
        the places after them; None if all rows are equally long. dtype: of queries, keys and values.
        """
        lengths = torch.tensor(self.lengths, device=device)
        positions = lengths.unsqueeze(1)
        self.ends = (torch.arange(len(lengths), device=device), lengths)
        longest = max(self.lengths)
        if min(self.lengths) == longest:
            return positions, None
        behind = torch.arange(longest + 1, device=device) > positions
        mask = torch.zeros(behind.shape, dtype=dtype, device=device).masked_fill_(behind, -torch.inf)
        return positions, mask[:, None, None]

    def end(self) -> None:
        """After the pass: every row has one more token."""
        self.lengths = [length + 1 for length in self.lengths]


def _padded(rows: Sequence[Tensor | None]) -> Tensor:
    """Tensors (1, length, kv_heads, head_dim) as one (rows, longest, kv_heads, head_dim), with zeros at the ends."""
    return pad_sequence([row[0] for row in rows if row is not None], batch_first=True)
