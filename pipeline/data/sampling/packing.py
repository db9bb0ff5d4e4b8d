"""Documents into sequences: one after another and cut wherever a sequence is full (`Windows`), or packed by best fit,
documents side by side and then padding (`Bins`).

Best fit (Ding et al. 2024) cuts no document that is not longer than a sequence. Pieces go from the longest to the
shortest, each into the sequence with the least room that suffices, or into a new one. Equal pieces are dealt out
together: the sequences with one amount of room take as many as fit, all at once. So the work grows with the number of
different lengths, not of documents, and what is done for each document is done in arrays.

Each token shard is packed by itself, once for a length, into a file in the run's folder. To find the pieces of a
sequence, a few bytes of it are read; nothing stays in memory. Each length of sequences has such a plan of all
documents. Another is made of what an epoch has left of a source when the length changes (order.py). At every start each
rank checks the files of some shards, and makes those again that are missing, damaged or of another shard.

A file is the sha256 of what follows; the sha256 of what it was made from (`Packing.identity`); and numbers of 64 bits,
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
from dataclasses import replace
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from drover.pipeline.core.errors import UserError, all_problems
from drover.pipeline.core.files import Record, atomic_file, opened, sha256_json
from drover.pipeline.data.sampling.order import Cursor, Segment, permute
from drover.pipeline.data.token_shards import (
    Descriptor,
    Integers,
    OpenShards,
    Shards,
    TokenShard,
    most_open,
    open_sized,
)

FORMAT = 2
AT_ONCE = 1 << 16
"""Sequences that are permuted at once."""
PLANNED = ("bins", "pieces", "documents", "cut", "tokens")
"""What is counted of a shard's plan: sequences, pieces, documents with tokens, those that are cut, tokens."""
_HEADER = struct.Struct(f"<32s32s{len(PLANNED)}q")
_NUMBER = np.dtype("<i8")
_FIX = "Start training again: it checks the files of the packing, and makes damaged ones again."


class Span(NamedTuple):
    """Tokens [start, stop) of a shard."""

    shard: TokenShard
    start: int
    stop: int


class Parts(NamedTuple):
    """What the sequences have of a shard, in the shard's order: the sequence of each part, and the first token of the
    shard in it and the one after its last; int64 of one length. A sequence comes as often as it has parts."""

    sequences: np.ndarray
    starts: np.ndarray
    stops: np.ndarray


