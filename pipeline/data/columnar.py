"""Files of columns, Parquet and Arrow: their rows as records.

A part of a Parquet file has as many of its row groups as it is of the file; rows keep their number in the file. An
Arrow file is read whole.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from drover.pipeline.config.data import FilesSource
from drover.pipeline.core.files import Record
from drover.pipeline.data.documents import (
    Limit,
    Records,
    Rejection,
    UnusableColumnsError,
    damage,
    raise_unless_damage,
    value_in,
)
from drover.pipeline.data.streams import Input, arrow_reader, map_file
from drover.pipeline.storage.object_files import ObjectFile

ROWS = 256
"""Rows taken into memory at a time, where they are not large."""
TEXT_TYPES = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
"""Arrow's types of columns that can hold documents' texts."""


def check_columns(present: list[str], source: FilesSource) -> list[str]:
    """The columns that the source names, or all if it names none; UnusableColumnsError if one is not there, or there
    twice."""
    # Items of evaluation sets have no text_field.
    named = filter(None, (source.text_field, source.id_field, *source.meta_fields))
    wanted = list(dict.fromkeys(named)) or present
    if missing := [name for name in wanted if _column(present, name) not in present]:
        raise UnusableColumnsError(f"no column named {', '.join(missing)}; the columns are "
                                   f"{', '.join(present) or 'none'}")
    if unclear := [name for name in wanted if present.count(_column(present, name)) > 1]:
        raise UnusableColumnsError(f"more than one column named {', '.join(unclear)}; the columns are "
                                   f"{', '.join(present)}")
    return wanted


def _column(present: list[str], name: str) -> str:
    """The column in which a field is: that of its name, or the one with the nested field, as `content.text`."""
    return name if name in present else name.split(".")[0]


def parquet_records(file: Input, source: FilesSource, limit: Limit) -> Records:
    """The rows of a Parquet file's row groups."""
    import pyarrow.parquet as pq
    piece = file.piece
    with _random_access(file) as data:
        if not data.size():
            return
        try:
            parquet = pq.ParquetFile(data)
            columns = _checked(parquet.schema_arrow, source)
        except damage() as error:
            raise_unless_damage(error)
            if piece.start == 0:  # said once for all parts
                raise
            return
        first = 0
        groups = parquet.num_row_groups
        for group in range(groups):
            rows = parquet.metadata.row_group(group).num_rows
            if piece.is_complete or piece.start <= group * piece.bytes // groups < piece.stop:
                yield from _row_group(parquet, group, first, columns, file, source, limit)
            first += rows


