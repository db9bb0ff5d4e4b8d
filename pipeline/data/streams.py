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
from pathlib import Path
from typing import Any

from pipeline.contract.content_hash import BLOCK_BYTES
from pipeline.data.framing import Span
from pipeline.data.zstd_frames import frame_starts
from pipeline.errors import UserError

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
BUFFER = 1 << 20
"""Bytes read from the disk at a time."""
STEP = 1 << 13
"""Bytes unpacked at a time: so much, at most, is lost of what stands before damage."""
Seen = Callable[[int, memoryview], None]
"""Called with the offset of what was read, and what was."""


@dataclass(frozen=True)
class Piece:
    """A file or a part of it, as a unit of reading is told of it.

    Attributes:
        name: `<source>/<path below the source's common folder>`.
        path: where the file lies.
        bytes: the file's size.
        mtime_ns: when it was last written.
        start: first byte of the part.
        stop: the byte behind it; 0 and `bytes` for a whole file.
    """

    name: str
    path: str
    bytes: int
    mtime_ns: int
    start: int
    stop: int

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

    def refuse_changed(self) -> None:
        """UserError if the file's size or time is another than the unit was told; OSError if it cannot be had."""
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
        self.piece, self.path, self._cache = piece, Path(piece.path), cache
        piece.refuse_changed()
        self._hash = _RangeHash(piece)

    def open(self) -> io.BufferedReader:
        """A stream of the bytes from the start of the piece on, unpacked by the name's ending."""
        raw = _Watched(self.path, self.piece.start, self._hash.feed)
        compression = COMPRESSIONS.get(self.path.suffix.lower())
        return io.BufferedReader(raw if compression is None else _Unpacked(raw, compression), BUFFER)

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
        starts = frame_starts(self.path, self._cache)
        own = starts[(starts >= piece.start) & (starts < piece.stop)]
        if not len(own):
            return None
        self._hash.read_to(int(own[0]))
        after, span = starts[starts >= piece.stop], Span(first=bool(own[0] == starts[0]))
        behind = int(after[0]) if len(after) else None
        raw = _Frames(self.path, int(own[0]), behind, self._hash.feed, span)
        return io.BufferedReader(raw, BUFFER), span, None if len(starts) == 1 else f"{own[0]}+"

    def record(self) -> dict[str, Any]:
        """What the unit's record says of the file: hashes of its content, for which the rest of the piece is read now.

        A whole file has one digest, its sha256; a part has those of the blocks that begin in it.
        """
        digests = self._hash.digests()
        self.piece.refuse_changed()
        piece = self.piece
        return {"path": str(Path(piece.path).absolute()), "name": piece.name, "bytes": piece.bytes,
                "mtime_ns": piece.mtime_ns, "whole": piece.whole, "start": piece.start, "digests": digests}

    def hash(self) -> None:
        """Read the whole piece, so that it is in memory for whoever looks at it in any order."""
        self._hash.digests()


class _RangeHash:
    """The hash of a whole file, or those of the blocks that begin in a part, of bytes that come in order."""

    def __init__(self, piece: Piece) -> None:
        self._piece, self._found = piece, list[str]()
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

    def read_to(self, offset: int) -> None:
        """Read what was not fed up to there."""
        if self._at < min(offset, self._stop):
            with open(self._piece.path, "rb", buffering=0) as file:
                file.seek(self._at)
                buffer = memoryview(bytearray(BUFFER))
                while self._at < min(offset, self._stop):
                    if not (count := file.readinto(buffer[:min(offset, self._stop) - self._at])):
                        break
                    self.feed(self._at, buffer[:count])

    def _next_block(self) -> None:
        self._found.append(self._current.hexdigest())
        self._left, self._current = self._block, hashlib.sha256()


class _Watched(io.RawIOBase):
    """The bytes of a file from `position` on, up to `end`; `seen` is shown each as it is read."""

    def __init__(self, path: Path, position: int, seen: Seen, end: int | None = None) -> None:
        self._file, self._position, self._seen = open(path, "rb", buffering=0), position, seen  # noqa: SIM115
        self._file.seek(position)
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


class _Unpacked(io.RawIOBase):
    """Compressed bytes as what they hold. Damage is told after all that stands before it was given."""

    def __init__(self, raw: io.RawIOBase, compression: str) -> None:
        import pyarrow as pa
        self._raw, self._stream = raw, pa.input_stream(raw, compression=compression)
        self._damage: Exception | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._damage is not None:
            raise self._damage
        done = 0
        while done < len(buffer):
            try:
                data = self._stream.read(min(STEP, len(buffer) - done))
            except (OSError, EOFError) as error:
                if not done:
                    raise
                self._damage = error
                break
            if not data:
                break
            buffer[done:done + len(data)] = data
            done += len(data)
        return done

    def close(self) -> None:
        self._stream.close()
        self._raw.close()
        super().close()


class _Frames(io.RawIOBase):
    """What the zstd frames of a part hold, and then those behind it; sets the span's stop where the part's end."""

    def __init__(self, path: Path, start: int, behind: int | None, seen: Seen, span: Span) -> None:
        self._own = _Unpacked(_Watched(path, start, seen, behind), "zstd")
        self._path, self._behind, self._seen, self._span, self._given = path, behind, seen, span, 0
        self._next: _Unpacked | None = None

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
        self._next = _Unpacked(_Watched(self._path, self._behind, self._seen), "zstd")
        return self._next.readinto(buffer)

    def close(self) -> None:
        self._own.close()
        if self._next is not None:
            self._next.close()
        super().close()


def open_stream(path: Path) -> Any:
    """The file's bytes as an Arrow stream, which says when gzip or zstd data breaks off; zstandard's reader ends there
    without an error."""
    import pyarrow as pa
    # Given a text as name, Arrow takes it for UTF-8; bytes as they are.
    return pa.input_stream(pa.OSFile(os.fsencode(path)), compression=COMPRESSIONS.get(path.suffix.lower()))


def map_file(path: str | Path) -> Any:
    """The file in memory, as Arrow reads it at any place."""
    import pyarrow as pa
    return pa.memory_map(os.fsencode(path))


def name_as_text(name: str) -> str:
    """A file's name as valid Unicode: bytes that are not UTF-8 become `\\xe9`."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
