"""Where documents with ids of their own were read: kept beside the shards, which are the same with and without."""

from __future__ import annotations

import gzip
import json
import random

import numpy as np
import pytest
import yaml

from pipeline.config.loading import load_config
from pipeline.contract.entry import stage_main
from pipeline.contract.manifest import read_manifest
from pipeline.contract.run import Run
from pipeline.data import reading, sources
from pipeline.data.planning import shards
from pipeline.data.planning.origins import read_places
from pipeline.data.text_shards import read_documents
from pipeline.encode import encode
from pipeline.shard import shard
from pipeline.tokenizer import make_tokenizer
from tools.where.origin import Corpus

WORDS = ["river", "bank", "stone", "grass", "cloud", "bird", "light", "rain"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A config over files in lines, one large enough to be read in parts, one packed; and a table without ids."""
    folder, draw = tmp_path_factory.mktemp("origins"), random.Random(3)
    (folder / "in").mkdir()

    def lines(name, count, words):
        return [json.dumps({"id": f"{name}-{number}", "text": f"{name} {number} " + " ".join(
            draw.choices(WORDS, k=draw.randrange(5, words)))}) + "\n" for number in range(count)]
    (folder / "in/large.jsonl").write_text("".join(lines("large", 400, 300)))
    assert (folder / "in/large.jsonl").stat().st_size > 2 * 100_000
    (folder / "in/odd:7.jsonl").write_text("".join(lines("odd", 20, 50)))
    (folder / "in/packed.jsonl.gz").write_bytes(gzip.compress("".join(lines("packed", 20, 50)).encode()))
    (folder / "in/plain.txt").write_text("\n\n".join(f"plain {number}" for number in range(20)))
    config = {"name": "a", "runs_dir": str(folder / "runs"), "launch": {"processes": 1}, "tokenizer": {"kind": "byte"},
              "shard": {"shard_mb": 0.1, "heldout_share": 0.2, "sources": [
                  {"kind": "files", "name": "web", "paths": [str(folder / "in/*.jsonl*")], "id_field": "id"},
                  {"kind": "files", "name": "plain", "paths": [str(folder / "in/*.txt")], "separator": "\n\n"}]}}
    (folder / "c.yaml").write_text(yaml.safe_dump(config))
    return folder / "c.yaml"


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(sources, "LEAST_PART", 100_000)


def sharded(corpus, *settings):
    assert stage_main("shard", shard, ["--config", str(corpus), *settings]) == 0
    config = load_config(corpus, list(settings))
    return Corpus(config.folder / "shard", read_manifest(config.folder / "shard"), config)


def documents(found):
    for path, record in found.shards.items():
        if record["split"] in ("train", "heldout"):
            for number, document in enumerate(read_documents(found.folder / path)):
                yield path, number, document


@pytest.mark.parametrize("rule", ["hash", "tail"])
def test_file_and_record_of_every_document(corpus, rule):
    found = sharded(corpus, f"name={rule}", f"shard.heldout_rule={rule}")
    data = {name: (corpus.parent / "in" / name).read_bytes() for name in ("large.jsonl", "odd:7.jsonl")}
    data["packed.jsonl.gz"] = gzip.decompress((corpus.parent / "in/packed.jsonl.gz").read_bytes())
    split = {name: content.splitlines() for name, content in data.items()}
    assert any("large.jsonl@" in place for place in read_places(next((found.folder / "origins/train").iterdir()),
                                                               np.arange(5))), "it was read in parts"
    seen, cut = set(), 0
    for path, number, document in documents(found):
        origin = found.origin(path, number, document.source, document.id)
        assert origin.path == str(corpus.parent / "in" / origin.file)
        if document.source == "plain":
            assert document.text in f"plain {origin.record - 1}" and origin.file == "plain.txt"
            continue
        seen.add(origin.file)
        line = split[origin.file][origin.record - 1] if isinstance(origin.record, int) else \
            data[origin.file][int(origin.record):].partition(b"\n")[0]
        record = json.loads(line)
        first, _, end = origin.characters.partition("..")
        cut += bool(origin.characters)
        assert document.id.startswith(record["id"])
        assert document.text == record["text"][int(first or 0):int(end) if end else None]
    assert seen == set(data) and cut == (2 if rule == "tail" else 0)


def test_shards_and_what_they_are_do_not_depend_on_it(corpus, monkeypatch):
    new = sharded(corpus, "name=new", "shard.shard_mb=0.15")
    assert any(record["split"] == "origins" for record in new.manifest.outputs)
    with monkeypatch.context() as older:  # before places were written
        older.setattr(reading, "write_places", lambda path, places: [path.write_bytes(b""), path][1])
        older.setattr(shards, "read_places", lambda path, rows: [""] * len(rows))
        old = sharded(corpus, "name=old", "shard.shard_mb=0.15")
    assert not any(record["split"] == "origins" for record in old.manifest.outputs)
    assert old.manifest.digest == new.manifest.digest and old.manifest.counts == new.manifest.counts
    path, number, document = next(entry for entry in documents(old) if entry[2].source == "web")
    assert old.origin(path, number, "web", document.id) is None

    command = ["--config", str(corpus), "name=old", "shard.shard_mb=0.15"]
    for stage, body in (("tokenizer", make_tokenizer), ("encode", encode)):
        assert stage_main(stage, body, command) == 0
    (old.folder / path).unlink()
    mended = sharded(corpus, "name=old", "shard.shard_mb=0.15")
    assert (old.folder / path).is_file() and mended.manifest.digest == old.manifest.digest
    assert mended.origin(path, number, "web", document.id).file in ("large.jsonl", "odd:7.jsonl", "packed.jsonl.gz")
    assert Run(load_config(corpus, command[2:])).state("encode").kind == "done"