def _row_group(parquet: Any, group: int, first: int, columns: list[str], file: Input, source: FilesSource,
               limit: Limit) -> Records:
    """The rows of a row group, which `first` others precede. Counts its bytes in `file.content`; `_rows` sets
    `file.current` for each row. What cannot be read becomes one rejection."""
    about = parquet.metadata.row_group(group)
    done = 0
    rows = max(1, min(ROWS, limit.bytes * about.num_rows // max(1, about.total_byte_size)))
    size = max(1, about.total_byte_size // max(1, about.num_rows))
    file.content += about.total_byte_size
    try:
        for batch in parquet.iter_batches(rows, row_groups=[group], columns=columns):
            yield from _rows(batch, first + done, file, source, size)
            done += batch.num_rows
    except damage() as error:
        raise_unless_damage(error)
        yield file.reject(first + done + 1, f"row group {group} cannot be read from here on: {error}",
                         documents=about.num_rows - done, lost_bytes=size * (about.num_rows - done))


def arrow_records(file: Input, source: FilesSource, limit: Limit) -> Records:
    """Both of Arrow's containers: the IPC file (record batches at any place) and the IPC stream."""
    with _random_access(file) as data:
        if not data.size():
            return
        reader, count = arrow_reader(data)
        present = reader.schema.names
        first = 0
        columns = list(dict.fromkeys(_column(present, name) for name in _checked(reader.schema, source)))

        def read(number: int) -> Any:
            try:
                return reader.get_batch(number)
            except damage() as error:
                raise_unless_damage(error)
                size = data.size() // count
                file.content += size
                return file.reject(first + 1, f"record batch {number} cannot be read: {error}", lost=True,
                                   lost_bytes=size)
        for batch in reader if count < 0 else map(read, range(count)):
            if isinstance(batch, Rejection):
                yield batch
                continue
            size = batch.get_total_buffer_size()
            file.content += size
            yield from _rows(batch.select(columns), first, file, source, size // max(1, batch.num_rows))
            first += batch.num_rows


def _checked(schema: Any, source: FilesSource) -> list[str]:
    """The columns to read; UnusableColumnsError if they are not there, or the text's holds no text."""
    import pyarrow as pa
    columns = check_columns(schema.names, source)
    if source.text_field:
        kind, name = _type(schema, source.text_field)
        if str(kind.value_type if pa.types.is_dictionary(kind) else kind) not in TEXT_TYPES:
            raise UnusableColumnsError(f"the column '{name}' holds {kind}, not text")
    return columns


def _type(schema: Any, name: str) -> tuple[Any, str]:
    """The type of a field and its name, as far as it is there: of `content.text` that of `content` if it holds no
    `text`."""
    import pyarrow as pa
    held = _column(schema.names, name)
    kind = schema.field(held).type
    for part in name.removeprefix(held).split(".")[1:]:
        if not pa.types.is_struct(kind) or kind.get_field_index(part) < 0:
            break
        kind, held = kind.field(part).type, f"{held}.{part}"
    return kind, held


@contextmanager
def _random_access(file: Input) -> Iterator[Any]:
    """The file as Arrow reads it at any place. What is compressed, and a whole object, is copied into a temporary file
    first; of a part of an object the ranges are fetched that are read."""
    file.is_columnar = True
    if file.reader is not None and not file.piece.is_complete:
        import pyarrow as pa
        with pa.PythonFile(io.BufferedReader(Ranges(file.reader), 1), mode="r") as ranges:
            yield ranges
    elif file.compression or file.reader is not None:
        with tempfile.NamedTemporaryFile() as copy, file.open() as stream:
            while data := stream.read1():
                copy.write(data)
            copy.flush()
            file.content = 0  # its rows are counted
            with map_file(copy.name) as mapped:
                yield mapped
    else:
        file.hash()
        with map_file(Path(file.path)) as mapped:
            yield mapped


class Ranges(io.RawIOBase):
    """An object that is read at any place."""

    def __init__(self, reader: ObjectFile) -> None:
        self._reader = reader
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._reader.size)[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        stop = min(self._position + len(buffer), self._reader.size)
        data = self._reader.read(self._position, stop) if self._position < stop else b""
        buffer[:len(data)] = data
        self._position += len(data)
        return len(data)


def _rows(batch: Any, first: int, file: Input, source: FilesSource, size: int) -> Records:
    """The rows of a record batch, numbered from `first` + 1, with `size` bytes each on average. Where some cannot be
    read, each is read by itself, so that a broken value costs its own row."""
    import pyarrow as pa
    for start in range(0, batch.num_rows, ROWS):
        part = batch.slice(start, ROWS)
        try:
            part.validate(full=True)  # of offsets beyond the data Arrow would make a crash, not an error
            rows = part.to_pylist()
        except (pa.ArrowException, ValueError, OverflowError, KeyError) as error:
            raise_unless_damage(error)
            if part.num_rows == 1:
                yield file.reject(first + start + 1, f"the row cannot be read: {error}", lost_bytes=size)
            else:
                for row in range(part.num_rows):
                    yield from _rows(part.slice(row, 1), first + start + row, file, source, size)
            continue
        for place, row in enumerate(rows, first + start + 1):
            file.current = partial(_size, row, source.text_field, size)
            yield place, row


def _size(row: Record, field: str, average: int) -> int:
    """About how many bytes a row has: those of its text, or of an average row if that is more."""
    text = value_in(row, field)
    return max(average, len(text) if isinstance(text, (str, bytes)) else 0)
