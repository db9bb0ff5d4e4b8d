"""Files as streams of bytes, decompressed by the ending of their name; the name may be any bytes that a disk holds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}


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
