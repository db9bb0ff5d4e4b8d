"""The shard stage with near-duplicates and small groups: killed in every phase it ends with the same bytes."""

import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
from pyarrow import parquet

from pipeline.contract.manifest import read_manifest
from pipeline.data.planning import components, runs
from tests.data.planning.test_near_duplicates import planted
from tests.stages.test_shard import REPOSITORY, documents, files_source, folder_of, hashes, run, write_config
from tests.waiting import HANG_S, wait_for

PHASES = {"read": 5, "sort": 2, "match": 20, "components": 1, "decide": 2, "write": 4}
SMALL = """
import sys
from pipeline.data.planning import components, runs
runs.GROUP_UNITS, runs.PARTITION_ROWS, components.STRETCH = 2, 200, 50
from pipeline.contract.entry import stage_main
from pipeline.shard import shard
if __name__ == "__main__":
    sys.exit(stage_main("shard", shard, sys.argv[1:]))
"""


@pytest.fixture
def corpus(tmp_path):
    for source, units in planted(families=90).items():
        (tmp_path / source).mkdir()
        for number, texts in enumerate(units):
            (tmp_path / source / f"{number}.txt").write_text("|".join(texts))
    (tmp_path / "small.py").write_text(SMALL)
    sources = [files_source(f"s{source}", tmp_path / f"s{source}" / "*.txt", separator="|") for source in range(3)]
    return write_config(tmp_path, sources, shard_mb=0.03, heldout_share=0.2, near_duplicates={"verify": 0.5},
                        keep_duplicate="last")


def start(config, *overrides):
    return subprocess.Popen([sys.executable, str(config.parent / "small.py"), "--config", str(config), *overrides],
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=REPOSITORY,
                            env={"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin"})


def kept(config, name):
    return [row for path in sorted((folder_of(config, name) / "duplicates").glob("*.parquet"))
            for row in parquet.read_table(path).to_pylist()]


def test_killed_in_every_phase_with_other_processes_it_ends_with_the_same_bytes(corpus, monkeypatch):
    monkeypatch.setattr(runs, "GROUP_UNITS", 2)
    monkeypatch.setattr(runs, "PARTITION_ROWS", 200)
    monkeypatch.setattr(components, "STRETCH", 50)
    assert run(corpus) == 0
    rng, folder, killed = random.Random(6), folder_of(corpus, "b"), 0
    for processes, (phase, goal) in enumerate(PHASES.items()):
        process = start(corpus, "name=b", f"launch.processes={processes % 3 + 1}")
        wait_for(lambda process=process, phase=phase, goal=goal: process.poll() is not None
                 or len(list((folder / "units" / phase).rglob("*.json"))) >= goal)
        time.sleep(rng.uniform(0, 0.01))
        process.kill()
        process.communicate()
        killed += process.returncode == -signal.SIGKILL
        if process.returncode == 0:
            shutil.rmtree(folder)
    assert killed >= 4
    process = start(corpus, "name=b", "launch.processes=3")
    output, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, output
    assert hashes(folder) == hashes(folder_of(corpus)) and kept(corpus, "b") == kept(corpus, "a")
    one, other = read_manifest(folder_of(corpus)), read_manifest(folder)
    assert (one.outputs, one.counts, one.fingerprint) == (other.outputs, other.counts, other.fingerprint)
    assert not (folder / "staging").exists() and {path.name for path in (folder / "units").iterdir()} == {"write"}
    monkeypatch.undo()
    assert run(corpus, "name=whole") == 0 and hashes(folder_of(corpus, "whole")) == hashes(folder)


def test_counts_reconcile_and_every_dropped_document_names_one_that_stays(corpus, capsys):
    assert run(corpus) == 0
    counts = read_manifest(folder_of(corpus)).counts
    dropped = counts["dropped"]
    assert counts["documents_in"] == counts["train"] + counts["heldout"] + sum(dropped.values())
    assert list(dropped) == ["duplicate", "near_duplicate", "empty"] and min(dropped["duplicate"],
                                                                            dropped["near_duplicate"]) > 10
    assert f"{dropped['duplicate']} duplicate, {dropped['near_duplicate']} near_duplicate" in capsys.readouterr().out
    stay = {(document.source, document.id) for split in ("train", "heldout") for document in documents(corpus, split)}
    rows = kept(corpus, "a")
    assert len(rows) == dropped["duplicate"] + dropped["near_duplicate"]
    assert all((row["kept_source"], row["kept_id"]) in stay and (row["source"], row["id"]) not in stay for row in rows)
    assert {record["split"] for record in read_manifest(folder_of(corpus)).outputs} == {
        "train", "heldout", "duplicates", "rejected"}


def test_without_them_equal_documents_are_named_where_dropped_ones_are_kept(corpus):
    assert run(corpus, "shard.near_duplicates=null", "shard.keep_dropped=true", "shard.filters=[{kind: masking}]") == 0
    rows = kept(corpus, "a")
    counts = read_manifest(folder_of(corpus)).counts
    assert len(rows) == counts["dropped"]["duplicate"] > 10 and {row["kind"] for row in rows} == {"duplicate"}
    assert "near_duplicate" not in counts["dropped"]
    assert run(corpus, "shard.near_duplicates=null", "name=b") == 0
    assert not (folder_of(corpus, "b") / "duplicates").exists()


def test_another_banding_is_another_corpus(corpus, capsys):
    assert run(corpus) == 0
    assert run(corpus, "shard.near_duplicates.bands=9") == 2
    assert "shard.near_duplicates.bands: absent -> 9" in capsys.readouterr().err


def test_what_cannot_work_is_refused_before_anything_is_read(corpus, capsys, monkeypatch):
    assert run(corpus, "shard.drop_duplicates=false") == 2
    assert "shard.near_duplicates drops documents that are nearly equal, but" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "rensa", None)
    assert run(corpus) == 2
    assert "shard.near_duplicates needs the package rensa. Install it with `pip install" in capsys.readouterr().err
    assert not (folder_of(corpus) / "staging").exists()
