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

    def work(self) -> list[int]:
        """Pairs of query and key that each rank computes."""
        pairs = []
        for rank in range(len(self.places)):
            document, begin, end, _ = self.segments(rank).T
            pairs.append(int(((end - begin) * (begin + end + 1 - 2 * document)).sum()) // 2)
        return pairs


@lru_cache(maxsize=256)
def plan(lengths: tuple[int, ...], ranks: int) -> RowPlan:
    """The plan of a row whose documents have these lengths, the same wherever it is asked for.

    The chunks of a document are equally long up to one token. Who gets the tokens that are over is chosen such that
    every rank has as many tokens of the row, and, as far as single tokens can do that, as much work.

    Raises ValueError where `ranks` does not divide the row.
    """
    if sum(lengths) % ranks:
        raise ValueError(f"A row of {sum(lengths)} tokens cannot be split evenly over {ranks} ranks.")
    chunks = 2 * ranks
    sizes = np.repeat(np.array(lengths, dtype=np.int64)[:, None] // chunks, chunks, axis=1)
    left = [int((np.array(lengths) % chunks).sum()) // ranks] * ranks  # tokens over that each rank is still to get
    work = [0] * ranks
    for row, length in zip(sizes, lengths, strict=True):
        row += _extra(length % chunks, left, work)
        _add_work(row, work)
    begins = np.cumsum([0, *lengths[:-1]], dtype=np.int64)
    edges = np.concatenate([begins[:, None], begins[:, None] + np.cumsum(sizes, axis=1)], axis=1)
    owners = np.minimum(np.arange(chunks), np.arange(chunks)[::-1])
    owner = np.repeat(np.tile(owners, len(lengths)), sizes.ravel())  # of each token
    places = np.argsort(owner, kind="stable").astype(np.int32)  # 256 plans of long rows are held
    return RowPlan(edges, places.reshape(ranks, -1))


def _extra(over: int, left: list[int], work: list[int]) -> np.ndarray:
    """(2 x ranks,) of 0 and 1: which chunks of a document get one of the tokens that are over; taken off `left`.

    Ranks with most left to get come first, so that all get theirs in the end. Of those that get one token, the half
    that has had less work gets it in the tail, where it sees more; an odd one in the middle, if it has had less than
    the mean.
    """
    ranks = len(left)
    twice = max(0, over - ranks)  # these get one in the head and one in the tail
    chosen = sorted(range(ranks), key=lambda rank: (-left[rank], work[rank]))[:over]
    single = sorted(chosen[twice:], key=lambda rank: work[rank])
    middle = len(single) // 2
    if len(single) % 2 and work[single[middle]] * ranks < sum(work):
        middle += 1
    tails, heads = {*chosen[:twice], *single[:middle]}, {*chosen[:twice], *single[middle:]}
    for rank in range(ranks):
        left[rank] -= (rank in heads) + (rank in tails)
    return np.array([rank in heads for rank in range(ranks)] + [rank in tails for rank in reversed(range(ranks))],
                    dtype=np.int64)


def _add_work(sizes: np.ndarray, work: list[int]) -> None:
    """Add a document's pairs of query and key to those of each rank; sizes: of its chunks."""
    ends = np.cumsum(sizes)
    pairs = (sizes * (2 * ends - sizes + 1) // 2).tolist()
    for rank in range(len(work)):
        work[rank] += pairs[rank] + pairs[-1 - rank]
