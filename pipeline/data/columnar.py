"""Files of columns, Parquet and Arrow: their rows as records, of the whole file or of a part of it.

A part of a Parquet file has the row groups whose first byte lies in it, a part of an Arrow IPC file as many of its
record batches as it is of the file. Rows of Parquet have their number in the file; a row of a part of an Arrow file has
the number of its batch and, from 1, its own in it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.config.data import FilesSource
from pipeline.data.records import (
    Limit,
    Place,
    Records,
    Unreadable,
    UnusableColumnsError,
    damage,
    raise_unless_damage,
)
from pipeline.data.streams import COMPRESSIONS, Input, map_file

ROWS = 256
"""Rows taken into memory at a time, where they are not large."""
UNFIT = (ValueError, OverflowError, KeyError)
"""What a value raises that Python has no kind for: a date beyond its calendar, a time zone that nobody knows (the
KeyError), broken UTF-8 inside of a list."""


def check_columns(present: list[str], source: FilesSource) -> list[str]:
    """The columns that the source names; UnusableColumnsError if one is not there, or there twice."""
    wanted = wanted_columns(source)
    if missing := [name for name in wanted if name not in present]:
        raise UnusableColumnsError(f"no column named {', '.join(missing)}; the columns are "
                                   f"{', '.join(present) or 'none'}")
    if unclear := [name for name in wanted if present.count(name) > 1]:
        raise UnusableColumnsError(f"more than one column named {', '.join(unclear)}; the columns are "
                                   f"{', '.join(present)}")
    return wanted


def stored_columns(data: Any, kind: str) -> list[str]:
    """The columns of a Parquet or Arrow file, by its schema; one of `damage()` where it has none."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    if kind == "parquet":
        return list(pq.ParquetFile(data).schema_arrow.names)
    is_file = data.read(6) == b"ARROW1"
    data.seek(0)
    return list((pa.ipc.open_file(data) if is_file else pa.ipc.open_stream(data)).schema.names)


def parquet_records(file: Input, source: FilesSource, limit: Limit) -> Records:
    """The rows of a Parquet file's row groups."""
    import pyarrow.parquet as pq
    with _random_access(file) as data:
        try:
            parquet = pq.ParquetFile(data)
            columns = check_columns(parquet.schema_arrow.names, source)
        except damage() as error:
            raise_unless_damage(error)
            if file.piece.start == 0:  # said once for all parts
                raise
            return
        first = 0
        for group in range(parquet.num_row_groups):
            about = parquet.metadata.row_group(group)
            # Arrow ends the process where it is asked for the place of a column whose statistics are damaged.
            if file.piece.whole or _holds(file, _first_byte(about)):
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
        raise_unless_damage(error)
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
        except damage() as error:
            raise_unless_damage(error)
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
            raise_unless_damage(error)
            yield Unreadable(_place(first + done + 1, prefix), f"record batch {index} cannot be read from here on: "
                             f"{error}", documents=max(rows - done, 1), lost=rows == 0)
        first += rows if piece.whole else 0


@contextmanager
def _random_access(file: Input) -> Iterator[Any]:
    """The file as Arrow reads it at any place; a compressed one is unpacked into a temporary file first, and what a
    piece of an object holds is kept in one."""
    if file.path.suffix.lower() not in COMPRESSIONS:
        if file.reader is not None:
            import pyarrow as pa
            with file.spool() as spool, pa.PythonFile(spool, mode="r") as data:
                yield data
            return
        file.hash()
        with map_file(Path(file.path)) as data:
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
    names = wanted_columns(source)
    for start in range(0, batch.num_rows, ROWS):
        part = batch.slice(start, ROWS)
        wrong: dict[int, str] = {}
        columns = [_texts(part.column(name), name, limit, wrong) if name == source.text_field
                   else _values(part.column(name), name, wrong, is_id=name == source.id_field) for name in names]
        for index, values in enumerate(zip(*columns, strict=True)):
            place = _place(first + start + index + 1, prefix)
            yield Unreadable(place, wrong[index]) if index in wrong else (place, dict(zip(names, values, strict=True)))


