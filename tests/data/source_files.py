"""Files of every format, and what is read of them, for the tests of sources."""

import gzip
import json
from dataclasses import replace
from itertools import pairwise

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from pyarrow.csv import write_csv

from drover.pipeline.config.data import FilesSource, ShardConfig
from drover.pipeline.config.tree import Config
from drover.pipeline.contract.inputs import listed_files
from drover.pipeline.data.documents import Rejection
from drover.pipeline.data.reading import unit_documents
from drover.pipeline.data.sources import input_files, reading_units
from drover.pipeline.data.streams import Piece

RECORDS = [{"text": "one\ntwo", "name": "a", "stars": 1},
           {"text": 'comma, "quote", ü €  \u2028', "name": "b", "stars": 2},
           {"text": "x" * 3000 + "\r\nend", "name": "c", "stars": None}]

COMPRESS = {"": lambda data: data, ".gz": lambda data: gzip.compress(data, mtime=0),
            ".zst": zstandard.ZstdCompressor(write_checksum=True).compress}


def config_of(*sources, **settings):
    return Config(shard=ShardConfig(sources=list(sources), **settings))


def files_source(*paths, **fields):
    return FilesSource(kind="files", name="s", paths=[str(path) for path in paths], **fields)


def separated(items):
    """(documents, rejections) of what reading gives."""
    items = list(items)
    return ([item[0] for item in items if not isinstance(item, Rejection)],
            [item for item in items if isinstance(item, Rejection)])


def read(*sources, **settings):
    """(documents, rejections) of the sources, or of files of one, through files and units as the stage reads them."""
    config = config_of(*(source if hasattr(source, "kind") else files_source(source) for source in sources), **settings)
    return separated(item for payload in reading_units(config.shard, listed_files(input_files(config)))
                for item in unit_documents(payload))


def payload_of(path, *borders, megabytes=128.0, **fields):
    """The payload of a unit that reads a file, or the pieces of it between these borders."""
    file = replace(Piece.of(path), name=f"s/{path.name}")
    pieces = [vars(replace(file, start=start, stop=stop)) for start, stop in pairwise(borders or (0, file.stop))]
    return {"name": "s-00000", "source": files_source(path, **fields).model_dump(mode="json"), "pieces": pieces,
            "max_document_mb": megabytes}


def texts(documents):
    return [document.text for document in documents]


def lost(rejections):
    return [(own.record, own.lost) for own in rejections]


def lines(records):
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()


def write_jsonl(path, records):
    """With the folders that lead to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lines(records))


def batch(*columns):
    """A record batch of (name, values), of which several may have one name."""
    names, values = zip(*columns, strict=True)
    return pa.RecordBatch.from_arrays([own if isinstance(own, pa.Array) else pa.array(own) for own in values],
                                      names=list(names))


def write_batches(path, *batches, stream=False):
    """A Parquet file of row groups, or an Arrow file or stream of record batches."""
    schema = batches[0].schema
    with open(path, "wb") as file, (
            pq.ParquetWriter(file, schema) if path.suffix == ".parquet" else
            (pa.ipc.new_stream if stream else pa.ipc.new_file)(file, schema)) as writer:
        for own in batches:
            writer.write_batch(own)


def file_bytes(kind, folder):
    """RECORDS in the format `kind`, as bytes."""
    if kind == "jsonl":
        return lines(RECORDS)
    if kind == "json":
        return json.dumps(RECORDS, indent=2).encode()
    path, rows = folder / f"made.{kind.split()[0]}", pa.RecordBatch.from_pylist(RECORDS)
    if kind == "csv":
        write_csv(rows, path)
    else:
        write_batches(path, rows[:2], rows[2:], stream=kind == "arrow stream")
    data = path.read_bytes()
    path.unlink()
    return data
