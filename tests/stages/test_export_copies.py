"""The export in an object store: whole or refused, copied later without being made again, fetched by hash."""

import json
from types import SimpleNamespace

import pytest

from pipeline.config.loading import load_config
from pipeline.contract.run import Run
from pipeline.copies.__main__ import main
from pipeline.copies.checkpoints import COPY
from pipeline.copies.export import copy_export
from pipeline.errors import UserError
from pipeline.files import read_json, sha256_file
from pipeline.stores.store import Store, preflight
from tests.stages.small_run import fake_training
from tests.stages.test_convert import run_convert
from tests.stages.training import reusing


@pytest.fixture(scope="module")
def converted(tmp_path_factory, encoded):
    """Config of a miniature run with random weights whose stage convert is done."""
    config = reusing(encoded, tmp_path_factory.mktemp("converted"))
    fake_training(Run(load_config(config)))
    assert run_convert(config, "convert.max_shard_mb=0.05") == 0
    return config


def copying(config, url):
    return run_convert(config, "convert.max_shard_mb=0.05", f"convert.copy_to={url}")


def state(config, url=None):
    given = [f"convert.copy_to={url}"] if url else []
    return Run(load_config(config, ["convert.max_shard_mb=0.05", *given])).state("convert")


@pytest.mark.parametrize("of", ["seaweed", pytest.param("google", marks=pytest.mark.slow),
                                pytest.param("azurite", marks=pytest.mark.slow)])
def test_an_export_that_is_done_is_copied_later_without_being_made_again(converted, of, request, capsys, tmp_path):
    url, folder = request.getfixturevalue(of).url_of("models/mini"), converted.parent / "runs/mini/convert"
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in (folder / "hf").iterdir()}
    assert state(converted).kind == "done" and state(converted, url).kind == "partial"
    assert f"to be copied to {url}" in str(state(converted, url))
    assert copying(converted, url) == 0
    assert f"copied to {url}" in capsys.readouterr().out
    assert state(converted, url).kind == "done" and read_json(folder / "STATE.json")["status"] == "done"
    assert {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in (folder / "hf").iterdir()} == before
    assert {entry.path for entry in Store(url).list()} == {*before, COPY}

    assert copying(converted, url) == 0 and "up to date" in capsys.readouterr().out
    (folder / "copied.json").unlink()
    assert copying(converted, url) == 0 and "is this export already" in capsys.readouterr().out

    fetched = tmp_path / "fetched"
    (tmp_path / "fetched.tmp").mkdir()  # the user's
    assert main([url, str(fetched)]) == 0 and (tmp_path / "fetched.tmp").is_dir()
    assert {path.name: path.read_bytes() for path in fetched.iterdir()} == {
        name: content for name, (_, content) in before.items()}
    assert main([url, str(fetched)]) == 2 and "is there already" in capsys.readouterr().err


def test_a_copy_that_was_cut_short_is_no_copy_and_is_finished(converted, moto_server, capsys, tmp_path):
    url, fetched = moto_server.url_of("models/mini"), str(tmp_path / "fetched")
    moto_server.fail("refuse", 1000, method="PUT", path=r"config\.json")
    assert copying(converted, url) == 2 and "AccessDenied" not in capsys.readouterr().out
    assert state(converted, url).kind == "partial"
    assert read_json(converted.parent / "runs/mini/convert/STATE.json")["status"] == "failed"
    assert main([url, fetched]) == 2 and "is not finished" in capsys.readouterr().err
    moto_server.server.faults.clear()
    assert copying(converted, url) == 0
    Store(url).put("model.safetensors.index.json", b"{}")
    assert main([url, fetched]) == 2
    assert "model.safetensors.index.json has 2 bytes instead of" in capsys.readouterr().err
    assert not (tmp_path / "fetched").exists()


def test_a_new_export_of_the_same_run_takes_the_place_of_the_old_one(converted, tmp_path, monkeypatch):
    """What is to go is named until it is gone; what is somebody else's stays."""
    store = Store(f"file://{tmp_path}/store")
    assert copying(converted, store.url) == 0
    content = json.loads(store.read(COPY))
    old = [*content["files"], {"path": "model-00099.safetensors", "bytes": 1, "sha256": "0" * 64}]
    for name in ("model-00099.safetensors", "README.md", "other/model.safetensors"):
        store.put(name, b"x")
    store.put(COPY, json.dumps({**content, "files": old}).encode())
    (converted.parent / "runs/mini/convert/copied.json").unlink()

    def away(store, paths):
        raise UserError("the store is away.")
    with monkeypatch.context() as patch:
        patch.setattr(Store, "delete", away)
        assert copying(converted, store.url) == 2
    between = json.loads(store.read(COPY))
    assert not between["whole"] and between["files"] == old
    assert copying(converted, store.url) == 0 and json.loads(store.read(COPY)) == content
    assert store.head("model-00099.safetensors") is None
    assert store.read("README.md") == store.read("other/model.safetensors") == b"x"


def test_what_a_killed_preflight_left_does_not_take_the_place_from_the_run(tmp_path, monkeypatch):
    store = Store(f"file://{tmp_path}/store")
    with monkeypatch.context() as patch:
        patch.setattr(Store, "delete", lambda store, paths: None)
        with pytest.raises(UserError, match="is there still"):
            preflight(store)
    (tmp_path / "convert/hf").mkdir(parents=True)
    (tmp_path / "convert/hf/config.json").write_bytes(b"{}")
    record = {"path": "hf/config.json", "bytes": 2, "sha256": sha256_file(tmp_path / "convert/hf/config.json")}
    manifest = SimpleNamespace(outputs=[record], digest="a")
    copy_export(store.url, "mini", tmp_path / "convert", manifest, lambda text: None)
    assert store.read("config.json") == b"{}" and json.loads(store.read(COPY))["whole"]


def test_what_is_not_this_run_s_is_not_written_over(converted, tmp_path, capsys):
    url = f"file://{tmp_path}/store"
    store = Store(url)
    store.put("precious", b"x")
    assert copying(converted, url) == 2 and "holds precious" in capsys.readouterr().err
    store.put(COPY, b'{"format": 1, "run": "other", "whole": true, "files": []}')
    assert copying(converted, url) == 2 and "of the run other, not of mini" in capsys.readouterr().err
    store.put(COPY, b"torn")
    assert copying(converted, url) == 2 and "not one that Drover put there" in capsys.readouterr().err
    assert main([f"file://{tmp_path}/nothing", str(tmp_path / "fetched")]) == 2
    assert "holds no copy" in capsys.readouterr().err and store.read("precious") == b"x"
