"""Keys and values of several sequences of unequal length. Each forward pass adds one token to all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drover.model.attention.module import KeyValueCache

STEP = 256
"""The capacity in tokens is a multiple of this."""


class RowCache:
    """One layer's part. See KeyValueCache."""

    def __init__(self, rows: RowCaches, layer: int) -> None:
        self._rows, self._layer = rows, layer

    @property
    def length(self) -> int:
        """Tokens of the longest row."""
        return max(self._rows.lengths)

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append one token to each row, (rows, 1, kv_heads, head_dim) each; returns all so far, (rows, length of the
        longest, kv_heads, head_dim)."""
        return self._rows.extended(self._layer, keys, values)


class RowCaches:
    """Every row begins at place 0. Places after its end are masked. Rows can be added and removed at any time.

    Attributes:
        lengths: tokens in each row.
        layers: the cache of each layer, for `Llama.forward`.
    """

    def __init__(self, layers: int) -> None:
        self.lengths: list[int] = []
        self.layers = [RowCache(self, layer) for layer in range(layers)]
        self._held: Tensor | None = None  # (layers, 2, rows with room, tokens with room, kv_heads, head_dim)
        self._views: list[tuple[Tensor, Tensor]] = []  # of it, the keys and values of each layer
        self._where: tuple[Tensor, Tensor] | int = 0
        self._end = 0

    def append(self, caches: Sequence[KeyValueCache]) -> None:
        """Add a row after the others, from `caches` with a batch of one."""
        first, length, row = caches[0], caches[0].length, len(self.lengths)
        assert first.keys is not None
        held = self._with_room(row + 1, length + 1, first.keys)
        for layer, cache in enumerate(caches):
            assert cache.keys is not None and cache.values is not None
            held[layer, 0, row, :length] = cache.keys[0, :length]
            held[layer, 1, row, :length] = cache.values[0, :length]
        self.lengths.append(length)

    def remove(self, row: int) -> None:
        """Remove a row. The last row moves to its place."""
        last = len(self.lengths) - 1
        assert self._held is not None
        if row != last:
            self._held[:, :, row] = self._held[:, :, last]
            self.lengths[row] = self.lengths[last]
        self._held[:, :, last] = 0  # a row may have NaN keys, and the next row here must not get them
        self.lengths.pop()
        if not self.lengths:
            self._held, self._views = None, []

    def begin(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Prepare for one more token in every row. Returns positions and mask for the forward pass.

        positions: (rows, 1) int64. mask: (rows, 1, 1, keys), added to the scores: 0 for a row's own tokens and -inf for
        the places after them; None if all rows are equally long. dtype: of queries, keys and values.
        """
        assert self._held is not None
        end = max(self.lengths)
        self._with_room(len(self.lengths), end + 1, self._held)
        self._end = end + 1
        lengths = torch.tensor(self.lengths, device=self._held.device)
        positions = lengths.unsqueeze(1)
        if min(self.lengths) == end:
            self._where = end
            return positions, None
        self._where = (torch.arange(len(self.lengths), device=lengths.device), lengths)
        behind = torch.arange(end + 1, device=lengths.device) > positions
        mask = torch.zeros(behind.shape, dtype=dtype, device=lengths.device).masked_fill_(behind, -torch.inf)
        return positions, mask[:, None, None]

    def extended(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `RowCache.extend`, for this layer."""
        rows = keys.shape[0]
        all_keys, all_values = self._views[layer]
        if isinstance(self._where, int):
            all_keys[:rows, self._where:self._end] = keys
            all_values[:rows, self._where:self._end] = values
        else:
            all_keys[self._where] = keys[:, 0]
            all_values[self._where] = values[:, 0]
        return all_keys[:rows, :self._end], all_values[:rows, :self._end]

    def end(self) -> None:
        """After the pass: every row has one more token."""
        self.lengths = [length + 1 for length in self.lengths]

    def _with_room(self, rows: int, tokens: int, like: Tensor) -> Tensor:
        """`_held`, enlarged if it is too small, by more than is needed now, so that it is rarely copied.

        like: any tensor (..., kv_heads, head_dim). New places are zero: attention multiplies masked values by zero,
        which must not give NaN.
        """
        old = self._held
        if old is not None:
            if old.shape[2] >= rows and old.shape[3] >= tokens:
                return old
            rows = old.shape[2] if old.shape[2] >= rows else max(rows, 2 * old.shape[2])
            tokens = old.shape[3] if old.shape[3] >= tokens else max(tokens, 3 * old.shape[3] // 2)
        tokens = -(-tokens // STEP) * STEP
        new = like.new_zeros(len(self.layers), 2, rows, tokens, *like.shape[-2:])
        if old is not None:
            new[:, :, :old.shape[2], :old.shape[3]] = old
        self._held, self._views = new, [(layer[0], layer[1]) for layer in new]
        return new
