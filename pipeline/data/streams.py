"""Input files and objects as streams of bytes, decompressed by the ending of their name, and cut into records.

The bytes that a unit reads are hashed as they pass, so that nothing is read twice for that.

A separator cuts a stream into lines, or into the texts between two of it. A part of a file of lines is a range of
bytes [start, stop). It has the records that begin after the first line end at or behind `start`, up to the first line
end at or behind `stop`. So parts that cover a file give its records once each, in order. No record longer than `limit`
is held: its length comes instead, and the next one is looked for.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path, PurePath
from typing import Any

from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Record, changed_ns, opened, refuse_irregular
from drover.pipeline.data.counts import FileRead
from drover.pipeline.data.documents import Place, Rejection
from drover.pipeline.storage.object_files import ObjectFile, content_number
from drover.pipeline.storage.store import BlockStream, Changed, is_url

UTF8 = "utf-8"
BUFFER = 1 << 20
"""Bytes read from the disk at a time."""
UNPACKED = 1 << 16
"""Bytes taken from unpacked data at a time."""
LEAST_PACKED, MOST_PACKED = 1 << 6, 1 << 13
"""Bytes of zstd data that are unpacked at a time: fewer where they become very many. What is among them is lost where
damage is."""
WIDE = ("utf-16", "utf-32")
"""How the encodings begin that are not ASCII where text is."""
LARGEST_WINDOW = 1 << 31
"""Bytes of memory that unpacking zstd data may take: what `zstd --long=31` needs, the most that it offers."""


@dataclass(frozen=True)
class Piece:
    """A file or a part of it that a unit reads.

    Attributes:
        name: `<source>/<path below the source's common folder>`.
        path: where the file lies; the URL of an object.
        bytes: the file's size.
        mtime_ns: when it changed last (`changed_ns`); of an object, the number of its content.
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
        return cls(f"/{path.name}", str(path), stat.st_size, changed_ns(stat), 0, stat.st_size)

    @property
    def is_complete(self) -> bool:
        """Whether it is all of the file."""
        return self.start == 0 and self.stop == self.bytes

    @property
    def file(self) -> str:
        """The file's name within its source."""
        return self.name.partition("/")[2]

    def reader(self) -> ObjectFile | None:
        """What reads it, if it is an object."""
        return ObjectFile(self.path, self.bytes, self.etag) if is_url(self.path) else None

    def refuse_changed(self) -> None:
        """UserError if the file's size or time has changed since the unit was planned; OSError if it cannot be read.

        The store compares the ETag of an object at each read, so only an object of which nothing is read is checked
        here.
        """
        if (reader := self.reader()) is not None:
            if not (self.bytes and self.etag):
                entry = reader.head()
                if (entry.size, content_number(entry.etag, entry.modified)) != (self.bytes, self.mtime_ns):
                    raise Changed(f"{self.path} is not what it was: somebody else wrote it.")
            return
        now = Path(self.path).stat()
        if (now.st_size, changed_ns(now)) != (self.bytes, self.mtime_ns):
            raise UserError(f"{self.path} is not what it was when the stage began: {self.bytes:,} -> {now.st_size:,} "
                            f"bytes, or another time. Let nobody write to it, and run the same command again, which "
                            f"reads it again.")


