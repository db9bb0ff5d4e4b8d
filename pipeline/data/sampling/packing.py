"""The plan of a best-fit packing in files, and its sequences: whole documents side by side, padding behind them.

Each token shard is planned by itself (best_fit.py), once for a length, into a file beside the run: where a sequence's
pieces lie is then a few bytes to read, and nothing of it stays in memory. An index holds every file's hash; it is
written last.

A plan's file: bins + 1 numbers of 32 bits, where each sequence begins among the pieces, then a number of 64 bits a
piece: 40 bits of where it begins in the shard, 23 of its length, 1 whether its document goes on. Little endian.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.data.sampling.best_fit import Pieces, best_fit, cut_runs, joined_runs, pieces_of
from pipeline.data.sampling.order import Pool
from pipeline.data.sampling.streams import Held, Span
from pipeline.data.shard_table import Shards, ShardTable, most_open
from pipeline.data.token_shards import Descriptor, TokenShard
from pipeline.errors import UserError
from pipeline.files import atomic_file

PLANNED = ("bins", "pieces", "documents", "cut", "tokens")
"""What is counted of a shard's plan: sequences, pieces, documents with tokens, those that are cut, tokens."""
LENGTH_BITS, START_BITS = 23, 40
_BIN, _PIECE = np.dtype("<u4"), np.dtype("<u8")
_MEND = "Start training again: it compares the plan of the packing with its index, and makes anew what is damaged."


@dataclass(frozen=True)
class Packing:
    """The plan of training shards of a table: of all their documents, or of what is left of some.

    Attributes:
        folder: where the files are. table: of the shards. length: tokens of a sequence.
        numbers: (shards, 5) int64, `PLANNED`, a row for each of the table; zeros for shards that it has nothing of.
        sha256: (shards, 32) uint8, of the plans' files.
    """

    folder: Path
    table: ShardTable
    length: int
    numbers: NDArray[np.int64]
    sha256: NDArray[np.uint8]

    def path(self, row: int) -> Path:
        """The file of a shard's plan."""
        return plan_path(self.folder, self.table, row)

    def figures(self) -> dict[str, Any]:
        """Sequences, the share of padding in them, documents, and the share of these that is cut."""
        bins, _, documents, cut, tokens = self.numbers.sum(0).tolist()
        return {"sequences": bins, "padding_share": 1 - tokens / max(1, bins * self.length), "documents": documents,
                "documents_cut": cut, "cut_share": cut / max(1, documents)}

    def __str__(self) -> str:
        found = self.figures()
        return (f"best-fit packing: {found['sequences']:,} sequences of {self.length:,} tokens, "
                f"{found['padding_share']:.3%} of them padding; {found['documents_cut']:,} of {found['documents']:,} "
                f"documents ({found['cut_share']:.2%}) are longer and cut")


def plan_path(folder: Path, table: ShardTable, row: int) -> Path:
    """The file of a shard's plan, inside the folder of a plan."""
    return folder / Path(table.path(row)).with_suffix(".bins")


def write_plan(path: Path, shard: TokenShard, length: int) -> tuple[list[int], bytes]:
    """Plan a shard, and write its file; the counts, `PLANNED`, and the file's sha256."""
    offsets = shard.read_offsets()
    return _write(path, shard, pieces_of(offsets, length), np.diff(offsets), length)


def write_rest(path: Path, shard: TokenShard, plans: Plans, row: int, taken: NDArray[np.bool_],
               length: int) -> tuple[list[int], bytes]:
    """Plan what another plan's sequences leave of a shard: see `write_plan`; documents are counted as far as they are
    left, each part that stands alone by itself.

    Args:
        plans, row: the other plan, and the shard's row in the table.
        taken: (bins,) whether each of its sequences of the shard is used.
    """
    ends, pieces = plans.whole(row)
    left = ~taken.repeat(np.diff(ends))
    runs = joined_runs(Pieces(pieces.starts[left], pieces.lengths[left], pieces.goes_on[left]))
    return _write(path, shard, cut_runs(runs, length), runs.ends - runs.starts, length)


