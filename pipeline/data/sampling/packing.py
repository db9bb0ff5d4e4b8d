"""Documents packed into sequences by best fit (best_fit.py): documents side by side, then padding.

Each token shard is packed by itself, once for a length, into a file in the run's folder. To find the pieces of a
sequence, a few bytes of it are read; nothing stays in memory. Each length of sequences has such a plan of all
documents. Another is made of what an epoch has left of a source when the length changes (order.py). At every start each
rank checks the files of some shards, and makes those again that are missing, damaged or of another shard.

A file is the sha256 of what follows; the sha256 of what it was made from (`Planning.identity`); and numbers of 64 bits,
little endian: the counts (`PLANNED`); where each sequence begins among the pieces, and the end of the last; and two a
piece, where it begins in the shard, and twice its length, plus 1 where its document continues.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from drover.pipeline.core.errors import UserError, all_problems
from drover.pipeline.core.files import atomic_file, opened, sha256_json
from drover.pipeline.data.sampling.best_fit import Pieces, best_fit, documents_at
from drover.pipeline.data.sampling.order import Cursor, Segment, permute
from drover.pipeline.data.sampling.sequences import Parts, Span
from drover.pipeline.data.token_shards import Descriptor, OpenShards, Shards, TokenShard, most_open, open_sized

FORMAT = 2
AT_ONCE = 1 << 16
"""Sequences that are permuted at once."""
PLANNED = ("bins", "pieces", "documents", "cut", "tokens")
"""What is counted of a shard's plan: sequences, pieces, documents with tokens, those that are cut, tokens."""
_HEADER = struct.Struct(f"<32s32s{len(PLANNED)}q")
_NUMBER = np.dtype("<i8")
_FIX = "Start training again: it checks the files of the packing, and makes damaged ones again."


class Group(Protocol):
    """The ranks that plan together (`drover.pipeline.parallel.ranks.Ranks`)."""

    @property
    def rank(self) -> int:
        """This one's number."""

    @property
    def world(self) -> int:
        """How many there are."""

    def gather(self, value: Any) -> list[Any]:
        """A value of each, on each."""


class Alone:
    """A group of one process: a tool's."""

    rank, world = 0, 1

    def gather(self, value: Any) -> list[Any]:
        """See Group."""
        return [value]


@dataclass(frozen=True)
class Planning:
    """A plan that is wanted.

    Attributes:
        folder: of the plan. shards: those that are packed. length: tokens of a sequence.
        documents: gives, for a row of the table, the documents of its shard that are to be packed.
        left: identifies the sequences that are left out; None if all documents are packed.
    """

    folder: Path
    shards: Shards
    length: int
    documents: Callable[[int], Pieces]
    left: Any = None

    def identity(self, row: int) -> bytes:
        """The identity that the file of the shard in a row has."""
        return bytes.fromhex(sha256_json([FORMAT, self.shards.opened.table.digest(row), self.length, self.left]))

    def __str__(self) -> str:
        return "the best-fit packing" if self.left is None else (
            f"the best-fit packing in sequences of {self.length:,}, of what an epoch has left where the length "
            f"changes,")


