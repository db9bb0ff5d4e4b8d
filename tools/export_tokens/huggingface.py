"""Write a folder for `datasets.load_from_disk`: an Arrow stream per token shard, a row per document."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from drover.pipeline.core.files import Record, flush, read_json, sha256_json, write_json
from drover.tools.export_tokens.part import Counts, Part, Region, region_of

ROWS_AT_ONCE = 1000
"""Most rows of a record batch. To get one row, a reader reads its whole batch."""


def file_name(number: int, count: int) -> str:
    """The name of a part's file, as `datasets` names it."""
    return f"data-{number:05d}-of-{count:05d}.arrow"


def lay_out(folder: Path, sources: Counts, dtype: str) -> list[Region]:
    """Write nothing before the parts."""
    return []


def write_part(job: tuple[Path, Part]) -> list[Region]:
    """Write one shard as a file, durably. job: the export's folder, the part."""
    import pyarrow as pa
    folder, part = job
    part.refuse_changed()
    schema = pa.schema({"input_ids": pa.list_(pa.from_numpy_dtype(part.shard.dtype)), "key": pa.string(),
                        "source": pa.string(), "bytes": pa.int64()})
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


def finish(folder: Path, count: int, dtype: str, made_of: Record) -> list[str]:
    """Write the files from which `load_from_disk` starts. Returns their names."""
    import datasets
    columns = datasets.Features({"input_ids": datasets.List(datasets.Value(dtype)), "key": datasets.Value("string"),
                                 "source": datasets.Value("string"), "bytes": datasets.Value("int64")})
    datasets.DatasetInfo(features=columns).write_to_directory(str(folder))
    write_json(folder / "dataset_info.json", read_json(folder / "dataset_info.json"))  # written again, durably
    write_json(folder / "state.json", {
        "_data_files": [{"filename": file_name(number, count)} for number in range(count)],
        "_fingerprint": sha256_json(made_of)[:16], "_format_columns": None, "_format_kwargs": {},
        "_format_type": None, "_output_all_columns": False, "_split": None})
    return ["dataset_info.json", "state.json"]


def facts(sources: Counts, dtype: str) -> Record:
    """The manifest's description of the format."""
    return {"layout": "datasets.load_from_disk; columns input_ids, key, source, bytes", "dtype": dtype}
