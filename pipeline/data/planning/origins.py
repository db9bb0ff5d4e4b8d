"""Where the documents of a shard were read, of sources whose documents have ids of their own.

Other documents are called after the file and the record that they were read from, so their shards say it. What is
written here is no part of what the stage's outputs are: the text is the same without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from drover.pipeline.errors import UserError
from drover.pipeline.files import atomic_file, output_record

PLACES = ".places"
"""Ending of a unit's staged file with the place of each of its documents."""
ORIGINS = "origins"
"""Folder of the outputs that have, for each document of a text shard, its place; and their split."""
COLUMN = "place"


def write_places(path: Path, places: Sequence[str]) -> Path:
    """Write a place a row, such as `pages.jsonl:17`, as Parquet; returns the path."""
    import pyarrow as pa
    from pyarrow import parquet
    with atomic_file(path) as file:
        parquet.write_table(pa.table({COLUMN: pa.array(places, pa.string())}), file, compression="zstd")
    return path


def read_places(path: Path, rows: np.ndarray) -> list[str]:
    """The places in these rows; "" each where there is no such file: those documents' ids say it."""
    from pyarrow import array
    if not path.is_file():
        return [""] * len(rows)
    found: list[str] = _column(path).take(array(rows)).to_pylist()
    return found


def _column(path: Path) -> Any:
    from pyarrow import parquet
    return parquet.read_table(path, columns=[COLUMN]).column(COLUMN)


def origins_path(shard: str) -> str:
    """Inside the stage's folder, the places of the documents of the text shard at `shard`."""
    return f"{ORIGINS}/{Path(shard).with_suffix('.parquet').as_posix()}"


def read_origins(folder: Path, shard: str, number: int | None = None) -> list[str]:
    """The places of a shard's documents, of all or of one, in the stage's folder, whose manifest names such a file.

    Raises:
        UserError: it is gone.
    """
    if not (path := folder / origins_path(shard)).is_file():
        raise UserError(f"{path} is missing. Run the stage shard again: it makes only what is missing.")
    places = _column(path)
    return places.to_pylist() if number is None else [places[number].as_py()]


def write_origins(folder: Path, shard: str, source: str, places: Sequence[str]) -> list[dict[str, Any]]:
    """Write the places of a shard's documents, in their order, where there are any. Returns the output's record."""
    if not any(places):
        return []
    path = write_places(folder / origins_path(shard), places)
    return [output_record(folder, path, split=ORIGINS, source=source, docs=len(places), text_bytes=0, aside=True)]
