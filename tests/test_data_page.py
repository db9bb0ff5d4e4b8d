"""docs/data.md does what it says: its commands, in order, on a folder of dirty files in which all faults are known."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from pipeline.contract.manifest import read_manifest
from pipeline.data.text_shards import SPLITS, read_shard, shard_records
from pipeline.records.metrics import read_metrics
from pipeline.stores.store import Store
from tests.conftest import REPOSITORY, environment, write_config
from tests.dirty_corpus import Planted, write_dirty
from tests.object_store import set_environment
from tests.test_readme import BLOCK
from tests.waiting import HANG_S

PAGE = (REPOSITORY / "docs/data.md").read_text()
COMMANDS = [line.split("  #")[0].strip() for _, block in BLOCK.findall(PAGE) for line in block.splitlines()
            if not line.startswith("export ")]
"""The page's object store is SeaweedFS, whose address and keys are in the environment; the bucket has `texts/`."""


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> tuple[Path, Planted]:
    """A folder that looks like the checkout, with the files that the page speaks of, and what is wrong in them."""
    home = tmp_path_factory.mktemp("home")
    for name in ("launch", "pipeline", "model", "tools"):
        (home / name).symlink_to(REPOSITORY / name)
    (home / "configs").mkdir()
    write_config(home, corpus, name="demo", runs_dir="runs").rename(home / "configs/demo.yaml")
    for name, text in re.findall(r"```yaml\n# (configs/\w+.yaml)\n(.*?)```", PAGE, re.DOTALL):
        (home / name).write_text(text)
    return home, write_dirty(home)


@pytest.fixture(scope="module")
def home(planted: tuple[Path, Planted], seaweed_bucket: tuple[str, str]) -> Iterator[Path]:
    """The folder, after every command of the page."""
    folder, _ = planted
    with pytest.MonkeyPatch.context() as patch:
        set_environment(patch, seaweed_bucket[0])
        _type_all(folder, f"s3://{seaweed_bucket[1]}/{folder.parent.name}-{os.getpid()}")
        yield folder


def _type_all(folder: Path, bucket: str) -> None:
    store = Store(bucket)
    for file in filter(Path.is_file, (folder / "texts").rglob("*")):
        store.put(file.relative_to(folder).as_posix(), file)
    remote = folder / "configs/remote.yaml"
    remote.write_text(remote.read_text().replace("s3://bucket", bucket))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for command in COMMANDS:
        command = command.replace("s3://bucket", bucket)
        result = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, timeout=HANG_S,
                                env={**environment(), "PATH": path}, check=False)
        assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"


def kept(run: Path) -> dict[str, Any]:
    """The documents in a run's shards, by id."""
    manifest = read_manifest(run / "shard")
    assert manifest is not None
    return {document.id: document for split in SPLITS for record in shard_records(manifest, split)
            for document in read_shard(run / "shard", record)}


def test_the_page_has_the_promised_commands() -> None:
    text = "\n".join(COMMANDS)
    for needed in ("--stage shard,tokenizer,encode", "near_duplicates", "--phase read", "encode.encoder=reference"):
        assert needed in text


def test_what_is_dirty_is_gone_and_what_is_clean_is_there(home: Path, planted: tuple[Path, Planted]) -> None:
    _, dirt = planted
    found = kept(home / "runs/cleaned")
    gone = dirt.leaked | dirt.repeated | dirt.short | dirt.empty | dirt.long
    assert not gone & found.keys()
    # Of a document and its near-duplicate one is there, whichever comes first in the files.
    for near, first in dirt.near.items():
        assert (near in found) != (first in found)
    assert dirt.clean - {row["id"] for row in _duplicates(home)} <= found.keys()
    assert sum(document.source == "books" for document in found.values()) == 20


def _duplicates(home: Path) -> list[dict[str, Any]]:
    """What is not kept, with what is kept instead."""
    return [row for path in (home / "runs/cleaned/shard/duplicates").glob("*.parquet")
            for row in parquet.read_table(path).to_pylist()]


def test_every_copy_names_the_document_that_is_kept(home: Path, planted: tuple[Path, Planted]) -> None:
    found, (_, dirt), rows = kept(home / "runs/cleaned"), planted, _duplicates(home)
    assert Counter(row["kind"] for row in rows) == {"duplicate": len(dirt.copies), "near_duplicate": len(dirt.near)}
    assert all(row["kept_id"] in found and row["id"] not in found for row in rows)


def test_all_is_counted(home: Path, planted: tuple[Path, Planted]) -> None:
    _, dirt = planted
    counts = read_manifest(home / "runs/cleaned/shard").counts
    dropped = counts["dropped"]
    assert (dropped["duplicate"], dropped["near_duplicate"], dropped["empty"]) == (8, 6, len(dirt.empty))
    assert (dropped["length"], dropped["gopher_repetition"], dropped["decontamination"]) == (5, 4, 3)
    assert counts["documents_in"] == counts["train"] + counts["heldout"] + sum(dropped.values()) + counts["rejected"]
    reasons = [json.loads(line)["reason"] for line in (home / "runs/cleaned/shard/rejected.jsonl").open()]
    assert len(reasons) == counts["rejected"] == 8
    assert sum("max_document_mb" in reason for reason in reasons) == 1
    assert any("HTML page" in reason for reason in reasons)


def test_parts_by_hand_give_the_bytes_of_one_run(home: Path) -> None:
    one, parts = (read_manifest(home / "runs" / name / "shard") for name in ("cleaned", "parts"))
    assert one is not None and parts is not None
    assert [(record["path"], record["sha256"]) for record in one.outputs] == \
        [(record["path"], record["sha256"]) for record in parts.outputs]


def test_all_that_was_kept_is_encoded(home: Path) -> None:
    shard, encode = (read_manifest(home / "runs/cleaned" / stage) for stage in ("shard", "encode"))
    assert encode.counts["total"]["docs"] == shard.counts["train"] + shard.counts["heldout"]
    encoders = encode.counts["encoders"]
    assert encoders["fast_shards"] + encoders["reference_shards"] == len(encode.outputs)
    assert encoders["fallback_shards"] == 0


def test_files_and_objects_give_the_same_shards(home: Path) -> None:
    remote, local = (read_manifest(home / "runs" / name / "shard") for name in ("remote", "cleaned"))
    assert remote is not None and local is not None
    ours, theirs = ([(made["path"], made["sha256"]) for split in SPLITS for made in shard_records(manifest, split)]
                    for manifest in (remote, local))
    assert ours == theirs and len(ours) > 4 and remote.counts["train"] == local.counts["train"]


def test_training_from_the_store_has_the_losses_of_training_from_files(home: Path) -> None:
    stored, local = ([record["loss"] for record in read_metrics(home / "runs" / name / "train/metrics.jsonl")]
                     for name in ("stored", "cleaned"))
    assert stored == local and len(local) == 40
    phases = read_manifest(home / "runs/cleaned/train").counts["phases"]
    assert [phase["steps"] for phase in phases] == [16, 16, 8]
    assert [sum(phase["tokens"].values()) for phase in phases] == [8192, 16384, 8192]


def test_the_exports_are_there(home: Path) -> None:
    assert sorted(path.name for path in (home / "exported/cleaned").glob("*.bin")) == [
        "books.bin", "tables.bin", "web.bin"]
    assert (home / "exported/heldout/export.json").is_file()