class Input:
    """A piece that is read, and hashed on the way.

    Attributes:
        content: bytes of it that were read, unpacked; of a file of columns those of its values.
        head: the file's first bytes, unpacked, where its reader asks for them.
        is_columnar: whether it is a file of columns; its reader says so.
        current: a function of its reader: how many of these bytes are the last record.
        about: what becomes of it, for its readers to say.

    Raises:
        UserError: the file has changed since the unit was planned.
        OSError: it cannot be read.
    """

    def __init__(self, piece: Piece, encoding: str = UTF8) -> None:
        self.piece = piece
        self.reader = piece.reader()
        self.encoding = encoding
        self.path = Path(piece.path) if self.reader is None else PurePath(piece.path)
        self.content = 0
        self.head = b""
        self.is_columnar = False
        self.about = FileRead(piece.name.partition("/")[0], piece.file, piece.bytes)
        self.current: Callable[[], int] = lambda: 0
        self._raw: Watched | None = None
        piece.refuse_changed()
        self._hash = _FileHash(piece, self.raw)

    def open(self) -> Any:
        """A stream of the bytes from the start of the piece on, unpacked by the ending of the name; as UTF-8, unless it
        is a file of columns."""
        start = self.piece.start
        raw = self._raw = Watched(self.raw(start, self.piece.stop), start, self._hash.feed)
        stream = unpacked(raw, self.compression) if self.compression else io.BufferedReader(raw, BUFFER)
        return _Counted(stream if self.encoding == UTF8 or self.is_columnar else
                        io.BufferedReader(BlockStream(_recoded(stream, self.encoding), stream), UNPACKED), self)

    @property
    def compression(self) -> str:
        """What the file is packed by, as its name says; else empty."""
        from drover.pipeline.config.data import COMPRESSIONS  # not above: workers of encode start without pydantic

        return COMPRESSIONS.get(self.path.suffix.lower(), "")

    @property
    def is_plain(self) -> bool:
        """Whether what is read are the file's own bytes, neither unpacked nor of another encoding."""
        return not self.compression and self.encoding == UTF8

    def give_up(self, position: int | None = None) -> int:
        """Bytes of content behind `position` (by default all that was not read), which nobody will read. Of a file that
        is not plain those that were not read are estimated."""
        position, rest = self.content if position is None else position, self.piece.bytes - self.content
        if not self.is_plain and self._raw is not None:
            done = self._raw.position
            rest = (self.piece.bytes - done) * self.content // done if self.content else self.piece.bytes - done
        self.content += max(0, rest)
        return self.content - position

    def reject(self, place: Place, reason: str, documents: int = 1, *, lost: bool = False, lost_bytes: int = 0,
               url: str = "") -> Rejection:
        """What its reader yields in place of a record that cannot be read."""
        return Rejection(self.about.source, self.about.file, place, reason, documents, lost, lost_bytes, url)

    def on_disk(self, size: int) -> int:
        """How many of the file's own bytes so many bytes of content are; of a part they may lie beyond it."""
        if size == self.piece.bytes or not (self.piece.is_complete or self.is_columnar):
            return size
        own = self.piece.stop - self.piece.start
        return own * min(size, self.content) // self.content if self.content else own

    def record(self) -> Record:
        """What the unit's record says of the file: name, size, time and sha256, for which the rest of the file is read
        now. Of a file in parts only the first has the hash."""
        sha256 = self._hash.sha256()
        self.piece.refuse_changed()
        piece = self.piece
        path = piece.path if self.reader is not None else str(Path(piece.path).absolute())
        return {"path": path, "name": piece.name, "bytes": piece.bytes,
                "mtime_ns": piece.mtime_ns, "sha256": sha256}

    def hash(self) -> None:
        """Hash the piece before it is parsed, since parsers read it in any order."""
        self._hash.sha256()

    def raw(self, position: int, until: int | None) -> Any:
        """The file's own bytes from `position` on, unhashed; of an object those before `until` are prefetched."""
        if self.reader is not None:
            return self.reader.open(position, until)
        file = opened(str(self.path), 0)
        file.seek(position)
        return file


class _FileHash:
    """The sha256 of a file, of bytes that come in order. Of a file that is read in parts, the first one hashes all.

    Attributes:
        at: offset of the next byte to hash.
    """

    def __init__(self, piece: Piece, opened: Callable[[int, int | None], Any]) -> None:
        self._opened = opened
        self._size = piece.bytes
        self._is_first = piece.start == 0
        self._digest = hashlib.sha256()
        self.at = 0

    def feed(self, position: int, data: memoryview) -> None:
        """Take in the bytes read at `position`, as far as they continue those taken in before."""
        if self._is_first and position <= self.at < position + len(data):
            self._digest.update(data[self.at - position:])
            self.at = position + len(data)

    def sha256(self) -> str | None:
        """The hash, for which the rest of the file is read; None for a later part."""
        if not self._is_first:
            return None
        if self.at < self._size:
            with self._opened(self.at, self._size) as file:
                buffer = memoryview(bytearray(BUFFER))
                while count := file.readinto(buffer):
                    self.feed(self.at, buffer[:count])
        return self._digest.hexdigest()


