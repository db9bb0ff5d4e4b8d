"""The shard stage over files whose names are not UTF-8, and over files that are not what their names say."""

from __future__ import annotations

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
