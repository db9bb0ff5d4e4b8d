"""A folder that `datasets.load_from_disk` maps: an Arrow stream a token shard, a row a document."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from drover.pipeline.core.files import flush, read_json, sha256_json, write_json
from drover.tools.export_tokens.part import Part, Region, region_of

ROWS_AT_ONCE = 1000
"""Rows of a record batch at most: what is read of the file to have one of them."""


def file_name(number: int, count: int) -> str:
    """The file of one part, named as `datasets` names them."""
    return f"data-{number:05d}-of-{count:05d}.arrow"


def features(dtype: str) -> Any:
    """The columns, as `datasets` describes them."""
    import datasets
    return datasets.Features({"input_ids": datasets.List(datasets.Value(dtype)), "key": datasets.Value("string"),
                              "source": datasets.Value("string"), "bytes": datasets.Value("int64")})


def lay_out(folder: Path, sources: dict[str, dict[str, int]], dtype: str) -> list[Region]:
    """Write nothing before the parts."""
    return []


def shared(dtype: str) -> Any:
    """The Arrow schema of all parts."""
    return features(dtype).arrow_schema


def write_part(job: tuple[Path, Part, Any]) -> list[Region]:
    """Write one shard as a file, durably. job: the export's folder, the part, the schema."""
    import pyarrow as pa
    folder, part, schema = job
    part.refuse_changed()
    path = folder / file_name(part.number, part.count)
    lengths, shard = part.lengths(), part.shard
    with open(path, "wb") as file:
        with pa.ipc.new_stream(file, schema) as writer:
            for first, stop, tokens in part.blocks():
                at = 0
                for low in range(first, stop, ROWS_AT_ONCE):
                    high = min(low + ROWS_AT_ONCE, stop)
                    offsets = np.concatenate([[0], np.cumsum(lengths[low:high])])
                    ids = tokens[at:at + int(offsets[-1])]
                    at += int(offsets[-1])
                    writer.write_batch(pa.record_batch([
                        pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(ids)),
                        pa.array([key.tobytes().hex() for key in shard.keys(low, high)], pa.string()),
                        pa.array([shard.source] * (high - low), pa.string()),
                        pa.array(shard.text_bytes(low, high))],
                        schema=schema))
        flush(file)
    return [region_of(path)]


def finish(folder: Path, count: int, dtype: str, made_of: dict[str, Any]) -> list[str]:
    """Write what `load_from_disk` begins with, and give the names of those files."""
    import datasets
    datasets.DatasetInfo(features=features(dtype)).write_to_directory(str(folder))
    write_json(folder / "dataset_info.json", read_json(folder / "dataset_info.json"))  # again, so that it is durable
    write_json(folder / "state.json", {
        "_data_files": [{"filename": file_name(number, count)} for number in range(count)],
        "_fingerprint": sha256_json(made_of)[:16], "_format_columns": None, "_format_kwargs": {},
        "_format_type": None, "_output_all_columns": False, "_split": None})
    return ["dataset_info.json", "state.json"]


def facts(sources: dict[str, dict[str, int]], dtype: str) -> dict[str, Any]:
    """What the manifest says of the form."""
    return {"layout": "datasets.load_from_disk; columns input_ids, key, source, bytes", "dtype": dtype}
