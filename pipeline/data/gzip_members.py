"""Gzip data unpacked member by member: all that stands before damage is given, then the damage is told.

Arrow and the standard library's `gzip` drop what they unpacked in the call that comes upon it.
"""

from __future__ import annotations

import io
import zlib
from typing import Any

PACKED = 1 << 16
"""Packed bytes taken at a time."""
_GZIP = 31
"""What zlib takes for: with gzip's header and checksum, and a window of any size."""


class Gunzipped(io.RawIOBase):
    """What the members of gzip data hold, one after another; zeros behind a member are padding."""

    def __init__(self, raw: io.RawIOBase | io.BufferedReader) -> None:
        self._raw, self._packed, self._pending, self._first = raw, b"", False, True
        self._member: Any = None
        self._damage: OSError | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        done = 0
        while done < len(buffer) and self._damage is None and (data := self._unpacked(len(buffer) - done)):
            buffer[done:done + len(data)] = data
            done += len(data)
        if self._damage is not None and not done:
            raise self._damage
        return done

    def close(self) -> None:
        self._raw.close()
        super().close()

    def _unpacked(self, most: int) -> bytes:
        """Some of what follows, and what of it damage leaves; nothing at the end."""
        while self._has_packed():
            before = self._member.copy()
            try:
                data = self._member.decompress(self._packed, most)
            except zlib.error as error:
                self._damage = OSError(str(error))
                return _before_damage(before, self._packed)
            if self._member.eof:
                self._packed, self._member, self._pending = self._member.unused_data, None, False
                self._first = False
                self._skip_padding()
            else:  # what was taken in may be more than was given out
                self._packed, self._pending = self._member.unconsumed_tail, len(data) == most
            if data:
                return data
        return b""

    def _has_packed(self) -> bool:
        """Whether there is more to unpack, of this member or of the next one, which is then begun."""
        while not (self._packed or self._pending):
            self._packed = self._raw.read(PACKED) or b""
            if not self._packed:
                if self._member is not None:
                    self._damage = OSError("the gzip data breaks off")
                return False
            self._skip_padding()
        if self._member is None:
            self._member = zlib.decompressobj(_GZIP)
        return True

    def _skip_padding(self) -> None:
        if self._member is None and not self._first:
            self._packed = self._packed.lstrip(b"\0")


def _before_damage(member: Any, packed: bytes) -> bytes:
    """What can be unpacked before the damage in these bytes, which is closed in on by steps of half the size."""
    found, step = b"", len(packed) // 2
    while step:
        attempt = member.copy()
        try:
            found += attempt.decompress(packed[:step])
        except zlib.error:
            step //= 2
        else:
            member, packed = attempt, packed[step:]
            step = min(step, len(packed))
    return found
