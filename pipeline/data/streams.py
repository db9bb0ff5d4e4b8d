"""Files as streams of bytes, decompressed by the ending of their name; the name may be any bytes that a disk holds.

What a unit reads of a file is hashed as it passes, so that nothing is read twice for it.
"""

from __future__ import annotations

import hashlib
import io
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from pipeline.contract.content_hash import BLOCK_BYTES
from pipeline.data.framing import Span
from pipeline.data.gzip_members import Gunzipped
from pipeline.data.objects import Spool, object_frames
from pipeline.data.zstd_blocks import Unzstd
from pipeline.data.zstd_frames import frame_starts
from pipeline.errors import UserError
from pipeline.stores.object_files import ObjectReader, content_number
from pipeline.stores.store import Changed, is_url

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
BUFFER = 1 << 20
"""Bytes read from the disk at a time."""
Seen = Callable[[int, memoryview], None]
"""Called with the offset of what was read, and what was."""
Opened = Callable[[int, int | None], Any]
"""Opens a file at an offset; the second tells up to where it will surely be read."""


@dataclass(frozen=True)
class Piece:
    """A file or a part of it, as a unit of reading is told of it.

    Attributes:
        name: `<source>/<path below the source's common folder>`.
        path: where the file lies; the URL of an object.
        bytes: the file's size.
        mtime_ns: when it was last written; of an object, the number of its content.
        start: first byte of the part.
        stop: the byte behind it; 0 and `bytes` for a whole file.
        etag: of an object, what the store calls its content.
    """

    name: str
    path: str
    bytes: int
    mtime_ns: int
    start: int
    stop: int
    etag: str = ""

    @classmethod
    def of(cls, path: Path) -> Piece:
        """All of a file, as it is now; OSError if it cannot be had."""
        stat = path.stat()
        return cls(f"/{path.name}", str(path), stat.st_size, stat.st_mtime_ns, 0, stat.st_size)

    @property
    def whole(self) -> bool:
        """Whether it is all of the file."""
        return self.start == 0 and self.stop == self.bytes

    @property
    def file(self) -> str:
        """The file's name within its source."""
        return self.name.partition("/")[2]

    def reader(self) -> ObjectReader | None:
        """What reads it, if it is an object."""
        return ObjectReader(self.path, self.bytes, self.etag) if is_url(self.path) else None

    def refuse_changed(self) -> None:
        """UserError if the file's size or time is another than the unit was told; OSError if it cannot be had.

        Of an object, whatever is read of it has the ETag that it should have; so it is looked at only if nothing is.
        """
        if (reader := self.reader()) is not None:
            if not (self.bytes and self.etag):
                entry = reader.head()
                if (entry.size, content_number(entry.etag, entry.modified)) != (self.bytes, self.mtime_ns):
                    raise Changed(f"{self.path} is not what it was: somebody else wrote it.")
            return
        now = Path(self.path).stat()
        if (now.st_size, now.st_mtime_ns) != (self.bytes, self.mtime_ns):
            sizes = f"{self.bytes:,} -> {now.st_size:,} bytes" if now.st_size != self.bytes else \
                "its time is another, its size is not"
            raise UserError(f"{self.path} is not what it was when the stage shard began: {sizes}. Let "
                            f"nobody write to it; the same command then reads it anew.")


class Input:
    """What is read of one piece, hashed on the way.

    Args:
        cache: a folder for what is found out about a file once for all its parts.

    Raises:
        UserError: the file is not the one that the unit was told of.
        OSError: it cannot be read.
    """

    def __init__(self, piece: Piece, cache: Path | None = None) -> None:
        self.piece, self._cache, self.reader = piece, cache, piece.reader()
        self.path = Path(piece.path) if self.reader is None else PurePath(piece.path)
        piece.refuse_changed()
        self._hash = _RangeHash(piece, self._opened)

    def open(self) -> io.BufferedReader:
        """A stream of the bytes from the start of the piece on, unpacked by the name's ending."""
        raw = _Watched(self._opened, self.piece.start, self._hash.feed, ahead=self.piece.stop)
        compression = COMPRESSIONS.get(self.path.suffix.lower())
        return io.BufferedReader(raw if compression is None else unpacked(raw, compression), BUFFER)

    def open_part(self) -> tuple[io.BufferedReader, Span, str | None] | None:
        """A stream that stands where a part begins, the part's span, and what stands before offsets in the names of its
        records; None where nothing begins in it.

        Of zstd a part has the frames that begin in it. Offsets are then those of the unpacked bytes, from the first of
        them on, and `<its own offset>+` stands before them. A file with a single frame is read as a whole by the part
        in which it begins, and its records are numbered: the prefix is None.
        """
        piece = self.piece
        if self.path.suffix.lower() not in COMPRESSIONS:
            return self.open(), Span(piece.start, piece.stop, piece.start == 0), ""
        starts = object_frames(self.reader, piece.mtime_ns, self._cache) if self.reader is not None else \
            frame_starts(Path(self.path), self._cache)
        own = starts[(starts >= piece.start) & (starts < piece.stop)]
        if not len(own):
            return None
        self._hash.read_to(int(own[0]))
        after, span = starts[starts >= piece.stop], Span(first=bool(own[0] == starts[0]))
        behind = int(after[0]) if len(after) else None
        raw = _Frames(self._opened, int(own[0]), behind, self._hash.feed, span)
        return io.BufferedReader(raw, BUFFER), span, None if len(starts) == 1 else f"{own[0]}+"

    def record(self) -> dict[str, Any]:
        """What the unit's record says of the file: hashes of its content, for which the rest of the piece is read now.

        A whole file has one digest, its sha256; a part has those of the blocks that begin in it.
        """
        digests = self._hash.digests()
        self.piece.refuse_changed()
        piece = self.piece
        path = piece.path if self.reader is not None else str(Path(piece.path).absolute())
        return {"path": path, "name": piece.name, "bytes": piece.bytes,
                "mtime_ns": piece.mtime_ns, "whole": piece.whole, "start": piece.start, "digests": digests}

    def hash(self) -> None:
        """Read the whole piece, so that it is in memory for whoever looks at it in any order."""
        self._hash.digests()

    def spool(self) -> Spool:
        """An object's piece on this machine's disk, read once, and the rest of it in the store: to be read at any
        place. To be closed."""
        assert self.reader is not None
        made = Spool(self.reader)
        self._hash.read_to(self.piece.bytes, made.keep)
        return made

    def _opened(self, position: int, until: int | None) -> Any:
        if self.reader is not None:
            return self.reader.open(position, until)
        file = open(self.path, "rb", buffering=0)  # noqa: SIM115
        file.seek(position)
        return file