def _texts(column: Any, name: str, limit: Limit, wrong: dict[int, str]) -> list[str | None]:
    """The values of the text column; the rows of those beyond the limit are added to `wrong`, with the reason."""
    import pyarrow as pa
    import pyarrow.compute as pc
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if (data := _as_bytes(column)) is not None:
        column = data
    elif not (pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)):
        raise UnusableColumnsError(f"the column '{name}' holds {column.type}, not text")
    column.validate(full=True)  # offsets beyond the data would be a crash, not an error
    if column.nbytes > limit.bytes:
        exceeds = pc.greater(pc.binary_length(column), limit.bytes)
        wrong.update((index, limit.reason) for index, true in enumerate(exceeds.to_pylist()) if true)
        column = pc.if_else(exceeds, None, column)
    return _decoded(column)


def _values(column: Any, name: str, wrong: dict[int, str], *, is_id: bool) -> list[Any]:
    """The values of another column; the rows that one of them costs are added to `wrong`, with the reason."""
    if (data := _as_bytes(column)) is not None:
        data.validate(full=True)
        return _decoded(data)
    import pyarrow as pa
    data = column if pa.types.is_dictionary(column.type) else column.view(_of_bytes(column.type))
    data.validate(full=True)  # broken UTF-8 costs its own row, offsets beyond the data all of them
    try:
        return column.to_pylist()
    except UNFIT:  # one value, which is not to cost the others
        return _one_by_one(column, name, wrong, is_id=is_id)


def _one_by_one(column: Any, name: str, wrong: dict[int, str], *, is_id: bool) -> list[Any]:
    """Each value for itself. A time beyond Python's calendar is its number as text in meta, and no id."""
    values = []
    for index, scalar in enumerate(column):
        try:
            values.append(scalar.as_py())
        except UNFIT as error:
            values.append(_number(scalar))
            if is_id or isinstance(error, UnicodeDecodeError):
                wrong.setdefault(index, f"the field '{name}' cannot be read: {error}")
    return values


def _number(scalar: Any) -> str | None:
    """The whole number that stands for a date or time, as text; None for what is more than that."""
    while hasattr(scalar, "as_py"):  # in a dictionary or an extension type lies another
        scalar = getattr(scalar, "value", None)
    return str(scalar) if isinstance(scalar, int) else None


def _of_bytes(kind: Any) -> Any:
    """A type with bytes in place of text."""
    import pyarrow as pa
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_of_bytes(field.type)) for field in kind.fields])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_of_bytes(kind.value_type)))
    return {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}.get(kind, kind)


def _as_bytes(column: Any) -> Any | None:
    """A column of strings as what they are made of, so that one broken value does not cost the others; None for a
    column of anything else."""
    import pyarrow as pa
    kinds = pa.types
    if kinds.is_dictionary(column.type) and _is_text(column.type.value_type):
        column = column.dictionary_decode()
    if kinds.is_string(column.type):
        return column.view(pa.binary())
    if kinds.is_string_view(column.type):
        column = column.cast(pa.large_string())
    return column.view(pa.large_binary()) if kinds.is_large_string(column.type) else None


def _is_text(kind: Any) -> bool:
    import pyarrow as pa
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _decoded(column: Any) -> list[str | None]:
    """The values of a column of bytes as text; whoever encodes a broken one again finds it."""
    return [None if value is None else value.decode("utf-8", "surrogateescape") for value in column.to_pylist()]


def wanted_columns(source: FilesSource) -> list[str]:
    """The columns that a source names, each once."""
    names = [source.text_field, *([source.id_field] if source.id_field else []), *source.meta_fields]
    return list(dict.fromkeys(names))
