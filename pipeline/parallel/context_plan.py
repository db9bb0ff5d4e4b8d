"""Which tokens of a row each rank of a context group holds, and which keys its queries see. Without torch, because
loader threads use it too.

Each document is cut into 2 x ranks chunks. Rank i takes the i-th from the start (a head) and the i-th from the end (a
tail): together they have as much to look back on as those of any other rank (Grattafiori et al., 2024, section 3.3.2).
A chunk's queries see the document up to the chunk's end, so a rank attends to one segment of queries and keys for each
of its chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True)
class RowPlan:
    """How one row's tokens are distributed over the ranks.

    Attributes:
        edges: (documents, 2 x ranks + 1) int64, the position in the row at which each chunk of each document begins;
            the last is the document's end.
        places: (ranks, length / ranks) int32, the positions in the row of each rank's tokens, ascending.
    """

    edges: np.ndarray
    places: np.ndarray

    def segments(self, rank: int) -> np.ndarray:
        """(segments, 4) int64, a row for each chunk that has tokens on this rank, ascending: the positions of the
        document's begin and of the chunk's begin and end; then 1 for a tail, 0 for a head."""
        tail = self.edges.shape[1] - 2 - rank
        parts = [np.stack([self.edges[:, 0], self.edges[:, chunk], self.edges[:, chunk + 1],
                           np.full(len(self.edges), kind)], axis=1) for kind, chunk in enumerate((rank, tail))]
        both = np.stack(parts, axis=1).reshape(-1, 4)
        return both[both[:, 2] > both[:, 1]]


@lru_cache(maxsize=256)
def plan(lengths: tuple[int, ...], ranks: int) -> RowPlan:
    """The plan of a row whose documents have these lengths.

    The chunks of a document differ in length by at most one token. The remaining tokens go to the ranks in turn, first
    to heads, then to tails, and the next document continues the turn. So every rank has equally many tokens of the row,
    and about equal work, although a tail's token has more of it.

    Raises ValueError if `ranks` does not divide the row.
    """
    if sum(lengths) % ranks:
        raise ValueError(f"A row of {sum(lengths)} tokens cannot be split evenly over {ranks} ranks.")
    length, chunk = np.array(lengths, dtype=np.int64)[:, None], np.arange(2 * ranks)
    owners = np.minimum(chunk, chunk[::-1])
    over = length % len(chunk)
    turn = (owners + ranks * (chunk >= ranks) - (np.cumsum(over)[:, None] - over)) % len(chunk)
    sizes = length // len(chunk) + (turn < over)
    begins = np.cumsum(length)[:, None] - length
    edges = np.concatenate([begins, begins + np.cumsum(sizes, axis=1)], axis=1)
    owner = np.repeat(np.tile(owners, len(lengths)), sizes.ravel())  # of each token
    places = np.argsort(owner, kind="stable").astype(np.int32)  # 256 plans of long rows are held
    return RowPlan(edges, places.reshape(ranks, -1))
