"""The pages on data do what they say: their commands, in order, on dirty files in which all faults are known."""

import os
from collections import Counter
from pathlib import Path

import pytest
from pyarrow import parquet

from drover.pipeline.contract.manifest import read_manifest
from drover.pipeline.core.files import read_lines
from drover.pipeline.data.text_shards import SPLITS, read_shard, shard_records
from drover.pipeline.records.metrics import read_metrics
from drover.pipeline.storage.store import Store
from tests.conftest import write_config
from tests.dirty_corpus import write_dirty
from tests.object_store import set_environment
from tests.pages import checkout, commands, files, typed, warm_stages

pytestmark = pytest.mark.slow
PAGES = "tutorial-crawl", "data", "tokens"
COMMANDS = [command for command in commands(*PAGES) if not command.startswith(("export ", "drover classifier "))]
"""The page's object store is SeaweedFS, whose address and keys are in the environment; the bucket has `texts/`. The
documents of the classifier are nowhere: tests/data/filters/test_classifier.py trains one."""


@pytest.fixture(scope="module")
def planted(tmp_path_factory, corpus):
    """A folder that looks like the checkout, with the files that the page speaks of, and what is wrong in them."""
    home = warm_stages(checkout(tmp_path_factory.mktemp("home")))
    write_config(home, corpus, name="demo", runs_dir="runs").rename(home / "configs/demo.yaml")
    for name, text in files(*PAGES).items():
        (home / name).write_text(text)
    return home, write_dirty(home)


@pytest.fixture(scope="module")
def home(planted, seaweed_bucket):
    """The folder, after every command of the page."""
    folder, _ = planted
    bucket = f"s3://{seaweed_bucket[1]}/{folder.parent.name}-{os.getpid()}"
    with pytest.MonkeyPatch.context() as patch:
        set_environment(patch, seaweed_bucket[0])
        store = Store(bucket)
        for file in filter(Path.is_file, (folder / "texts").rglob("*")):
            store.put(file.relative_to(folder).as_posix(), file)
        remote = folder / "configs/remote.yaml"
        remote.write_text(remote.read_text().replace("s3://bucket", bucket))
        for command in COMMANDS:
            result = typed(command.replace("s3://bucket", bucket), folder)
            assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
        yield folder


def made(home, name, stage="shard"):
    """The manifest of a stage of a run."""
    return read_manifest(home / "runs" / name / stage)


def test_what_is_dirty_is_gone_and_counted(home, planted):
    """Every copy names the document that is kept."""
    folder, (_, dirt) = home / "runs/cleaned/shard", planted
    result = {document.id: document for split in SPLITS for record in shard_records(made(home, "cleaned"), split)
             for document in read_shard(folder, record)}
    assert not dirt.gone & result.keys()
    # Of a document and its near-duplicate one is there, whichever comes first in the files.
    assert all((near in result) != (first in result) for near, first in dirt.near.items())
    rows = [row for path in (folder / "duplicates").glob("*.parquet") for row in parquet.read_table(path).to_pylist()]
    assert dirt.clean - {row["id"] for row in rows} <= result.keys()
    assert sum(document.source == "books" for document in result.values()) == 20
    assert Counter(row["kind"] for row in rows) == {"duplicate": 8, "near_duplicate": len(dirt.near)}
    assert all(row["kept_id"] in result and row["id"] not in result for row in rows)
    counts = made(home, "cleaned").counts
    assert {name: count for name, count in counts["dropped"].items() if count} == {
        "duplicate": 8, "near_duplicate": 6, "empty": 3, "length": 5, "gopher_repetition": 4, "decontamination": 3}
    reasons = [record["reason"] for record in read_lines(folder / "rejected.jsonl")
               if record.get("documents", 1)]  # empty documents are listed, too
    assert len(reasons) == counts["rejected"] == 8
    assert sum("max_document_mb" in reason for reason in reasons) == 1
    assert any("HTML page" in reason for reason in reasons)


def test_elements_by_hand_and_objects_give_the_shards_of_one_run(home):
    cleaned, shared, remote = ([(record["path"], record["sha256"]) for split in SPLITS for record in shard_records(
        made(home, name), split)] for name in ("cleaned", "shared", "remote"))
    assert cleaned == shared == remote and len(cleaned) > 4


def test_training_from_the_store_has_the_losses_of_training_from_files(home):
    stored, cleaned = ([record["loss"] for record in read_metrics(home / "runs" / name / "train/metrics.jsonl")]
                       for name in ("stored", "cleaned"))
    assert stored == cleaned and len(cleaned) == 40
    phases = made(home, "cleaned", "train").counts["phases"]
    assert [(phase["steps"], sum(phase["tokens"].values())) for phase in phases] == [(16, 8192), (16, 16384), (8, 8192)]