class Packing:
    """A plan, read a sequence at a time; the files read last are kept open. Threads may share it.

    Attributes:
        planning: what was planned. table: of its shards. length: tokens of a sequence.
        numbers: (shards, 5) int64, `PLANNED`, a row for each of the table; zeros for shards that it has nothing of.
        sha256: (shards, 32) uint8, of the files.
    """

    def __init__(self, planning: Planning) -> None:
        self.planning, self.table, self.length = planning, planning.shards.opened.table, planning.length
        self.numbers: NDArray[np.int64] = np.zeros((len(self.table), len(PLANNED)), np.int64)
        self.sha256: NDArray[np.uint8] = np.zeros((len(self.table), 32), np.uint8)
        self._file = lru_cache(most_open())(self._opened)

    def path(self, row: int) -> Path:
        """The file of a shard's plan."""
        return self.planning.folder / Path(self.table.paths[row]).with_suffix(".bins")

    def figures(self) -> dict[str, Any]:
        """Sequences, the share of padding in them, documents, and the share of these that is cut."""
        bins, _, documents, cut, tokens = self.numbers.sum(0).tolist()
        return {"sequences": bins, "padding_share": 1 - tokens / max(1, bins * self.length), "documents": documents,
                "documents_cut": cut, "cut_share": cut / max(1, documents)}

    def __str__(self) -> str:
        result = self.figures()
        return (f"best-fit packing: {result['sequences']:,} sequences of {self.length:,} tokens, "
                f"{result['padding_share']:.3%} of them padding; "
                f"{result['documents_cut']:,} of {result['documents']:,} "
                f"documents ({result['cut_share']:.2%}) are longer and cut")

    def has(self, row: int, *, checked: bool) -> bool:
        """Whether the file of a shard is there and of this plan; then note its counts. checked: compare the hash."""
        try:
            with opened(self.path(row)) as file:
                digest, of, *counts = _HEADER.unpack(file.read(_HEADER.size))
                file.seek(len(digest))
                if of != self.planning.identity(row) or (
                        checked and hashlib.file_digest(file, "sha256").digest() != digest):
                    return False
        except (OSError, struct.error):
            return False
        self.numbers[row], self.sha256[row] = counts, np.frombuffer(digest, np.uint8)
        return True

    def plan(self, row: int) -> None:
        """Pack a shard, and write its file. UserError where the shard cannot be read."""
        documents = self.planning.documents(row)
        pieces, sizes = documents.cut(self.length), documents.lengths
        order, ends = best_fit(pieces.lengths, self.length)
        counts = [len(ends) - 1, len(order), int((sizes > 0).sum()), int((sizes > self.length).sum()),
                  int(sizes.sum())]
        words = np.stack([pieces.starts, 2 * pieces.lengths + pieces.continues], axis=1)[order]
        content = (_HEADER.pack(b"", self.planning.identity(row), *counts)[32:] + ends.astype(_NUMBER).tobytes()
                   + words.astype(_NUMBER).tobytes())
        digest = hashlib.sha256(content).digest()
        with atomic_file(self.path(row)) as file:
            file.write(digest + content)
        self.numbers[row], self.sha256[row] = counts, np.frombuffer(digest, np.uint8)

    def pieces(self, row: int, place: int) -> Pieces:
        """The pieces of sequence number `place` of the shard in that row of the table."""
        first, stop = self._read(row, place, 2).tolist()
        return self._pieces(row, first, stop)

    def contents(self, row: int) -> tuple[NDArray[np.int64], Pieces]:
        """All pieces of the shard in that row of the table, and where each sequence begins among them, with the end of
        the last."""
        bins, pieces = self.numbers[row, :2].tolist()
        return (self._read(row, 0, bins + 1), self._pieces(row, 0, pieces)) if bins else (
            np.zeros(1, np.int64), documents_at(np.zeros(1, np.int64)))

    def _pieces(self, row: int, first: int, stop: int) -> Pieces:
        words = self._read(row, int(self.numbers[row, 0]) + 1 + 2 * first, 2 * (stop - first)).reshape(-1, 2)
        return Pieces(words[:, 0], words[:, 1] >> 1, (words[:, 1] & 1).astype(bool))

    def _opened(self, row: int) -> Descriptor:
        bins, pieces = self.numbers[row, :2].tolist()
        return open_sized(self.path(row), _HEADER.size + 8 * (bins + 1) + 16 * pieces, _FIX)

    def _read(self, row: int, at: int, count: int) -> NDArray[np.int64]:
        file = self._file(row)  # held: of two threads that open it at once, one has a file that nobody keeps
        read = os.pread(file.number, 8 * count, _HEADER.size + 8 * at) if count > 0 else b""
        if count < 1 or len(read) != 8 * count:
            raise UserError(f"{self.path(row)} was changed after training began. {_FIX}")
        return np.frombuffer(read, _NUMBER)


