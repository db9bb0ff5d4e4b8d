"""A run that lives in an object store: sources, token shards and checkpoints are there, and the machine is lost on the
way. It equals the run that had a disk of its own, to the last bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipeline.contract.manifest import read_manifest
from pipeline.copies.checkpoints import CopiedCheckpoints
from pipeline.copies.claim import LOCK
from pipeline.files import read_lines
from pipeline.stores.store import Store
from tests.conftest import run_stage, write_config
from tests.object_store import SECRET, Bucket
from tests.stages.training import assert_equal_to_the_bit, kill, lines, proven, run_with_faults, start, train_folder
from tests.waiting import wait_for

SETTINGS = ["train.steps=16", "train.checkpoint.background=false"]
LAST = 8
"""The step of the last checkpoint before the kill, which is in step 11."""


def hashes(config: Path, stage: str) -> list[tuple[str, str]]:
    """What a stage committed."""
    manifest = read_manifest(config.parent / "runs/mini" / stage)
    assert manifest is not None and manifest.outputs
    return sorted((record["path"], record["sha256"]) for record in manifest.outputs)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["seaweed", pytest.param("google", marks=pytest.mark.soak),
                                  pytest.param("azurite", marks=pytest.mark.soak)])
def test_a_run_of_which_all_is_in_a_store_and_the_machine_is_lost_equals_a_local_one(corpus, kind: str, tmp_path: Path,
                                                                                     request):
    """Killed on one rank, and continued on two by a machine that has not one file of the training."""
    bucket: Bucket = request.getfixturevalue(kind)
    for place in ("local", "stored"):
        (tmp_path / place).mkdir()
    local = write_config(tmp_path / "local", corpus, train={"micro_batch": 8})
    for stage in ("shard", "tokenizer", "encode"):
        run_stage(stage, local)
    run_with_faults(local, "kill:rank=0,step=11", *SETTINGS, expect=-9)
    run_stage("train", local, *SETTINGS, ranks=2)

    for path in corpus.iterdir():
        Store(bucket.url_of("texts")).put(path.name, path)
    source = {"kind": "files", "name": "code", "paths": [f"{bucket.url_of('texts')}/*.txt"]}
    tokens, copies = bucket.url_of("tokens"), bucket.url_of("checkpoints")
    cache = tmp_path / "cache"
    stored = write_config(
        tmp_path / "stored", corpus, shard={"sources": [source]}, encode={"copy_to": tokens},
        train={"micro_batch": 8, "tokens_from": tokens, "cache": {"folder": str(cache)},
               "checkpoint": {"copy_to": copies}})
    for stage in ("shard", "tokenizer", "encode"):
        run_stage(stage, stored)
        assert hashes(stored, stage) == hashes(local, stage)
    shards = list((stored.parent / "runs/mini/encode").rglob("*.arrow"))
    assert len(shards) > 3
    for path in shards:
        path.unlink()

    process = start(stored, *SETTINGS, faults="wait:rank=0,step=11")
    try:
        wait_for(lambda: LAST in CopiedCheckpoints(Store(copies)).found().whole, of=process)
        wait_for((train_folder(stored) / "faults/wait-rank0-step11").exists, of=process)
    finally:
        kill(process)
    before = lines(stored)
    # What was lost had been done on one rank, like the local run's first start.
    assert len(before) >= LAST
    assert [(line["step"], line["loss"]) for line in before] == [
        (line["step"], line["loss"]) for line in lines(local)][:len(before)]
    shutil.rmtree(train_folder(stored))
    shutil.rmtree(cache)
    Store(copies).delete([LOCK])  # as if long ago: so long the next one waits for whoever held it
    said = run_stage("train", stored, *SETTINGS, ranks=2).stdout
    assert f"fetching step-{LAST:08} from {copies}" in said and f"continuing after step {LAST}" in said
    events = [event["event"] for event in read_lines(train_folder(stored) / "events.jsonl")]
    assert events.index("start") < events.index("checkpoint_copied") < events.index("checkpoint_fetched")
    copied = next(event for event in read_lines(train_folder(stored) / "events.jsonl")
                  if event["event"] == "checkpoint_copied" and event["step"] == 16)
    assert copied["bytes"] > 500_000 and copied["seconds"] > 0 and copied["behind_s"] >= 0
    kept = "".join(path.read_text(errors="replace") for path in stored.parent.rglob("*")
                   if path.is_file() and path.suffix in (".json", ".jsonl", ".yaml"))
    assert SECRET not in kept and SECRET not in said
    shutil.copytree(train_folder(local), train_folder(stored, "local"))
    for again in (False, True):
        if again:  # another number of ranks, and not one file but what is in the store
            shutil.rmtree(train_folder(stored))
            run_stage("train", stored, *SETTINGS)
        found = CopiedCheckpoints(Store(copies)).found()
        assert found.whole == [12, 16] and not found.unfinished and Store(copies).head(LOCK) is None
        assert_equal_to_the_bit(stored, to="local")
        assert read_manifest(train_folder(stored)).counts["steps"] == 16 and (again or proven(stored))
    assert proven(local)
    assert not list((stored.parent / "runs/mini/encode").rglob("*.arrow"))