class _Counted(io.BufferedIOBase):
    """A stream of which the input counts what is read."""

    def __init__(self, stream: Any, of: Input) -> None:
        self._stream = stream
        self._of = of

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        return self._count(self._stream.read(size))

    def read1(self, size: int = -1) -> bytes:
        return self._count(self._stream.read1(size))

    def _count(self, data: bytes) -> bytes:
        self._of.content += len(data)
        return data

    def close(self) -> None:
        self._stream.close()
        super().close()


class Watched(io.RawIOBase):
    """A file that stands at `position`; `seen` is given the bytes that are read, and their offset."""

    def __init__(self, file: Any, position: int, seen: Callable[[int, memoryview], None]) -> None:
        self.position = position
        self._file = file
        self._seen = seen

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count: int = self._file.readinto(buffer)
        self._seen(self.position, memoryview(buffer)[:count])
        self.position += count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _recoded(file: Any, encoding: str) -> Iterator[bytes]:
    """Text of another encoding as UTF-8 (see `recoder`)."""
    recode = recoder(encoding)
    data = b" "
    while data:
        data = file.read(CHUNK)
        if block := recode(data, not data):
            yield block


def recoder(encoding: str) -> Callable[[bytes, bool], bytes]:
    """Makes UTF-8 of bytes in an encoding that come in parts, of which the last is marked. What cannot be decoded
    becomes a byte that UTF-8 has not, so that it is found where broken UTF-8 is."""
    decoder = codecs.getincrementaldecoder(encoding)(BROKEN)
    return lambda data, final: decoder.decode(data, final).encode(UTF8, BROKEN)


def _broken(error: UnicodeError) -> tuple[str | bytes, int]:
    """In place of what cannot be decoded or encoded: half of a surrogate pair, and of that a byte."""
    assert isinstance(error, (UnicodeDecodeError, UnicodeEncodeError))
    return b"\xff" if isinstance(error, UnicodeEncodeError) else "\udcff", error.end


BROKEN = "drover.broken"
codecs.register_error(BROKEN, _broken)


def unpacked(raw: Any, compression: str) -> Any:
    """What compressed bytes hold; damage is an OSError without a number, an EOFError or a zlib.error."""
    packed = io.BufferedReader(raw, BUFFER)
    return gzip.GzipFile(fileobj=packed) if compression == "gzip" else \
        io.BufferedReader(BlockStream(_zstd_blocks(packed), packed), UNPACKED)