def make(planning: Planning, group: Group, say: Callable[[str], None]) -> Packing:
    """A plan, with what is missing or damaged of it made. Called on all ranks alike.

    Args:
        say: logs, on rank 0, what was made.

    Raises:
        UserError: a shard cannot be read; the same on every rank.
    """
    rows, packing = planning.shards.rows, Packing(planning)
    mine, problems = rows[group.rank::group.world], list[str]()
    missing = [row for row in mine.tolist() if not packing.has(row, checked=True)]
    for row in missing:
        try:
            packing.plan(row)
        except UserError as error:
            problems.append(str(error))
    parts = group.gather((mine, packing.numbers[mine], packing.sha256[mine], len(missing), problems))
    if problems := [problem for *_, own in parts for problem in own]:
        raise UserError(all_problems(problems, f"{len(problems):,} token shards cannot be packed"))
    for own, numbers, digests, *_ in parts:
        packing.numbers[own], packing.sha256[own] = numbers, digests
    made = sum(part[3] for part in parts)
    if group.rank == 0 and made:
        say(f"planned {planning} of {made:,} of {len(rows):,} token shards, of which there was no valid plan")
    return packing


def read(planning: Planning, say: Callable[[str], None]) -> Packing:
    """Read a plan without checking the hashes of its files. For tools, which write nothing into a run: if a file is
    missing, the same plan is made in a temporary folder, which lives as long as the plan; this is logged.

    Raises:
        UserError: a shard cannot be read.
    """
    packing = Packing(planning)
    if all(packing.has(row, checked=False) for row in planning.shards.rows.tolist()):
        return packing
    say(f"the plan of {planning} is not in {planning.folder}. It is made in a temporary folder, for this command only, "
        f"and its shards are read for that. Training makes it when it starts, and keeps it.")
    aside = TemporaryDirectory(prefix="packing-")
    made = make(replace(planning, folder=Path(aside.name) / planning.folder.name), Alone(), lambda text: None)
    weakref.finalize(made, aside.cleanup)
    return made


def forget(packing: Packing) -> None:
    """Delete a plan, so that the next start makes it again: a shard turned out to be damaged, and its plan may be
    wrong."""
    shutil.rmtree(packing.planning.folder, ignore_errors=True)


def is_intact(path: Path) -> bool:
    """Whether the file of a shard's plan is as it was written. FileNotFoundError where there is none."""
    with opened(path) as file:
        return file.read(32) == hashlib.file_digest(file, "sha256").digest()


class Bins:
    """The sequences that a packing makes of some shards, shard after shard: what `sequences.Windows` has for
    running text. Threads may share it."""

    def __init__(self, shards: Shards, packing: Packing) -> None:
        self.shards, self.packing, self.length = shards, packing, packing.length
        self._bins = packing.numbers[shards.rows, PLANNED.index("bins")]
        self._ends = np.cumsum(self._bins)
        self.count = int(self._bins.sum())

    def segment(self, space: int) -> Segment:
        """All of them, as the order goes through them."""
        tokens = self.packing.numbers[self.shards.rows, PLANNED.index("tokens")]
        return Segment(space, self.count, int(tokens.sum()),
                       hashlib.sha256(self.packing.sha256[self.shards.rows].tobytes()).hexdigest())

    def fill(self, number: int, row: np.ndarray) -> tuple[np.ndarray, int]:
        """See Windows. Padding is of the id 0."""
        shard, pieces = self._pieces(number)
        if pieces.continues[0]:  # it fills the sequence, and what comes after it is its last label
            start = int(pieces.starts[0])
            row[:] = shard.tokens(start, start + self.length + 1)
            return np.zeros(1, np.int64), self.length
        places = np.concatenate([[0], np.cumsum(pieces.lengths)])
        *begins, used = places.tolist()
        for at, start, length in zip(begins, pieces.starts.tolist(), pieces.lengths.tolist(), strict=True):
            row[at:at + length] = shard.tokens(start, start + length)
        row[used:] = 0
        return places, used

    def spans(self, number: int, label: int = 0) -> list[Span]:
        """See Windows."""
        shard, pieces = self._pieces(number)
        return [Span(shard, start, start + length + (label and continues)) for start, length, continues in
                zip(*(part.tolist() for part in pieces), strict=True)]

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """See Windows."""
        return self.shards.rows[np.unique(self._ends.searchsorted(numbers, side="right"))]

    def parts(self, index: int) -> Parts:
        """See Windows; in the order of the sequences. The shard's whole plan is read for it. Where that is of what is
        left of documents, a sequence may have several parts of one."""
        ends, pieces = self.packing.contents(int(self.shards.rows[index]))
        sequences = self._first(index) + np.arange(len(ends) - 1, dtype=np.int64).repeat(np.diff(ends))
        return Parts(sequences, pieces.starts, pieces.starts + pieces.lengths)

    def left(self, row: int, drawn: NDArray[np.bool_]) -> Pieces:
        """What is left of the shard in that row of the table without the sequences that are drawn, (count,)."""
        [index] = np.flatnonzero(self.shards.rows == row).tolist()
        ends, pieces = self.packing.contents(row)
        left = ~drawn[self._first(index):int(self._ends[index])].repeat(np.diff(ends))
        return Pieces(pieces.starts[left], pieces.lengths[left], pieces.continues[left]).joined()

    def _first(self, index: int) -> int:
        """The number of the first sequence of shard number `index`."""
        return int(self._ends[index] - self._bins[index])

    def _pieces(self, number: int) -> tuple[TokenShard, Pieces]:
        index = int(self._ends.searchsorted(number, side="right"))
        return self.shards[index], self.packing.pieces(int(self.shards.rows[index]), number - self._first(index))


