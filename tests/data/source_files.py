"""Files of every format, and what is read of them, for the tests of sources."""

import csv
import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from pipeline.config.data import FilesSource, ShardConfig
from pipeline.config.tree import Config
from pipeline.data.documents import Rejection
from pipeline.data.reading import unit_documents
from pipeline.data.sources import input_files, reading_units

RECORDS = [{"text": "one\ntwo", "name": "a", "stars": 1},
           {"text": 'comma, "quote", ü €  \u2028', "name": "b", "stars": 2},
           {"text": "x" * 3000 + "\r\nend", "name": "c", "stars": None}]

COMPRESS = {"": lambda data: data, ".gz": lambda data: gzip.compress(data, mtime=0),
            ".zst": zstandard.ZstdCompressor().compress}


def config_of(*sources, **settings):
    return Config(shard=ShardConfig(sources=list(sources), **settings))


def read(*sources, **settings):
    """(documents, rejections) of the sources, through files and units as the stage reads them."""
    config = config_of(*sources, **settings)
    items = [item for _, payload in reading_units(config.shard, input_files(config))
             for item in unit_documents(payload)]
    return ([item[0] for item in items if not isinstance(item, Rejection)],
            [item for item in items if isinstance(item, Rejection)])


def files_source(*paths, **fields):
    return FilesSource(kind="files", name="s", paths=[str(path) for path in paths], **fields)


def texts(documents):
    return [document.text for document in documents]


def table(records=RECORDS):
    return pa.table({name: [record[name] for record in records] for name in records[0]})


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def file_bytes(kind, folder):
    """RECORDS in the format `kind`, as bytes."""
    path = folder / "made"
    if kind == "jsonl":
        return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS).encode()
    if kind == "json":
        return json.dumps(RECORDS, indent=2).encode()
    if kind == "csv":
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(RECORDS[0]))
            writer.writeheader()
            writer.writerows(RECORDS)
    elif kind == "parquet":
        pq.write_table(table(), path, row_group_size=2)
    else:
        with pa.OSFile(str(path), "wb") as sink, \
                (pa.ipc.new_file if kind == "arrow" else pa.ipc.new_stream)(sink, table().schema) as writer:
            writer.write_table(table(), max_chunksize=2)
    return path.read_bytes()
