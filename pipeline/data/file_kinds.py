"""Recognize, by its first bytes, a file that is not what its name says, and say what to do about it."""

from __future__ import annotations

import codecs
import re
import zlib

from drover.pipeline.data.streams import UTF8, WIDE, Input, recoder, unpacked

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
    (b"%PDF-", "PDF", "a PDF file; take its text out of it first"),
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
_FORMATS = {"parquet": "Parquet", "arrow": "Arrow"}
FEW_NULS, NUL_SHARE = 16, 0.1
"""Text that is valid UTF-8 may hold NULs (U+0000); from so many on, and this share of all bytes, it is no text."""


def mistaken(file: Input, kind: str, html: str = "refuse") -> tuple[str | None, bytes | None]:
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
                        f"{advice or f'no {file.compression} data; rename it'}"), None
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
    if what:
        return None if what == wanted else f"it is {advice}"
    if wanted is not None:
        return None  # its own reader knows
    if PAGE.match(head.decode("utf-8", "replace")):
        if kind != "txt":
            return "it is an HTML page, as a server sends in place of a file that cannot be had; fetch the file again"
        if html != "keep":
            return ("it is an HTML page, of which the model would learn the markup; take its text out of it first, or "
                    "set the source's `html: keep`")
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
