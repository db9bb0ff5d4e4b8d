"""Files of columns, Parquet and Arrow: their rows as records.

A part of a Parquet file has as many of its row groups as it is of the file; rows keep their number in the file. An
Arrow file is read whole.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from drover.pipeline.config.data import FilesSource
from drover.pipeline.data.documents import (
    Limit,
    Records,
    Unreadable,
    UnusableColumnsError,
    damage,
    raise_unless_damage,
)
from drover.pipeline.data.streams import COMPRESSIONS, Input, map_file

ROWS = 256
"""Rows taken into memory at a time, where they are not large."""
TEXT_TYPES = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
"""Arrow's types of columns that can hold documents' texts."""


def check_columns(present: list[str], source: FilesSource) -> list[str]:
    """The columns that the source names, or all if it names none; UnusableColumnsError if one is not there, or there
    twice."""
    wanted = wanted_columns(source) or present
    if missing := [name for name in wanted if name not in present]:
        raise UnusableColumnsError(f"no column named {', '.join(missing)}; the columns are "
                                   f"{', '.join(present) or 'none'}")
    if unclear := [name for name in wanted if present.count(name) > 1]:
        raise UnusableColumnsError(f"more than one column named {', '.join(unclear)}; the columns are "
                                   f"{', '.join(present)}")
    return wanted


def stored_columns(data: Any, kind: str) -> list[str]:
    """The columns of a Parquet or Arrow file, by its schema; one of `damage()` where it has none."""
    import pyarrow.parquet as pq
    return list(pq.ParquetFile(data).schema_arrow.names if kind == "parquet" else _arrow_reader(data)[0].schema.names)


def parquet_records(file: Input, source: FilesSource, limit: Limit) -> Records:
    """The rows of a Parquet file's row groups."""
    import pyarrow.parquet as pq
    piece = file.piece
    with _random_access(file) as data:
        try:
            parquet = pq.ParquetFile(data)
            columns = _checked(parquet.schema_arrow, source)
        except damage() as error:
            raise_unless_damage(error)
            if piece.start == 0:  # said once for all parts
                raise
            return
        first, groups = 0, parquet.num_row_groups
        for group in range(groups):
            rows = parquet.metadata.row_group(group).num_rows
            if piece.whole or piece.start <= group * piece.bytes // groups < piece.stop:
                yield from _row_group(parquet, group, first, columns, source, limit)
            first += rows


def _row_group(parquet: Any, group: int, first: int, columns: list[str], source: FilesSource, limit: Limit) -> Records:
    about, done = parquet.metadata.row_group(group), 0
    rows = max(1, min(ROWS, limit.bytes * about.num_rows // max(1, about.total_byte_size)))
    try:
        for batch in parquet.iter_batches(rows, row_groups=[group], columns=columns):
            yield from _rows(batch, first + done, source)
            done += batch.num_rows
    except damage() as error:
        raise_unless_damage(error)
        yield Unreadable(first + done + 1, f"row group {group} cannot be read from here on: {error}",
                         documents=about.num_rows - done)


def arrow_records(file: Input, source: FilesSource, limit: Limit) -> Records:
    """Both of Arrow's containers: the IPC file (record batches at any place) and the IPC stream."""
    with _random_access(file) as data:
        reader, count = _arrow_reader(data)
        columns, first = _checked(reader.schema, source), 0
        for number in range(count):
            try:
                batch = reader.get_batch(number)
            except damage() as error:
                raise_unless_damage(error)
                yield Unreadable(first + 1, f"record batch {number} cannot be read: {error}", lost=True)
                continue
            yield from _rows(batch.select(columns), first, source)
            first += batch.num_rows
        for batch in reader if count < 0 else ():
            yield from _rows(batch.select(columns), first, source)
            first += batch.num_rows


def _arrow_reader(data: Any) -> tuple[Any, int]:
    """A reader of record batches, and how many there are; -1 for a stream, which does not say."""
    import pyarrow as pa
    is_file = data.read(6) == b"ARROW1"
    data.seek(0)
    reader = pa.ipc.open_file(data) if is_file else pa.ipc.open_stream(data)
    return reader, reader.num_record_batches if is_file else -1


def _checked(schema: Any, source: FilesSource) -> list[str]:
    """The columns to read; UnusableColumnsError if they are not there, or the text's holds no text."""
    import pyarrow as pa
    columns = check_columns(schema.names, source)
    if source.text_field:
        kind = schema.field(source.text_field).type
        if str(kind.value_type if pa.types.is_dictionary(kind) else kind) not in TEXT_TYPES:
            raise UnusableColumnsError(f"the column '{source.text_field}' holds {kind}, not text")
    return columns


@contextmanager
def _random_access(file: Input) -> Iterator[Any]:
    """The file as Arrow reads it at any place; a compressed one is unpacked into a temporary file first, and what a
    piece of an object holds is kept in one."""
    if file.path.suffix.lower() in COMPRESSIONS:
        with tempfile.NamedTemporaryFile() as unpacked, file.open() as stream:
            while data := stream.read1():
                unpacked.write(data)
            unpacked.flush()
            with map_file(unpacked.name) as mapped:
                yield mapped
    elif file.reader is not None:
        import pyarrow as pa
        with file.spool() as spool, pa.PythonFile(spool, mode="r") as opened:
            yield opened
    else:
        file.hash()
        with map_file(Path(file.path)) as mapped:
            yield mapped


def _rows(batch: Any, first: int, source: FilesSource) -> Records:
    """The rows of a record batch, numbered from `first` + 1. Where some cannot be read, each is read by itself, so that
    a broken value costs its own row."""
    import pyarrow as pa
    for start in range(0, batch.num_rows, ROWS):
        part = batch.slice(start, ROWS)
        try:
            part.validate(full=True)  # of offsets beyond the data Arrow would make a crash, not an error
            rows = part.to_pylist()
        except (pa.ArrowException, ValueError, OverflowError, KeyError) as error:
            raise_unless_damage(error)
            if part.num_rows == 1:
                yield Unreadable(first + start + 1, f"the row cannot be read: {error}")
            else:
                for row in range(part.num_rows):
                    yield from _rows(part.slice(row, 1), first + start + row, source)
            continue
        for place, row in enumerate(rows, first + start + 1):
            if isinstance(text := row.get(source.text_field), bytes):
                row[source.text_field] = text.decode("utf-8", "surrogateescape")
            yield place, row


def wanted_columns(source: FilesSource) -> list[str]:
    """The columns that a source names, each once. Items of evaluation sets have no text_field: it is ""."""
    return list(dict.fromkeys(filter(None, (source.text_field, source.id_field, *source.meta_fields))))
