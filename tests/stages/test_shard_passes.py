"""The shard stage with near-duplicates: what is dropped is counted and named, and what cannot work is refused."""

import sys

import pytest
from pyarrow import parquet

from pipeline.contract.manifest import read_manifest
from pipeline.data.planning import components, runs
from tests.data.planning.test_near_duplicates import planted
from tests.stages.test_shard import documents, files_source, folder_of, hashes, run, write_config


@pytest.fixture
def corpus(tmp_path):
    for source, units in planted(families=90).items():
        (tmp_path / source).mkdir()
        for number, texts in enumerate(units):
            (tmp_path / source / f"{number}.txt").write_text("|".join(texts))
    sources = [files_source(f"s{source}", tmp_path / f"s{source}" / "*.txt", separator="|") for source in range(3)]
    return write_config(tmp_path, sources, shard_mb=0.03, heldout_share=0.2, near_duplicates={"verify": 0.5},
                        keep_duplicate="last")


def kept(config, name):
    return [row for path in sorted((folder_of(config, name) / "duplicates").glob("*.parquet"))
            for row in parquet.read_table(path).to_pylist()]


def test_counts_reconcile_and_every_dropped_document_names_one_that_stays(corpus, capsys, monkeypatch):
    """And groups and partitions of any size decide the same."""
    with monkeypatch.context() as small:
        small.setattr(runs, "GROUP_UNITS", 2)
        small.setattr(runs, "PARTITION_ROWS", 200)
        small.setattr(components, "STRETCH", 50)
        assert run(corpus, "name=small") == 0
    capsys.readouterr()
    assert run(corpus) == 0
    assert hashes(folder_of(corpus, "small")) == hashes(folder_of(corpus))
    assert kept(corpus, "small") == kept(corpus, "a")
    counts = read_manifest(folder_of(corpus)).counts
    dropped = counts["dropped"]
    assert counts["documents_in"] == counts["train"] + counts["heldout"] + sum(dropped.values())
    assert min(dropped["duplicate"], dropped["near_duplicate"]) > 10
    assert f"{dropped['duplicate']} duplicate, {dropped['near_duplicate']} near_duplicate" in capsys.readouterr().out
    stay = {(document.source, document.id) for split in ("train", "heldout") for document in documents(corpus, split)}
    rows = kept(corpus, "a")
    assert len(rows) == dropped["duplicate"] + dropped["near_duplicate"]
    assert all((row["kept_source"], row["kept_id"]) in stay and (row["source"], row["id"]) not in stay for row in rows)
    assert run(corpus, "shard.near_duplicates.bands=9") == 2
    assert "shard.near_duplicates.bands: absent -> 9" in capsys.readouterr().err


def test_without_them_equal_documents_are_named_where_dropped_ones_are_kept(corpus):
    assert run(corpus, "shard.near_duplicates=null", "shard.keep_dropped=true", "shard.filters=[{kind: masking}]") == 0
    rows = kept(corpus, "a")
    assert len(rows) == read_manifest(folder_of(corpus)).counts["dropped"]["duplicate"] > 10
    assert {row["kind"] for row in rows} == {"duplicate"}
    assert run(corpus, "shard.near_duplicates=null", "name=b") == 0
    assert not (folder_of(corpus, "b") / "duplicates").exists()


def test_what_cannot_work_is_refused_before_anything_is_read(corpus, capsys, monkeypatch):
    assert run(corpus, "shard.drop_duplicates=false") == 2
    assert "shard.near_duplicates drops documents that are nearly equal, but" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "rensa", None)
    assert run(corpus) == 2
    assert "shard.near_duplicates needs the package rensa. Install it with `pip install" in capsys.readouterr().err
