"""A run that lives in an object store: sources, token shards and checkpoints are there, and the machine is lost on the
way. It equals the run that had a disk of its own, to the last bit."""

import shutil

import pytest

from drover.pipeline.contract.manifest import read_manifest
from drover.pipeline.core.files import read_lines
from drover.pipeline.storage.store import Store
from drover.pipeline.training.copied_checkpoints import CopiedCheckpoints
from tests.conftest import run_stage, write_config
from tests.object_store import SECRET
from tests.stages.training import assert_equal_to_the_bit, kill, lines, proven, run_with_faults, start, train_folder
from tests.waiting import wait_for

SETTINGS = ["train.steps=16", "train.checkpoint.background=false"]
LAST = 8
"""The step of the last checkpoint before the kill, which is in step 11."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["seaweed", pytest.param("google", marks=pytest.mark.soak),
                                  pytest.param("azurite", marks=pytest.mark.soak)])
def test_a_run_of_which_all_is_in_a_store_and_the_machine_is_lost_equals_a_local_one(corpus, encoded, fresh, kind,
                                                                                     tmp_path, request):
    """Killed on one rank, and continued on two by a machine that has not one file of the training."""
    bucket = request.getfixturevalue(kind)
    local = [*SETTINGS, "name=local"]
    run_with_faults(fresh, "kill:rank=0,step=11", *local, expect=-9)
    run_stage("train", fresh, *local, ranks=2)

    for path in corpus.iterdir():
        Store(bucket.url_of("texts")).put(path.name, path)
    source = {"kind": "files", "name": "code", "paths": [f"{bucket.url_of('texts')}/*.txt"]}
    tokens, copies = bucket.url_of("tokens"), bucket.url_of("checkpoints")
    (tmp_path / "stored").mkdir()
    stored = write_config(
        tmp_path / "stored", corpus, shard={"sources": [source]}, encode={"copy_to": tokens},
        train={"micro_batch": 8, "tokens_from": tokens, "cache": {"folder": str(tmp_path / "cache")},
               "checkpoint": {"copy_to": copies}})
    run = stored.parent / "runs/mini"
    for stage in ("shard", "tokenizer", "encode"):
        run_stage(stage, stored)
        assert read_manifest(run / stage).digest == read_manifest(encoded.parent / "runs/mini" / stage).digest
    shards = list((run / "encode").rglob("*.arrow"))
    assert len(shards) > 3
    for path in shards:
        path.unlink()

    process = start(stored, *SETTINGS, faults="wait:rank=0,step=11")
    try:
        wait_for(lambda: LAST in CopiedCheckpoints(Store(copies)).found().whole, of=process)
        wait_for((run / "train/faults/wait-rank0-step11").exists, of=process)
    finally:
        kill(process)
    before = lines(stored)  # on one rank, like the local run's first start
    assert len(before) >= LAST and all(ours["loss"] == theirs["loss"] for ours, theirs in zip(
        before, lines(fresh, "local"), strict=False))
    shutil.rmtree(run / "train")
    shutil.rmtree(tmp_path / "cache")
    said = run_stage("train", stored, *SETTINGS, ranks=2).stdout
    assert f"fetching step-{LAST:08} from {copies}" in said and f"continuing after step {LAST}" in said
    events = list(read_lines(run / "train/events.jsonl"))
    kinds = [event["event"] for event in events]
    assert kinds.index("start") < kinds.index("checkpoint_fetched")  # a copy's end may be noted after the kill only
    [copied] = [event for event in events if event["event"] == "checkpoint_copied" and event["step"] == 16]
    assert copied["bytes"] > 500_000 and copied["seconds"] > 0 and copied["behind_s"] >= 0
    kept = "".join(path.read_text(errors="replace") for path in stored.parent.rglob("*")
                   if path.is_file() and path.suffix in (".json", ".jsonl", ".yaml"))
    assert SECRET not in kept + said
    shutil.copytree(train_folder(fresh, "local"), train_folder(stored, "local"))
    found = CopiedCheckpoints(Store(copies)).found()
    assert found.whole == [12, 16] and not found.unfinished
    assert_equal_to_the_bit(stored, to="local")
    assert read_manifest(run / "train").counts["steps"] == 16 and proven(stored) and proven(fresh, "local")
    assert not list((run / "encode").rglob("*.arrow"))
