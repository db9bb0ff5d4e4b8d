"""The shard stage over files whose names are not UTF-8, and over files that are not what their names say."""

import os

from pipeline.config.loading import load_config
from pipeline.contract.manifest import read_manifest
from pipeline.contract.run import Run
from tests.stages.test_shard import documents, files_source, folder_of, run, write_config


def test_names_of_any_bytes_go_through_the_stage(tmp_path, capsys):
    (tmp_path / "corpus").mkdir()
    for number in range(20):
        with open(os.fsencode(tmp_path) + b"/corpus/caf\xe9-%d.txt" % number, "wb") as file:
            file.write(b"text number %d" % number)
    config = write_config(tmp_path, [files_source("t", tmp_path / "corpus/**")], heldout_share=0.3)
    assert run(config) == 0
    names = {f"caf\\xe9-{number}.txt" for number in range(20)}
    assert {record["name"] for record in read_manifest(folder_of(config)).files} == {f"t/{name}" for name in names}
    assert {document.id for split in ("train", "heldout") for document in documents(config, split)} == names
    capsys.readouterr()
    assert run(config) == 0
    assert "up to date" in capsys.readouterr().out
    (tmp_path / "corpus" / os.fsdecode(b"caf\xe9-7.txt")).unlink()
    assert "t/caf\\xe9-7.txt is gone" in Run(load_config(config)).why("shard")
