"""One token shard's part of an export: the job of a worker process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from drover.pipeline.contract.input_check import output, refuse_changed
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import sha256_file
from drover.pipeline.data.token_shards import TokenShard

BLOCK_TOKENS = 1 << 22
"""Tokens that a process holds at once."""
Counts = dict[str, dict[str, int]]
"""Documents, exported tokens, bytes of text and shards of each source."""
Region = tuple[str, int, int, str]
"""A written region of a file: its path in the export's folder, first byte, bytes, and their sha256."""


def region_of(path: Path) -> Region:
    """A whole file as a region."""
    return path.name, 0, path.stat().st_size, sha256_file(path)


@dataclass(frozen=True)
class Part:
    """One token shard's part.

    Attributes:
        number, count: of the part, from 0, and how many there are.
        folder: of the stage encode. shard: the token shard, which the worker opens.
        before, own: documents and tokens of its source before it in the export, and its own.
        source_documents: documents of its source in all.
        left_out: the id of the BOS to remove from each document; None: keep it.
    """

    number: int
    count: int
    folder: Path
    shard: TokenShard
    before: dict[str, int]
    own: dict[str, int]
    source_documents: int
    left_out: int | None

    def refuse_changed(self) -> None:
        """UserError if the shard has changed since the stage encode wrote it."""
        if not self.shard.path.is_file():
            raise UserError(f"{self.shard.path} is missing. Run --stage encode again: it makes only what is missing.")
        refuse_changed(output(self.folder, self.shard.record, "encode"))

    def lengths(self) -> np.ndarray:
        """Exported tokens of each document."""
        return np.diff(self.shard.read_offsets()) - (self.left_out is not None)

    def blocks(self) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield the exported tokens in blocks of one or more whole documents: first document, end, tokens.

        Raises:
            UserError: BOS is to be removed, and a document does not begin with it.
        """
        offsets, first = self.shard.read_offsets(), 0
        while first < self.shard.documents:
            stop = max(first + 1, int(np.searchsorted(offsets, offsets[first] + BLOCK_TOKENS, "right")) - 1)
            tokens = self.shard.tokens(int(offsets[first]), int(offsets[stop]))
            if self.left_out is not None:
                starts = offsets[first:stop] - offsets[first]
                if (np.diff(offsets[first:stop + 1]) < 1).any() or (tokens[starts] != self.left_out).any():
                    raise UserError(f"{self.shard.path} has a document that does not begin with BOS ({self.left_out}), "
                                    f"so there is none to leave out. Run the command without --without-bos.")
                tokens = np.delete(tokens, starts)
            yield first, stop, tokens
            first = stop
