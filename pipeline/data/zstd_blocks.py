"""Zstd data unpacked block by block: all that stands before damage is given, then the damage is told.

The library drops what it unpacked in the call that comes upon damage, and has no way back. Given one block at a time it
comes upon no more than one: so no whole block is lost but the damaged one, of which nothing can be had. Arrow, which
takes what it is given as it comes, loses what came in the same call; zstandard's own reader ends without an error where
the data breaks off.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

from pipeline.data.zstd_frames import MAGIC, RLE, block, frame_header, is_skippable

PACKED = 1 << 18
"""Packed bytes taken at a time: two blocks of the largest size."""
BREAKS_OFF = "the zstd data breaks off"


class Unzstd(io.RawIOBase):
    """What the frames of zstd data hold, one after another; of these, a block is held at a time, of 128 KiB at most."""

    def __init__(self, raw: io.RawIOBase | io.BufferedReader) -> None:
        import zstandard
        self._raw, self._packed, self._at, self._left = raw, b"", 0, memoryview(b"")
        self._decompressor, self._wrong = zstandard.ZstdDecompressor(), zstandard.ZstdError
        self._blocks = self._unpacked()
        self._damage: Exception | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        done = 0
        while done < len(buffer) and (self._left or self._has_block(done)):
            count = min(len(buffer) - done, len(self._left))
            buffer[done:done + count] = self._left[:count]
            self._left = self._left[count:]
            done += count
        return done

    def close(self) -> None:
        self._raw.close()
        super().close()

    def _has_block(self, done: int) -> bool:
        """Go on to the next block that holds something, if there is one. Damage is told again
        and again, and if something is given before it, not before the next time."""
        if self._damage is None:
            try:
                self._left = memoryview(next(filter(None, self._blocks), b""))
            except (OSError, EOFError) as error:
                self._damage = error
        if self._damage is not None and not done:
            raise self._damage
        return self._damage is None and len(self._left) > 0

    def _unpacked(self) -> Iterator[bytes]:
        """The content of all blocks; an OSError without a number at damage."""
        while start := self._seen(8):
            if is_skippable(start) and len(start) == 8:
                self._skip(8 + int.from_bytes(start[4:], "little"))
            else:
                yield from self._frame(start)

    def _frame(self, start: bytes) -> Iterator[bytes]:
        """What one frame holds; start: its first bytes."""
        frame = self._decompressor.decompressobj()
        if len(start) < 5 or start[:4] != MAGIC:
            yield self._fed(frame, len(start))  # raises what is wrong with it, if it is not only too short
            raise OSError(BREAKS_OFF)
        header, checksum = frame_header(start[4])
        last = False
        while not last:
            last, kind, length = block(self._seen(header + 3)[header:])
            size = header + 3 + (1 if kind == RLE else length)
            header, whole = 0, len(self._seen(size)) == size
            yield self._fed(frame, size)
            if not whole:
                raise OSError(BREAKS_OFF)
        if checksum:  # by itself: a wrong one costs no block
            yield self._fed(frame, checksum)
        if not frame.eof:
            raise OSError(BREAKS_OFF)

    def _fed(self, frame: Any, count: int) -> bytes:
        """What the next bytes make; of fewer, what they make."""
        try:
            return bytes(frame.decompress(self._taken(count)))
        except self._wrong as error:
            raise OSError(str(error)) from None

    def _seen(self, count: int) -> bytes:
        """The next bytes, as many as are left where there are fewer, not taken."""
        while len(self._packed) - self._at < count and (more := self._raw.read(PACKED)):
            self._packed, self._at = self._packed[self._at:] + more, 0
        return self._packed[self._at:self._at + count]

    def _taken(self, count: int) -> bytes:
        taken = self._seen(count)
        self._at += len(taken)
        return taken

    def _skip(self, count: int) -> None:
        while count:
            taken = len(self._taken(min(count, PACKED)))
            if not taken:
                raise OSError(BREAKS_OFF)
            count -= taken