class Windows:
    """Sequences that are cut wherever `length` tokens end from the tokens of shards laid end to end: all are full.

    Attributes:
        shards: what they are made of, perhaps many more than are open at once. count: how many sequences there are.
        tokens: of all shards.
    """

    def __init__(self, shards: Shards, length: int) -> None:
        self.shards, self.length = shards, length
        self._ends = np.cumsum(shards.token_counts, dtype=np.int64)
        self.tokens = int(self._ends[-1]) if len(shards) else 0
        self.count = max(0, self.tokens - 1) // length

    def fill(self, number: int, row: np.ndarray) -> tuple[np.ndarray, int]:
        """Read a sequence into `row`, (length + 1,) ids of 32 bits, and behind it the token that is its last label.

        Returns the places in the row at which documents begin, length included where there is no last label, and how
        many tokens of the sequence mean something.
        """
        at, starts = 0, []
        for shard, start, stop in self.spans(number, 1):
            row[at:at + stop - start] = shard.tokens(start, stop)
            starts.append(shard.document_starts(start, stop) + (at - start))
            at += stop - start
        return starts[0] if len(starts) == 1 else np.concatenate(starts), self.length

    def spans(self, number: int, label: int = 0) -> list[Span]:
        """The tokens of a sequence in their order, without padding, a span of each shard that has some; with label=1
        that of the last label, too."""
        start, stop = number * self.length, (number + 1) * self.length + label
        index, result = int(self._ends.searchsorted(start, side="right")), []
        while start < stop:
            shard, end = self.shards[index], int(self._ends[index])
            base, at = end - shard.token_count, min(stop, end)
            if base < end:  # a shard without tokens has none of them
                result.append(Span(shard, start - base, at - base))
            start, index = at, index + 1
        return result

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """The rows, in their table, of the shards from which `fill` reads these sequences; ascending, each once."""
        begins = numbers * self.length
        first = self._ends.searchsorted(begins, side="right")
        last = self._ends.searchsorted(begins + self.length, side="right")
        edges = np.bincount(first, minlength=len(self._ends) + 1) - np.bincount(last + 1, minlength=len(self._ends) + 1)
        return self.shards.rows[np.cumsum(edges)[:-1] > 0]

    def parts(self, index: int) -> Parts:
        """The parts of shard number `index` (a place in `shards`) in all sequences. The last tokens of all, which fill
        no sequence and its last label, are in none."""
        end = int(self._ends[index])
        base = end - int(self.shards.token_counts[index])
        sequences = np.arange(base // self.length, min(-(-end // self.length), self.count), dtype=np.int64)
        starts = sequences * self.length - base
        return Parts(sequences, np.maximum(starts, 0), np.minimum(starts + self.length, end - base))


class Pieces(NamedTuple):
    """Tokens of a shard that stay together: documents, or parts of them; (pieces,) each.

    starts, lengths: int64, in tokens. continues: whether the document does behind the piece's end.
    """

    starts: Integers
    lengths: Integers
    continues: NDArray[np.bool_]

    def cut(self, length: int) -> Pieces:
        """Each piece whole, or if it is longer than `length` one for each `length` tokens and one for the rest. What is
        cut continues only where it fills a sequence: of any other the next token is no label of its last one."""
        counts = -(-self.lengths // length)
        ends, continues = (self.starts + self.lengths).repeat(counts), self.continues.repeat(counts)
        within = np.arange(int(counts.sum())) - (np.cumsum(counts) - counts).repeat(counts)
        starts = self.starts.repeat(counts) + within * length
        lengths = np.minimum(length, ends - starts)
        return Pieces(starts, lengths, (starts + length < ends) | (continues & (lengths == length)))

    def joined(self) -> Pieces:
        """The same in the order of the shard, neighbours in one document joined; none may come twice."""
        order = np.argsort(self.starts)
        starts, lengths, continues = (part[order] for part in self)
        joins = continues[:-1] & (starts[:-1] + lengths[:-1] == starts[1:])
        first, last = np.append(True, ~joins)[:len(starts)], np.append(~joins, True)[:len(starts)]
        return Pieces(starts[first], (starts + lengths)[last] - starts[first], continues[last])


def documents_at(offsets: Integers) -> Pieces:
    """The documents that begin at `offsets`; the last of these is the end of the last document."""
    return Pieces(offsets[:-1], np.diff(offsets), np.zeros(len(offsets) - 1, bool))


def best_fit(lengths: Integers, room: int) -> tuple[Integers, Integers]:
    """Pieces of `lengths`, each in 1 .. room, into bins of `room`, by best fit from the longest on; ties by position.

    Returns the numbers of the pieces, bin after bin, the longest of a bin first, and where each bin begins among them,
    with the end of the last: (pieces,) and (bins + 1,).
    """
    order = np.argsort(-lengths, kind="stable")
    falling = lengths[order]
    edges = np.concatenate([[0], np.flatnonzero(np.diff(falling)) + 1, [len(order)]]).tolist()
    bins = _Bins(room)
    result = np.empty(len(order), np.int64)
    for at, end in pairwise(edges):
        while at < end:
            taken = bins.take(int(falling[at]), end - at)
            result[at:at + len(taken)] = taken
            at += len(taken)
    filled = np.bincount(result, minlength=bins.count)
    return order[np.argsort(result, kind="stable")], np.concatenate([[0], np.cumsum(filled)])


class _Bins:
    """Bins by the room that they have left, those with equal room in the order in which they came to it."""

    def __init__(self, room: int) -> None:
        self.room, self.count = room, 0
        self._free: dict[int, list[Integers]] = {}
        self._some = np.zeros(room + 1, bool)

    def take(self, size: int, pieces: int) -> Integers:
        """The bins of the next pieces of one size, at least one and at most so many: those that fit best.

        Where one bin has the least room, it still has once a piece is in it, so it takes as many as fit.
        """
        room = size + int(self._some[size:].argmax())
        if not self._some[room]:
            room = self.room
            fresh = -(-pieces // (room // size))
            self._put(room, np.arange(self.count, self.count + fresh))
            self.count += fresh
        each = room // size
        bins = np.concatenate(self._free.pop(room))
        self._some[room] = False
        needed = -(-pieces // each)
        self._put(room, bins[needed:])
        bins = bins[:needed]
        placed = bins.repeat(each)[:pieces]
        full, rest = divmod(len(placed), each)
        self._put(room - each * size, bins[:full])
        self._put(room - rest * size, bins[full:])
        return placed

    def _put(self, room: int, bins: Integers) -> None:
        if len(bins) and room:
            self._free.setdefault(room, []).append(bins)
            self._some[room] = True


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


class Packing:
    """A plan, read a sequence at a time; the files read last are kept open. Threads may share it.

    Args:
        documents: gives, for a row of the table, the documents of its shard that are to be packed.
        left: identifies the sequences that are left out; None if all documents are packed.

    Attributes:
        folder: of the plan. shards: those that are packed. table: of all shards. length: tokens of a sequence.
        numbers: (shards, 5) int64, `PLANNED`, a row for each of the table; zeros for shards that it has nothing of.
        sha256: (shards, 32) uint8, of the files.
    """

    def __init__(self, folder: Path, shards: Shards, length: int, documents: Callable[[int], Pieces],
                 left: Any = None) -> None:
        self.folder, self.shards, self.length, self.left = folder, shards, length, left
        self.table = shards.opened.table
        self._documents = documents
        self.numbers: Integers = np.zeros((len(self.table), len(PLANNED)), np.int64)
        self.sha256: NDArray[np.uint8] = np.zeros((len(self.table), 32), np.uint8)
        self._file = lru_cache(most_open())(self._opened)

    def identity(self, row: int) -> bytes:
        """What the file of the shard in a row is made from."""
        return bytes.fromhex(sha256_json([FORMAT, self.table.digest(row), self.length, self.left]))

    def path(self, row: int) -> Path:
        """The file of a shard's plan."""
        return self.folder / Path(self.table.paths[row]).with_suffix(".bins")

    def figures(self) -> Record:
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
                if of != self.identity(row) or (
                        checked and hashlib.file_digest(file, "sha256").digest() != digest):
                    return False
        except (OSError, struct.error):
            return False
        self.numbers[row], self.sha256[row] = counts, np.frombuffer(digest, np.uint8)
        return True

    def plan(self, row: int) -> None:
        """Pack a shard, and write its file. UserError where the shard cannot be read."""
        documents = self._documents(row)
        pieces, sizes = documents.cut(self.length), documents.lengths
        order, ends = best_fit(pieces.lengths, self.length)
        counts = [len(ends) - 1, len(order), int((sizes > 0).sum()), int((sizes > self.length).sum()),
                  int(sizes.sum())]
        words = np.stack([pieces.starts, 2 * pieces.lengths + pieces.continues], axis=1)[order]
        content = (_HEADER.pack(b"", self.identity(row), *counts)[32:] + ends.astype(_NUMBER).tobytes()
                   + words.astype(_NUMBER).tobytes())
        digest = hashlib.sha256(content).digest()
        with atomic_file(self.path(row)) as file:
            file.write(digest + content)
        self.numbers[row], self.sha256[row] = counts, np.frombuffer(digest, np.uint8)

    def pieces(self, row: int, place: int) -> Pieces:
        """The pieces of sequence number `place` of the shard in that row of the table."""
        first, stop = self._read(row, place, 2).tolist()
        return self._pieces(row, first, stop)

    def contents(self, row: int) -> tuple[Integers, Pieces]:
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

    def _read(self, row: int, at: int, count: int) -> Integers:
        file = self._file(row)  # held: of two threads that open it at once, one has a file that nobody keeps
        read = os.pread(file.number, 8 * count, _HEADER.size + 8 * at) if count > 0 else b""
        if count < 1 or len(read) != 8 * count:
            raise UserError(f"{self.path(row)} was changed after training began. {_FIX}")
        return np.frombuffer(read, _NUMBER)


def make_plan(packing: Packing, group: Group, say: Callable[[str], None]) -> Packing:
    """The plan, with what is missing or damaged of it made. Called on all ranks alike.

    Args:
        say: logs, on rank 0, what was made.

    Raises:
        UserError: a shard cannot be read; the same on every rank.
    """
    rows = packing.shards.rows
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
        say(f"planned the best-fit packing of {made:,} of {len(rows):,} token shards in sequences of "
            f"{packing.length:,}, of which there was no valid plan")
    return packing


def read_plan(packing: Packing, say: Callable[[str], None]) -> Packing:
    """The plan, without checking the hashes of its files. For tools, which write nothing into a run: if a file is
    missing, the same plan is made in a temporary folder, which lives as long as the plan; this is logged.

    Raises:
        UserError: a shard cannot be read.
    """
    if all(packing.has(row, checked=False) for row in packing.shards.rows.tolist()):
        return packing
    say(f"the plan of the best-fit packing is not in {packing.folder}. It is made in a temporary folder, for this "
        f"command only, and its shards are read for that. Training makes it when it starts, and keeps it.")
    aside = TemporaryDirectory(prefix="packing-")
    weakref.finalize(packing, aside.cleanup)
    packing.folder = Path(aside.name) / packing.folder.name
    return make_plan(packing, Alone(), lambda text: None)


def forget_plan(packing: Packing) -> None:
    """Delete a plan, so that the next start makes it again: a shard turned out to be damaged, and its plan may be
    wrong."""
    shutil.rmtree(packing.folder, ignore_errors=True)


def is_intact(path: Path) -> bool:
    """Whether the file of a shard's plan is as it was written. FileNotFoundError where there is none."""
    with opened(path) as file:
        return file.read(32) == hashlib.file_digest(file, "sha256").digest()


class Bins:
    """The sequences that a packing makes of some shards, shard after shard: what `Windows` has for
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

    def spans(self, number: int) -> list[Span]:
        """See Windows."""
        shard, pieces = self._pieces(number)
        return [Span(shard, start, start + length) for start, length in
                zip(pieces.starts.tolist(), pieces.lengths.tolist(), strict=True)]

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


Planner = Callable[[Packing], Packing]
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
            self._add(Packing(folder / str(length), every, length, lambda row: documents_at(
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
            self._add(Packing(self.folder / f"{length}-left-{named[:12]}", self.shards[pool], length,
                              lambda row: bins.left(row, of_drawn()), left))
            self._rests[named] = self.spaces[-1][pool].segment(len(self.spaces) - 1)
        return self._rests[named]

    def _add(self, packing: Packing) -> None:
        self.packings.append(self._planner(packing))
        self.spaces.append([Bins(shards, packing) for shards in self.shards])
