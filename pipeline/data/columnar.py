"""Files of columns, Parquet and Arrow: their rows as records, of the whole file or of a part of it.

A part of a Parquet file has the row groups whose first byte lies in it, a part of an Arrow IPC file as many of its
record batches as it is of the file. Rows of Parquet have their number in the file; a row of a part of an Arrow file has
the number of its batch and, from 1, its own in it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pipeline.config.data import FilesSource
from pipeline.data.records import Limit, Place, Records, Unreadable, UnusableColumnsError, damage
from pipeline.data.streams import COMPRESSIONS, Input, map_file

ROWS = 256
"""Rows taken into memory at a time, where they are not large."""


def check_columns(present: list[str], source: FilesSource) -> list[str]:
    """The columns that the source names; UnusableColumnsError if one is not there."""
    wanted = _wanted(source)
    if missing := [name for name in wanted if name not in present]:
        raise UnusableColumnsError(f"no column named {', '.join(missing)}; the columns are "
                                   f"{', '.join(present) or 'none'}")
    return wanted


def parquet_records(file: Input, source: FilesSource, limit: Limit) -> Records:
    """The rows of a Parquet file's row groups."""
    import pyarrow.parquet as pq
    with _random_access(file) as data:
        try:
            parquet = pq.ParquetFile(data)
            columns = check_columns(parquet.schema_arrow.names, source)
        except damage():
            if file.piece.start == 0:  # said once for all parts
                raise
            return
        first = 0
        for group in range(parquet.num_row_groups):
            about = parquet.metadata.row_group(group)
            if _holds(file, _first_byte(about)):
                yield from _row_group(parquet, group, first, columns, source, limit)
            first += about.num_rows


def _row_group(parquet: Any, group: int, first: int, columns: list[str], source: FilesSource, limit: Limit) -> Records:
    about, done = parquet.metadata.row_group(group), 0
    rows = max(1, min(ROWS, limit.bytes * about.num_rows // max(1, about.total_byte_size)))
    try:
        for batch in parquet.iter_batches(rows, row_groups=[group], columns=columns):
            for record in _batch_records(batch, first + done, source, limit):
                yield record
                done += 1
    except damage() as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        yield Unreadable(first + done + 1, f"row group {group} cannot be read from here on: {error}",
                         documents=about.num_rows - done)


def _first_byte(about: Any) -> int:
    """Where a row group's data begins, as far as its columns say."""
    columns = [about.column(number) for number in range(about.num_columns)]
    places = [(column.dictionary_page_offset, column.data_page_offset) for column in columns]
    return min((place for pair in places for place in pair if place), default=0)


def _holds(file: Input, place: int) -> bool:
    """Whether the piece holds what begins at `place`; what is said to lie outside of the file belongs to its ends."""
    piece = file.piece
    return piece.whole or piece.start <= min(max(place, 0), piece.bytes - 1) < piece.stop


def arrow_records(file: Input, source: FilesSource, limit: Limit) -> Records:
    """Both of Arrow's containers: the IPC file (record batches at any place) and the IPC stream."""
    import pyarrow as pa
    piece = file.piece
    with _random_access(file) as data:
        try:
            is_file = data.read(6) == b"ARROW1"
            data.seek(0)
            reader = pa.ipc.open_file(data) if is_file else pa.ipc.open_stream(data)
            check_columns(reader.schema.names, source)
        except damage():
            if piece.start == 0:
                raise
            return
        if is_file:
            yield from _indexed_batches(reader, file, source, limit)
        elif piece.start == 0:  # a stream has no index: its first part is all of it
            first = 0
            for batch in reader:
                yield from _batch_records(batch, first, source, limit)
                first += batch.num_rows


def _indexed_batches(reader: Any, file: Input, source: FilesSource, limit: Limit) -> Records:
    count, first, piece = reader.num_record_batches, 0, file.piece
    for index in range(count):
        if not _holds(file, index * piece.bytes // count):
            continue
        rows, done = 0, 0
        prefix = "" if piece.whole else f"{index}:"
        try:
            batch = reader.get_batch(index)
            rows = batch.num_rows
            for record in _batch_records(batch, first if piece.whole else 0, source, limit, prefix):
                yield record
                done += 1
        except damage() as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            yield Unreadable(_place(first + done + 1, prefix), f"record batch {index} cannot be read from here on: "
                             f"{error}", documents=max(rows - done, 1), lost=rows == 0)
        first += rows if piece.whole else 0


@contextmanager
def _random_access(file: Input) -> Iterator[Any]:
    """The file as Arrow reads it at any place; a compressed one is unpacked into a temporary file first."""
    if file.path.suffix.lower() not in COMPRESSIONS:
        file.hash()
        with map_file(file.path) as data:
            yield data
        return
    with tempfile.NamedTemporaryFile() as unpacked, file.open() as stream:
        while data := stream.read1():
            unpacked.write(data)
        unpacked.flush()
        with map_file(unpacked.name) as data:
            yield data


def _place(number: int, prefix: str) -> Place:
    return f"{prefix}{number}" if prefix else number


def _batch_records(batch: Any, first: int, source: FilesSource, limit: Limit, prefix: str = "") -> Records:
    """The rows of an Arrow record batch, numbered from `first` + 1; with a prefix, their places begin with it."""
    names = _wanted(source)
    for start in range(0, batch.num_rows, ROWS):
        part = batch.slice(start, ROWS)
        long: set[int] = set()
        columns = [_strings(part.column(name), name, limit, long) if name == source.text_field
                   else part.column(name).to_pylist() for name in names]
        for index, values in enumerate(zip(*columns, strict=True)):
            place = _place(first + start + index + 1, prefix)
            yield limit.exceeded(place) if index in long else (place, dict(zip(names, values, strict=True)))


def _strings(column: Any, name: str, limit: Limit, long: set[int]) -> list[str | None]:
    """A text column decoded value by value, so that one broken value does not cost the others; the rows of values
    beyond the limit are added to `long`."""
    import pyarrow as pa
    import pyarrow.compute as pc
    kinds = pa.types
    if kinds.is_dictionary(column.type):
        column = column.dictionary_decode()
    if kinds.is_string(column.type):
        column = column.view(pa.binary())
    elif kinds.is_large_string(column.type):
        column = column.view(pa.large_binary())
    elif kinds.is_string_view(column.type):
        column = column.cast(pa.large_string()).view(pa.large_binary())
    elif not (kinds.is_binary(column.type) or kinds.is_large_binary(column.type)):
        raise UnusableColumnsError(f"the column '{name}' holds {column.type}, not text")
    column.validate(full=True)  # offsets beyond the data would be a crash, not an error
    if column.nbytes > limit.bytes:
        exceeds = pc.greater(pc.binary_length(column), limit.bytes)
        long.update(index for index, true in enumerate(exceeds.to_pylist()) if true)
        column = pc.if_else(exceeds, None, column)
    return [None if value is None else value.decode("utf-8", "surrogateescape") for value in column.to_pylist()]


def _wanted(source: FilesSource) -> list[str]:
    names = [source.text_field, *([source.id_field] if source.id_field else []), *source.meta_fields]
    return list(dict.fromkeys(names))
