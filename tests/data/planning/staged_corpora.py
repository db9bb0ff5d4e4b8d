"""Corpora as reading leaves them, and a stage's work whose units are done in one process, in any order."""

import json
import random
import tarfile
from types import SimpleNamespace

from networkx import Graph, connected_components
from pyarrow import parquet

from drover.pipeline.config.data import ShardConfig
from drover.pipeline.data.planning import runs
from drover.pipeline.data.planning.near_duplicates import signature_settings
from drover.pipeline.data.planning.passes import decide, write_shard
from drover.pipeline.data.reading import stage_unit
from drover.pipeline.data.text_shards import SPLITS
from tests.data.source_files import payload_of, write_jsonl


class Work:
    """`run_pass` as a stage has it, but in this process in an order of `seed`. Payloads and records go through JSON."""

    def __init__(self, folder, seed=0):
        self.folder, self.rng = folder, random.Random(seed)

    def run_pass(self, phase, units, function, task_word="units"):
        records = {unit.name: json.loads(json.dumps(function(self.folder, json.loads(json.dumps(unit.payload)))))
                   for unit in self.rng.sample(units, len(units))}
        return [records[unit.name] for unit in units]


def in_order(corpus):
    """(unit, id, text) of every document of a corpus, given as texts by unit, by source."""
    return [(f"{source}-{unit:05d}", f"{source}-{unit:05d}:{number}", text) for source, units in corpus.items()
            for unit, texts in enumerate(units) for number, text in enumerate(texts, 1)]


def stage(folder, corpus, near=None):
    """Stage a corpus, each unit from a file of its name; near: settings of signatures.

    Returns:
        names of the units, the number of each one's source, their records
    """
    units = {f"{source}-{unit:05d}": number for number, (source, units) in enumerate(corpus.items())
             for unit in range(len(units))}
    records = []
    for name in units:
        write_jsonl(folder / name, [{"text": text, "of": own} for unit, own, text in in_order(corpus) if unit == name])
        payload = payload_of(folder / name, format="jsonl", meta_fields=["of"])
        payload["source"]["name"] = name.partition("-")[0]
        records.append(stage_unit(folder, {**payload, "name": name, "near_duplicates": near}))
    return [*units], [*units.values()], records


def settings(corpus, **values):
    """The stage's settings for a corpus."""
    return ShardConfig(sources=[{"kind": "files", "name": name, "paths": ["x"]} for name in corpus], **values)


def cut_into(monkeypatch, documents, units, rows):
    """Have groups of so many documents and units, and partitions of so many rows."""
    for name, value in (("GROUP_DOCUMENTS", documents), ("GROUP_UNITS", units), ("PARTITION_ROWS", rows)):
        monkeypatch.setattr(runs, name, value)


def passes(folder, corpus, config, seed=0):
    """Stage a corpus, decide, write: what was decided, and the bytes of each shard by split and name."""
    near = config.near_duplicates and signature_settings(config.near_duplicates)
    decided = decide(Work(folder, seed), config, *stage(folder, corpus, near))
    outputs = [write_shard(folder, json.loads(json.dumps(payload)))["outputs"][:1] for payload in decided.payloads]
    written = {f"{split}/{path.stem}": path.read_bytes() for split in SPLITS
               for path in (folder / split).glob("*.tar")}
    assert len(written) == sum(map(len, outputs))
    kept = [row for record in decided.kept for row in parquet.read_table(folder / record["path"]).to_pylist()]
    return SimpleNamespace(decided=decided, shards=written, kept=kept)


def texts_of(folder, *splits):
    """id -> text of the documents in the shards of the splits."""
    result = {}
    for path in (path for split in splits or SPLITS for path in sorted((folder / split).glob("*.tar"))):
        with tarfile.open(path) as tar:
            documents = [json.load(tar.extractfile(member)) for member in tar]
        result |= {document["id"]: document["text"] for document in documents}
    return result


def firsts(pairs):
    """The first of the component of each node that is in a pair."""
    return {node: min(own) for own in connected_components(Graph([*pairs])) for node in own}
