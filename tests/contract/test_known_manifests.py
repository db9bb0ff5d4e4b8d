"""A run parses a manifest once, as long as it is the same file."""

import pytest

from pipeline.config.loading import load_config
from pipeline.contract import run as module
from pipeline.contract.run import Run
from pipeline.errors import UserError


def test_a_manifest_is_parsed_again_only_when_it_is_another_file(encoded, tmp_path, monkeypatch):
    parsed, read = [], module.read_manifest
    monkeypatch.setattr(module, "read_manifest", lambda folder: parsed.append(folder.name) or read(folder))
    run = Run(load_config(encoded))
    first = run.finished("encode")
    assert run.state("encode").kind == "done" and run.finished("encode") is first
    assert parsed.count("encode") == 1 and run.manifest("train") is None

    folder = run.own_folder("encode")
    original = (folder / "manifest.json").read_bytes()
    try:
        first.drift.append({"stage": "encode", "differences": ["told"]})
        first.write(folder)
        assert run.finished("encode") is not first and run.finished("encode").drift == first.drift
        (folder / "manifest.json").write_text("{")
        with pytest.raises(UserError, match="is damaged"):
            run.manifest("encode")
        (folder / "manifest.json").unlink()
        assert run.manifest("encode") is None
    finally:
        (folder / "manifest.json").write_bytes(original)
    assert run.finished("encode").drift == []
    count = parsed.count("encode")
    run.forget_manifests()
    assert run.finished("encode").drift == [] and parsed.count("encode") == count + 1