def _write(path: Path, shard: TokenShard, pieces: Pieces, sizes: NDArray[np.int64],
           length: int) -> tuple[list[int], bytes]:
    if shard.token_count >> START_BITS or length >> LENGTH_BITS or len(pieces.starts) >> 8 * _BIN.itemsize:
        raise UserError(f"train.packing best_fit knows shards of up to {1 << START_BITS:,} tokens, {1 << 32:,} pieces "
                        f"and sequences of up to {1 << LENGTH_BITS:,}; {shard.name} has {shard.token_count:,} and "
                        f"{len(pieces.starts):,}, and train.sequence_length is {length:,}.")
    order, ends = best_fit(pieces.lengths, length)
    word = pieces.starts.astype(_PIECE) << (LENGTH_BITS + 1)
    word |= (pieces.lengths << 1 | pieces.goes_on).astype(_PIECE)
    content = ends.astype(_BIN).tobytes() + word[order].tobytes()
    with atomic_file(path) as file:
        file.write(content)
    return [len(ends) - 1, len(order), int((sizes > 0).sum()), int((sizes > length).sum()),
            int(sizes.sum())], hashlib.sha256(content).digest()


class Plans:
    """The files of a packing, read a sequence at a time; those read last are kept open. Threads may share it."""

    def __init__(self, packing: Packing) -> None:
        self.packing = packing
        self._file = lru_cache(most_open())(self._opened)

    def sequences(self, shards: Sequence[TokenShard]) -> Bins:
        """The sequences that the packing makes of some shards, which must be of its table."""
        if not isinstance(shards, Shards) or shards.opened.table is not self.packing.table:
            raise ValueError("the packing is of other shards")
        return Bins(shards, self)

    def pieces(self, row: int, place: int) -> Pieces:
        """The pieces of sequence number `place` of the shard in that row of the table."""
        file, bins = self._file(row), int(self.packing.numbers[row, 0])
        first, stop = self._read(file, row, 4 * place, _BIN, 2).tolist()
        word = self._read(file, row, 4 * (bins + 1) + 8 * first, _PIECE, stop - first)
        return _unpacked(word)

    def whole(self, row: int) -> tuple[NDArray[np.int64], Pieces]:
        """All pieces of the shard in that row of the table, and where each sequence begins among them, with the end of
        the last."""
        bins, pieces = self.packing.numbers[row, :2].tolist()
        if not bins:
            return np.zeros(1, np.int64), _unpacked(np.empty(0, _PIECE))
        file = self._file(row)
        ends = self._read(file, row, 0, _BIN, bins + 1).astype(np.int64)
        return ends, _unpacked(self._read(file, row, 4 * (bins + 1), _PIECE, pieces))

    def _opened(self, row: int) -> Descriptor:
        bins, pieces = self.packing.numbers[row, :2].tolist()
        path, wanted = self.packing.path(row), 4 * (bins + 1) + 8 * pieces
        try:
            file = Descriptor.of(path)
            size = os.fstat(file.number).st_size
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}. {_MEND}") from None
        if size != wanted:
            raise UserError(f"{path} is torn: it has {size} bytes instead of {wanted}. {_MEND}")
        return file

    def _read(self, file: Descriptor, row: int, at: int, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
        read = os.pread(file.number, count * dtype.itemsize, at) if count > 0 else b""
        if count < 1 or len(read) != count * dtype.itemsize:
            raise UserError(f"{self.packing.path(row)} was changed after training began. {_MEND}")
        return np.frombuffer(read, dtype)


def _unpacked(words: NDArray[Any]) -> Pieces:
    """Pieces from a plan's file."""
    lengths = (words >> 1) & ((1 << LENGTH_BITS) - 1)
    return Pieces((words >> (LENGTH_BITS + 1)).astype(np.int64), lengths.astype(np.int64), (words & 1).astype(bool))


class Bins:
    """The sequences that a packing makes of some shards, shard after shard. Threads may share it."""

    def __init__(self, shards: Shards, plans: Plans) -> None:
        self.shards, self.plans, self.length = shards, plans, plans.packing.length
        self._bins = plans.packing.numbers[shards.rows, PLANNED.index("bins")]
        self._ends = np.cumsum(self._bins)

    def pool(self, name: str) -> Pool:
        """See Sequences."""
        digest = hashlib.sha256(self.plans.packing.sha256[self.shards.rows].tobytes()).hexdigest()
        tokens = self.plans.packing.numbers[self.shards.rows, PLANNED.index("tokens")]
        return Pool(name, int(tokens.sum()), self.count, digest)

    def fill(self, number: int, row: np.ndarray) -> tuple[np.ndarray, int]:
        """See Sequences. Padding is of the id 0."""
        shard, pieces = self._pieces(number)
        if pieces.goes_on[0]:  # it fills the sequence, and what comes after it is its last label
            start = int(pieces.starts[0])
            row[:] = shard.tokens(start, start + self.length + 1)
            return np.zeros(1, np.int64), self.length
        places = np.concatenate([[0], np.cumsum(pieces.lengths)])
        *begins, used = places.tolist()
        for at, start, length in zip(begins, pieces.starts.tolist(), pieces.lengths.tolist(), strict=True):
            row[at:at + length] = shard.tokens(start, start + length)
        row[used:] = 0
        return places, used

    def spans(self, number: int) -> list[Span]:
        """See Sequences."""
        shard, pieces = self._pieces(number)
        return [Span(shard, start, start + length)
                for start, length in zip(pieces.starts.tolist(), pieces.lengths.tolist(), strict=True)]

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """See Sequences."""
        return self.shards.rows[np.unique(self._ends.searchsorted(numbers, side="right"))]

    def place(self, number: int, place: int) -> tuple[TokenShard, int]:
        """See Sequences; not for padding."""
        for span in self.spans(number):
            if place < span.stop - span.start:
                return span.shard, span.start + place
            place -= span.stop - span.start
        return span.shard, span.stop  # the last label of a document that goes on

    def holding(self, index: int, begin: int, end: int) -> Held:
        """See Sequences. The shard's whole plan is read for it. Where that is of what is left of documents, a sequence
        may have several parts of one, and comes as often."""
        if begin >= end:
            return Held(*(np.empty(0, np.int64) for _ in range(3)))
        ends, pieces = self.plans.whole(int(self.shards.rows[index]))
        stops = pieces.starts + pieces.lengths
        found = np.flatnonzero((pieces.starts < end) & (stops > begin))  # pieces are in the order of their sequences
        numbers = ends.searchsorted(found, side="right") - 1 + self.first(index)
        return Held(numbers, np.maximum(pieces.starts[found], begin), np.minimum(stops[found], end))

    @property
    def count(self) -> int:
        """How many there are."""
        return int(self._bins.sum())

    def numbers_in(self, row: int) -> np.ndarray:
        """The numbers of the sequences of the shard in that row of the table, int64."""
        [index] = np.flatnonzero(self.shards.rows == row).tolist()
        return np.arange(self.first(index), int(self._ends[index]), dtype=np.int64)

    def first(self, index: int) -> int:
        """The number of the first sequence of shard number `index`."""
        return int(self._ends[index] - self._bins[index])

    def pieces_of(self, index: int, taken: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of shard number `index`, [starts, stops), that are in sequences of which `taken`, (sequences,),
        says so."""
        ends, pieces = self.plans.whole(int(self.shards.rows[index]))
        first = self.first(index)
        mine = taken[first:first + len(ends) - 1].repeat(np.diff(ends))
        return pieces.starts[mine], (pieces.starts + pieces.lengths)[mine]

    def _pieces(self, number: int) -> tuple[TokenShard, Pieces]:
        index = int(self._ends.searchsorted(number, side="right"))
        place = number - self.first(index)
        return self.shards[index], self.plans.pieces(int(self.shards.rows[index]), place)