def _drawn(count: int, drawn: int, key: tuple[int, ...]) -> NDArray[np.bool_]:
    """Which of `count` sequences are the first `drawn` in the order of `key`."""
    result = np.zeros(count, bool)
    for start in range(0, drawn, AT_ONCE):
        result[permute(np.arange(start, min(start + AT_ONCE, drawn)), count, key)] = True
    return result


Planner = Callable[[Planning], Packing]
"""Makes or reads a plan: on all ranks alike."""


class PhasePackings:
    """How the documents of each pool are packed in the phases of a plan (`order.SequenceSpace`).

    Args:
        folder: of all plans; each has one in it, by the length of its sequences. shards: by pool.
        lengths: of sequences, each once; the plans of all documents are made at once.

    Attributes:
        packings: by number; of what is left, one has sequences of one pool only.
        spaces: the sequences of each, by pool.
    """

    padded = True

    def __init__(self, folder: Path, shards: Sequence[Shards], lengths: Sequence[int], planner: Planner) -> None:
        self.folder, self.shards, self.lengths, self._planner = folder, shards, lengths, planner
        self.packings, self.spaces = list[Packing](), list[Sequence[Bins]]()
        self._rests: dict[str, Segment] = {}
        self._opened: OpenShards = self.shards[0].opened
        every = Shards(self._opened, self._opened.table.rows("train"))
        for length in lengths:
            self._add(Planning(folder / str(length), every, length, lambda row: documents_at(
                self._opened.shard(row).read_offsets())))

    def segments(self, length: int) -> list[Segment]:
        """See SequenceSpace."""
        space = self.lengths.index(length)
        return [bins.segment(space) for bins in self.spaces[space]]

    def continued(self, fresh: Cursor, before: Cursor) -> Cursor:
        """See SequenceSpace: what is left of the epoch comes first, packed again."""
        epoch = int(before.epoch_of(before.draws))
        segment, drawn, key = before.segment(epoch)
        drawn = before.draws - drawn
        if segment is before.full and not drawn:
            return replace(fresh, first=epoch * fresh.full.pieces)
        rest = self._rest(fresh.key[1], fresh.length, segment, drawn, key)
        return replace(fresh, first=(epoch + 1) * fresh.full.pieces, rest=rest, left=rest.tokens)

    def _rest(self, pool: int, length: int, segment: Segment, drawn: int, key: tuple[int, ...]) -> Segment:
        """A segment without its first `drawn` sequences in the order of `key` (`permute`), packed to a length. Equal
        arguments give the same result, which is kept."""
        left = [segment.identity, drawn, list(key)]
        named = sha256_json([length, left])
        if named not in self._rests:
            bins = self.spaces[segment.space][pool]
            of_drawn = cache(lambda: _drawn(bins.count, drawn, key))  # needed only where the plan has to be made
            self._add(Planning(self.folder / f"{length}-left-{named[:12]}", self.shards[pool], length,
                               lambda row: bins.left(row, of_drawn()), left))
            self._rests[named] = self.spaces[-1][pool].segment(len(self.spaces) - 1)
        return self._rests[named]

    def _add(self, planning: Planning) -> None:
        self.packings.append(self._planner(planning))
        self.spaces.append([Bins(shards, self.packings[-1]) for shards in self.shards])
