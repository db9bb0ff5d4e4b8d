"""Which tokens of a row each rank of a context group holds, and which keys its queries see. No torch: loader threads
ask too.

Each document is cut into 2 x ranks chunks, and rank i takes the i-th from its head and the i-th from its tail: what the
one has less to look back on, the other has more (Grattafiori et al., 2024, section 3.3.2). A chunk's queries see the
document up to the chunk's end, so a rank's attention is one segment of queries and keys for each of its chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True)
class RowPlan:
    """How one row's tokens lie over the ranks.

    Attributes:
        edges: (documents, 2 x ranks + 1) int64, where in the row each chunk of each document begins; the last is where
            the document ends.
        places: (ranks, length / ranks) int32, where in the row the tokens of each rank are, ascending.
    """

    edges: np.ndarray
    places: np.ndarray

    def segments(self, rank: int) -> np.ndarray:
        """(segments, 4) int64 of the chunks that a rank has tokens of, ascending: the document's begin, the chunk's
        begin and end, all in the row, and 1 for a chunk of the tail, otherwise 0."""
        tail = self.edges.shape[1] - 2 - rank
        parts = [np.stack([self.edges[:, 0], self.edges[:, chunk], self.edges[:, chunk + 1],
                           np.full(len(self.edges), kind)], axis=1) for kind, chunk in enumerate((rank, tail))]
        both = np.stack(parts, axis=1).reshape(-1, 4)
        found: np.ndarray = both[both[:, 2] > both[:, 1]]
        return found


@lru_cache(maxsize=256)
def plan(lengths: tuple[int, ...], ranks: int) -> RowPlan:
    """The plan of a row whose documents have these lengths, the same wherever it is asked for.

    The chunks of a document are equally long up to one token. The tokens that are over go to the ranks in turn, once
    around to the heads and once to the tails, and on from there in the next document: every rank has as many tokens of
    the row, and of the work, of which a tail's token has more, about as much.

    Raises ValueError where `ranks` does not divide the row.
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