class _RangeHash:
    """The hash of a whole file, or those of the blocks that begin in a part, of bytes that come in order."""

    def __init__(self, piece: Piece, opened: Opened) -> None:
        self._piece, self._opened, self._found = piece, opened, list[str]()
        self._block = piece.bytes if piece.whole else BLOCK_BYTES
        self._at = 0 if piece.whole else -(-piece.start // BLOCK_BYTES) * BLOCK_BYTES
        self._stop = piece.bytes if piece.whole else min(piece.bytes, -(-piece.stop // BLOCK_BYTES) * BLOCK_BYTES)
        self._left, self._current = self._block, hashlib.sha256()

    def feed(self, position: int, data: memoryview) -> None:
        """Take in what was read at `position`; of what does not go on where the last ended, nothing."""
        if not position <= self._at < min(position + len(data), self._stop):
            return
        data = data[self._at - position:self._stop - position]
        while data:
            taken = data[:self._left]
            self._current.update(taken)
            self._at += len(taken)
            self._left -= len(taken)
            data = data[len(taken):]
            if not self._left and not self._piece.whole:
                self._next_block()

    def digests(self) -> list[str]:
        """All of them; what was not fed is read."""
        self.read_to(self._stop)
        begun = self._piece.whole or self._left < self._block
        return [*self._found, self._current.hexdigest()] if begun else list(self._found)

    def read_to(self, offset: int, seen: Seen = lambda position, data: None) -> None:
        """Read what was not fed up to there."""
        stop = min(offset, self._stop)
        if self._at < stop:
            with self._opened(self._at, stop) as file:
                buffer = memoryview(bytearray(BUFFER))
                while self._at < stop:
                    if not (count := file.readinto(buffer[:stop - self._at])):
                        break
                    seen(self._at, buffer[:count])
                    self.feed(self._at, buffer[:count])

    def _next_block(self) -> None:
        self._found.append(self._current.hexdigest())
        self._left, self._current = self._block, hashlib.sha256()


class _Watched(io.RawIOBase):
    """The bytes of a file from `position` on, up to `end`; `seen` is shown each as it is read. ahead: up to there it
    will be read in any case."""

    def __init__(self, opened: Opened, position: int, seen: Seen, end: int | None = None,
                 ahead: int | None = None) -> None:
        self._file, self._position, self._seen = opened(position, ahead if end is None else end), position, seen
        self._end = sys.maxsize if end is None else end

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(memoryview(buffer)[:max(0, self._end - self._position)])
        self._seen(self._position, memoryview(buffer)[:count])
        self._position += count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


class _Frames(io.RawIOBase):
    """What the zstd frames of a part hold, and then those behind it; sets the span's stop where the part's end."""

    def __init__(self, opened: Opened, start: int, behind: int | None, seen: Seen, span: Span) -> None:
        self._own = Unzstd(_Watched(opened, start, seen, behind))
        self._opened, self._behind, self._seen, self._span, self._given = opened, behind, seen, span, 0
        self._next: Unzstd | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._next is not None:
            return self._next.readinto(buffer)
        if count := self._own.readinto(buffer):
            self._given += count
            return count
        self._span.stop = self._given
        if self._behind is None:
            return 0
        self._next = Unzstd(_Watched(self._opened, self._behind, self._seen, ahead=self._behind))
        return self._next.readinto(buffer)

    def close(self) -> None:
        self._own.close()
        if self._next is not None:
            self._next.close()
        super().close()


def unpacked(raw: io.RawIOBase | io.BufferedReader, compression: str) -> io.RawIOBase:
    """What compressed bytes hold; damage is an OSError without a number."""
    return Gunzipped(raw) if compression == "gzip" else Unzstd(raw)


def map_file(path: str | Path) -> Any:
    """The file in memory, as Arrow reads it at any place."""
    import pyarrow as pa
    # Given a text as name, Arrow takes it for UTF-8; bytes as they are.
    return pa.memory_map(os.fsencode(path))


def name_as_text(name: str) -> str:
    """A file's name as valid Unicode: bytes that are not UTF-8 become `\\xe9`."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
