"""Training from token shards in an object store equals training from files, whatever the store does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.contract.manifest import read_manifest
from pipeline.records.metrics import read_metrics
from pipeline.stores.store import Store
from tests.conftest import run_stage, write_config
from tests.object_store import Bucket
from tools.copy_tokens import main as copy_tokens

TIMES = {"tokens_per_s", "step_s", "data_wait_s", "memory_mb", "time", "train_s", "goodput", "look_s", "mfu",
         "shards_checked"}


def copied(config: Path, bucket: Bucket, prefix: str = "tokens") -> str:
    """The URL of the run's shards in the bucket."""
    reused = yaml.safe_load(config.read_text())["reuse"]
    assert copy_tokens(["--run", reused, "--to", bucket.url_of(prefix), "--compare"]) == 0
    return bucket.url_of(prefix)


def metrics(run: Path) -> list[dict[str, Any]]:
    """What a run measured, but for times, how far the comparing was, and what only reading from a store has."""
    lines = read_metrics(run / "train/metrics.jsonl")
    return [{name: value for name, value in line.items() if name not in TIMES and not name.startswith("store_")}
            for line in lines]


def weights(run: Path) -> list[tuple[str, str]]:
    """Files of the last checkpoint and their hashes."""
    manifest = read_manifest(run / "train")
    assert manifest is not None
    hashes = {record["path"]: record["sha256"] for record in manifest.outputs}
    return sorted((path, found) for path, found in hashes.items()
                  if path.startswith(manifest.counts["checkpoint"]) and path.endswith(".safetensors"))


def ending(run: Path) -> dict[str, Any]:
    """What the last start's reading took."""
    events = [json.loads(line) for line in (run / "train/events.jsonl").read_text().splitlines()]
    return next(event["store"] for event in reversed(events) if "store" in event)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("read", ["shards", "parts"])
def test_from_a_real_store_is_as_from_files(fresh: Path, seaweed: Bucket, tmp_path: Path, ranks: int, read: str):
    url = copied(fresh, seaweed)
    run_stage("train", fresh, "name=files", ranks=ranks)
    settings = [f"train.tokens_from={url}", f"train.cache.folder={tmp_path / 'cache'}", f"train.cache.read={read}"]
    run_stage("train", fresh, "name=store", *settings, ranks=ranks, expect=1 if ranks > 1 else -9,
              DROVER_FAULTS="kill:rank=0,step=7")
    run_stage("train", fresh, "name=store", *settings, ranks=ranks)
    files, store = tmp_path / "runs/files", tmp_path / "runs/store"
    assert len(weights(files)) >= 1 and weights(store) == weights(files)
    assert metrics(store) == metrics(files)
    took = ending(store)
    if read == "shards":
        assert took["ranges"] == 0 and took["hits"] > 0 and took["fetched"] == 0  # the first start left them there
    else:
        assert took["ranges"] > 0 and took["fetched"] == 0 and not (tmp_path / "cache").exists()


def test_encode_copies_its_shards_and_they_are_enough_to_train_on(corpus: Path, moto_server: Bucket, tmp_path: Path):
    config, url = write_config(tmp_path, corpus), moto_server.url_of("from encode")
    for stage in ("shard", "tokenizer"):
        run_stage(stage, config)
    fault = moto_server.fail("refuse", times=1, method="PUT", path=r"heldout/code-00000\.arrow")
    copying = f"encode.copy_to={url}"
    refused = run_stage("encode", config, copying, expect=2)
    assert fault.met and "heldout/code-00000.arrow: write was refused" in refused.stderr
    said = run_stage("encode", config, copying).stdout
    assert f"were there already in {url}" in said
    assert "up to date" in run_stage("encode", config).stdout  # where they are copied to is not what they are
    run_stage("train", config, "name=mini")
    (tmp_path / "runs/mini/train").rename(tmp_path / "files")
    for shard in (tmp_path / "runs/mini/encode").rglob("*.arrow"):
        shard.unlink()
    for stage in ("train", "convert", "evaluate"):
        run_stage(stage, config, f"train.tokens_from={url}", f"train.cache.folder={tmp_path / 'cache'}")
    (tmp_path / "kept").mkdir()
    (tmp_path / "files").rename(tmp_path / "kept/train")
    assert weights(tmp_path / "runs/mini") == weights(tmp_path / "kept")
    assert metrics(tmp_path / "runs/mini") == metrics(tmp_path / "kept")


def test_faults_in_the_middle_of_a_run_change_nothing(fresh: Path, moto_server: Bucket, tmp_path: Path):
    url = copied(fresh, moto_server)
    run_stage("train", fresh, "name=files")
    settings = [f"train.tokens_from={url}", f"train.cache.folder={tmp_path / 'cache'}", "train.cache.gb=0.00006"]
    faults = [moto_server.fail(kind, times=2, method="GET", path=r"\.arrow", after=after)
              for kind, after in (("error", 2), ("slow down", 4), ("cut", 6), ("truncate", 8))]
    run_stage("train", fresh, "name=store", *settings, "train.cache.read=shards")
    assert weights(tmp_path / "runs/store") == weights(tmp_path / "runs/files")
    assert metrics(tmp_path / "runs/store") == metrics(tmp_path / "runs/files")
    took = ending(tmp_path / "runs/store")
    assert all(fault.met == 2 for fault in faults) and took["removed"] > 0 and took["retries"] > 0


def test_what_cannot_be_read_ends_training_by_name(fresh: Path, seaweed: Bucket, tmp_path: Path):
    url = copied(fresh, seaweed)
    settings = [f"train.tokens_from={url}", f"train.cache.folder={tmp_path / 'cache'}"]
    wrong = run_stage("train", fresh, "name=a", *settings, expect=2, AWS_SECRET_ACCESS_KEY="wrong-secret")
    assert "refused" in wrong.stderr and url in wrong.stderr and "wrong-secret" not in wrong.stderr
    nowhere = run_stage("train", fresh, "name=b", f"train.tokens_from={url}-not", expect=2)
    assert f"{url}-not (train.tokens_from) holds no finished copy" in nowhere.stderr
    store = Store(url)
    path = next(entry.path for entry in store.list() if entry.path.startswith("train/"))
    store.put(path, bytes(len(store.read(path))))
    changed = run_stage("train", fresh, "name=c", *settings, ranks=2, expect=2)
    assert f"{url}/{path} is not what the stage encode committed" in changed.stderr
    bad = run_stage("train", fresh, "name=d", "train.tokens_from=/not/a/url", "encode.copy_to=ftp://x/y", expect=2)
    assert "train.tokens_from: /not/a/url" in bad.stderr and "encode.copy_to: ftp://x/y" in bad.stderr
