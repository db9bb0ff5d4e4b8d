"""The shard stage over files whose names are not UTF-8, and over files that are not what their names say."""

from __future__ import annotations

import gzip
import json
import os

import pytest
import yaml

from pipeline.config.loading import load_config
from pipeline.contract.entry import stage_main
from pipeline.contract.manifest import read_manifest
from pipeline.contract.run import Run
from pipeline.data.text_shards import read_documents
from pipeline.shard import shard
from tests.stand_ins import never


@pytest.fixture
def config(tmp_path):
    (tmp_path / "corpus").mkdir()
    for number in range(20):
        with open(os.fsencode(tmp_path) + b"/corpus/caf\xe9-%d.txt" % number, "wb") as file:
            file.write(b"text number %d" % number)
    path = tmp_path / "c.yaml"
    source = {"kind": "files", "name": "t", "paths": [str(tmp_path / "corpus/**")]}
    path.write_text(yaml.safe_dump({"name": "a", "runs_dir": str(tmp_path / "runs"), "launch": {"processes": 1},
                                    "shard": {"heldout_share": 0.3, "sources": [source]}}))
    return path


def test_names_of_any_bytes_go_through_the_stage(config, capsys):
    assert stage_main("shard", shard, ["--config", str(config)]) == 0
    folder = config.parent / "runs/a/shard"
    manifest = read_manifest(folder)
    assert {record["name"] for record in manifest.files} == {f"t/caf\\xe9-{number}.txt" for number in range(20)}
    ids = {document.id for record in manifest.outputs if record["split"] != "rejected"
           for document in read_documents(folder / record["path"])}
    assert ids == {f"caf\\xe9-{number}.txt" for number in range(20)}
    capsys.readouterr()
    assert stage_main("shard", never, ["--config", str(config)]) == 0
    assert "up to date" in capsys.readouterr().out
    (config.parent / "corpus" / os.fsdecode(b"caf\xe9-7.txt")).unlink()
    assert "t/caf\\xe9-7.txt is gone" in Run(load_config(config)).why("shard")


def test_what_files_are_is_said_with_their_names(config, capsys):
    corpus = config.parent / "corpus"
    (corpus / "x.txt").write_bytes(gzip.compress(b"hello"))
    (corpus / "y.txt").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    with open(os.fsencode(corpus) + b"/z\xff.txt", "wb") as file:
        file.write("hello".encode("utf-16"))
    assert stage_main("shard", shard, ["--config", str(config)]) == 2
    said = capsys.readouterr().err
    assert "3 of 23 documents cannot be read" in said
    for text in ("t/x.txt: it is a gzip file", "t/y.txt: it is a Git LFS pointer", "t/z\\xff.txt: it is UTF-16 text"):
        assert text in said, said
    rejected = [json.loads(line) for line in (config.parent / "runs/a/shard/rejected.jsonl").read_text().splitlines()]
    assert [entry["file"] for entry in rejected] == ["x.txt", "y.txt", "z\\xff.txt"]