def _zstd_blocks(packed: io.BufferedReader) -> Iterator[bytes]:
    """zstd data unpacked, with windows of any size (`zstd --long`). zstandard's own reader ends without an error where
    the data breaks off."""
    import zstandard
    decompressor = zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW)
    frame = None
    amount = LEAST_PACKED
    rest = b""  # behind a frame's end
    while data := rest or packed.read(amount):
        frame = frame or decompressor.decompressobj()
        try:
            block: bytes = frame.decompress(data)
        except zstandard.ZstdError as error:
            raise (MemoryError if "memory" in str(error).lower() else OSError)(str(error)) from None
        amount = max(LEAST_PACKED, min(MOST_PACKED, 2 * len(data), BUFFER * len(data) // max(1, len(block))))
        rest = frame.unused_data
        if frame.eof:
            frame = None
        if block:
            yield block
    if frame is not None:
        raise EOFError("the zstd data breaks off")


def map_file(path: str | Path) -> Any:
    """The file in memory, as Arrow reads it at any place."""
    import pyarrow as pa
    refuse_irregular(Path(path))
    # Given a text as name, Arrow takes it for UTF-8; bytes as they are.
    return pa.memory_map(os.fsencode(path))


def arrow_reader(data: Any) -> tuple[Any, int]:
    """A reader of record batches, and how many there are; -1 for a stream, which does not say."""
    import pyarrow as pa
    is_file = data.read(6) == b"ARROW1"
    data.seek(0)
    reader = pa.ipc.open_file(data) if is_file else pa.ipc.open_stream(data)
    return reader, reader.num_record_batches if is_file else -1


def name_as_text(name: str) -> str:
    """A file's name as valid Unicode: bytes that are not UTF-8 become `\\xe9`."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


CHUNK = 1 << 16
"""Bytes read at once."""
Records = Iterator[tuple[int, bytes | int]]


def separated(stream: BufferedIOBase, separator: bytes, limit: int, start: int = 0, stop: int = sys.maxsize) -> Records:
    """The records of the part [start, stop), each with the offset of its first byte; none after a separator that ends
    the file. A byte order mark at the beginning of the file is left out.

    stream: stands at `start`. separator: one byte, unless the part is the whole file.
    """
    size = len(separator)
    own = start == 0  # whether the present record is of this part
    at = begin = start  # offsets of `rest` and of the record that it belongs to
    rest = b""
    data = _read(stream, len(codecs.BOM_UTF8) + 1)
    if own and data.startswith(codecs.BOM_UTF8):
        at, begin, data = at + 3, begin + 3, data[3:]
    while data:
        *texts, rest = (rest + data).split(separator)
        for text in texts:
            end = at + len(text) + size
            if own:
                yield begin, end - size - begin if at > begin or len(text) > limit else text
            if end > stop:
                return
            own = True
            at = begin = end
        if len(rest) > size + (limit if own else 0):
            dropped = len(rest) - size + 1
            at, rest = at + dropped, rest[dropped:]
            if not own and at > stop:
                return
        data = _read(stream, max(1, len(rest)))  # doubling: a long record is copied a few times only
    if own and (rest or at > begin):
        yield begin, at + len(rest) - begin if at > begin or len(rest) > limit else rest


def _read(stream: BufferedIOBase, least: int) -> bytes:
    """At least so many bytes, fewer at the end."""
    parts = list[bytes]()
    size = 0
    while size < least and (part := stream.read1(CHUNK)):
        parts.append(part)
        size += len(part)
    return b"".join(parts)


HEAD = 4096
"""Bytes that are looked at."""
SKIPPABLE = b"\x2a\x4d\x18"
"""Follows the first byte of a zstd frame without data, which `pzstd` writes before each other one."""
_UNPACK = "unpack it (.gz and .zst are read as they are)"
_SIGNATURES = (
    (b"version https://git-lfs.github.com/spec/", "Git LFS",
     "a Git LFS pointer; run `git lfs pull` in the clone it comes from"),
    (b"\x1f\x8b", "gzip", "a gzip file; add .gz to its name, or unpack it"),
    (b"\x28\xb5\x2f\xfd", "zstd", "a zstd file; add .zst to its name, or unpack it"),
    (b"\xfd7zXZ\0", "xz", f"an xz file; {_UNPACK}"),
    (tuple(b"BZh%d1AY&SY" % level for level in range(1, 10)), "bzip2", f"a bzip2 file; {_UNPACK}"),
    (b"PK\x03\x04", "zip", f"a zip file; {_UNPACK}"), (b"7z\xbc\xaf\x27\x1c", "7-Zip", f"a 7-Zip file; {_UNPACK}"),
    (b"\x04\x22\x4d\x18", "LZ4", f"an LZ4 file; {_UNPACK}"),
    (b"PAR1", "Parquet", "a Parquet file; name it .parquet, or set the source's `format: parquet`"),
    (b"ARROW1", "Arrow", "an Arrow file; name it .arrow, or set the source's `format: arrow`"),
    (b"%PDF-", "PDF", "a PDF file; name it .pdf, or set the source's `format: pdf`"),
    (b"WARC/1.", "WARC", "a WARC file; name it .warc, or set the source's `format: warc`"),
    (b"SQLite format 3\0", "SQLite", "an SQLite file; export its text first"),
    (b"\xff\xfe\0\0", "UTF-32", "UTF-32 text with a byte-order mark; set the source's `encoding: utf-32`"),
    ((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), "UTF-16",
     "UTF-16 text with a byte-order mark; set the source's `encoding: utf-16`"),
    (b"\x89PNG", "PNG", "a PNG file; leave it out"), (b"\xff\xd8\xff", "JPEG", "a JPEG file; leave it out"),
    (b"\x7fELF", "ELF", "an ELF file; leave it out"))
"""First bytes of files that are not text, the name of their format, and what a user reads about it."""
PAGE = re.compile(r"\ufeff*+\s*+(?>---\s*?\n.*?\n---\s+)?+(?>(<\?xml[^>]*>|<!--.*?-->)\s*)*+"
                  r"<(!doctype\s+html|(html|head|body)[\s>])", re.I | re.S)
"""How an HTML page begins, also after front matter in YAML."""
_FORMATS = {"parquet": "Parquet", "arrow": "Arrow", "pdf": "PDF", "warc": "WARC"}
FEW_NULS, NUL_SHARE = 16, 0.1
"""Text that is valid UTF-8 may hold NULs (U+0000); from so many on, and this share of all bytes, it is no text."""


def mistaken(file: Input, kind: str, html: str = "pages") -> tuple[str | None, bytes | None]:
    """What a file is instead of the format `kind` (and the compression) that it is to be read as, and what to do about
    it, None where nothing speaks against it; and its first bytes, unpacked and as UTF-8. A file that cannot be opened
    is left to its reader, without these. html: `keep` lets a page be text."""
    try:
        with file.raw(0, 0) as raw:
            head = raw.read(HEAD) or b""
        if head and file.compression:
            what, advice = _signature(head)
            if file.compression != ("zstd" if head[1:4] == SKIPPABLE else what):
                return (f"its name ends in {file.path.suffix}, but it is "
                        f"{advice or f'no {file.compression} data; rename it, or fetch it again'}"), None
            with unpacked(file.raw(0, 0), file.compression) as stream:
                head = stream.read(HEAD) or b""
        instead = _instead_of(kind, head, html, file.encoding)
        is_own = file.encoding == UTF8 or instead is not None or kind in _FORMATS
        return instead, head if is_own else recoder(file.encoding)(head, False)
    except (OSError, EOFError, zlib.error):
        return None, None


def _instead_of(kind: str, head: bytes, html: str, encoding: str) -> str | None:
    wanted, (what, advice) = _FORMATS.get(kind), _signature(head)
    if encoding != UTF8 and wanted is None and encoding.startswith(what.lower()):
        if (wrong := _not_encoded(encoding, head)) is not None:
            return wrong
        head, what = recoder(encoding)(head, False), ""
    if kind == "html" and what.startswith("UTF"):
        return None  # its mark says how to decode it
    if what:
        return None if what == wanted else f"it is {advice}"
    if kind == "warc":
        return "it is no WARC file"
    if wanted is not None or kind == "html":
        return None  # its own reader knows
    if PAGE.match(head.decode("utf-8", "replace")):
        if kind != "txt":
            return "it is an HTML page, as a server sends in place of a file that cannot be had; fetch the file again"
        if html != "keep":
            return ("it is an HTML page; name it .html, or set the source's `format: html`, and its text is extracted "
                    "(`html: keep` keeps the markup)")
    return _no_text(head)


def _no_text(head: bytes) -> str | None:
    nuls = head.count(0)
    if not nuls or (_is_utf8(head) and (nuls < FEW_NULS or nuls < NUL_SHARE * len(head))):
        return None
    if order := utf16_order(head):
        return f"it is UTF-16 text without a byte-order mark; set the source's `encoding: utf-16-{order}`"
    return "it is binary data, not text (it holds NUL bytes); leave it out, or take its text out of it first"


def utf16_order(head: bytes) -> str:
    """`le` or `be` if the first bytes of a file are UTF-16 without a byte order mark, as Western scripts show it; else
    empty."""
    even, odd = head[::2].count(0), head[1::2].count(0)
    for order, own, other in (("be", even, odd), ("le", odd, even)):
        if own > 0.7 * len(head) / 2 and other < 0.05 * own:  # half of each letter
            return order
    return ""


def _not_encoded(encoding: str, head: bytes) -> str | None:
    """What speaks against text in another encoding than UTF-8."""
    if encoding in ("utf-16", "utf-32") and head and _signature(head)[0] != encoding.upper():
        return (f"it has no byte-order mark of {encoding.upper()}; set the source's `encoding` to {encoding}-le or "
                f"{encoding}-be, or leave it out where the text is UTF-8")
    is_wide = encoding.startswith(WIDE)
    if _is_utf8(head) and (0 not in head if is_wide else not head.isascii()) and head:
        return f"it is UTF-8, not {encoding}; make a source without `encoding` of such files"
    return None


def _is_utf8(head: bytes) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)  # a last character may be cut
    except UnicodeDecodeError:
        return False
    return True


def _signature(head: bytes) -> tuple[str, str]:
    """The format that a file's first bytes show, and what a user reads about it; both "" if they show none."""
    return next(((name, advice) for start, name, advice in _SIGNATURES if head.startswith(start)), ("", ""))
