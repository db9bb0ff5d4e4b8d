"""The shard stage as it is run: equal bytes for any number of processes and after any kill, and counts that add up."""

import gzip
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from drover.pipeline.config.loading import load_config
from drover.pipeline.contract.entry import stage_main
from drover.pipeline.contract.manifest import read_manifest
from drover.pipeline.contract.run import Run
from drover.pipeline.data.planning import runs
from drover.pipeline.data.text_shards import read_documents, read_shard, shard_records
from drover.pipeline.shard import shard
from tests.conftest import REPOSITORY, run_stage
from tests.cut_off import cut_off_stage
from tests.data.planning.test_near_duplicates import planted
from tests.dirty_corpus import every_pass, write_dirty
from tests.waiting import HANG_S


def make_corpus(folder, files=6, rows=150, seed=1):
    """Two sources of JSON lines with duplicates within and between them and some empty texts."""
    rng = random.Random(seed)
    for source in ("web", "books"):
        (folder / source).mkdir(parents=True)
        for number in range(files):
            lines = [json.dumps({"text": text(rng, source)}) for _ in range(rows)]
            (folder / source / f"{number}.jsonl").write_text("\n".join(lines) + "\n")


def text(rng, source):
    if rng.random() < 0.1:
        return rng.choice(["", " \n", "said twice", "said often", "heard everywhere"])
    return f"{source} {rng.random()} " + "lorem ipsum " * rng.randint(1, 60)


def write_config(place, sources, **shard_settings):
    path = place / "c.yaml"
    path.write_text(yaml.safe_dump({"name": "a", "runs_dir": str(place / "runs"), "launch": {"processes": 1},
                                    "shard": {"sources": sources, **shard_settings}}))
    return path


def files_source(name, *paths, **fields):
    return {"kind": "files", "name": name, "paths": [str(path) for path in paths], **fields}


def corpus_config(place):
    """A config over two generated sources, cut into many small units and shards."""
    make_corpus(place / "in")
    sources = [files_source(name, place / "in" / name / "*.jsonl") for name in ("web", "books")]
    return write_config(place, sources, shard_mb=0.04, heldout_share=0.1)


def run(config, *overrides):
    return stage_main("shard", shard, ["--config", str(config), *overrides])


def folder_of(config, name="a"):
    return config.parent / "runs" / name / "shard"


def hashes(folder):
    """sha256 of every tar and .jsonl, by path, but for the ledger; nothing else may be a lasting output."""
    assert not (folder / "staging").exists() and not list(folder.rglob("*.tmp"))
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in folder.rglob("*") if path.suffix in (".tar", ".jsonl")
            and path.relative_to(folder).parts[0] != "units"}


def documents(config, split, name="a"):
    manifest = read_manifest(folder_of(config, name))
    return [document for record in shard_records(manifest, split)
            for document in read_shard(folder_of(config, name), record)]


def start(config, *overrides):
    """The stage as a script in a process of its own."""
    return subprocess.Popen([sys.executable, str(REPOSITORY / "pipeline" / "shard.py"), "--config", str(config),
                             *overrides], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def share(text):
    """Where a text falls between 0 and 1: below `heldout_share` it is held out."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def test_bytes_are_the_same_for_any_number_of_processes_and_place_and_what_is_lost_is_made_again(tmp_path):
    (tmp_path / "one").mkdir()
    once = corpus_config(tmp_path / "one")
    assert run(once) == 0
    shutil.copytree(once.parent / "in", tmp_path / "deeper/in")
    moved = tmp_path / "deeper/in"
    config = write_config(tmp_path, [files_source(name, moved / name / "*.jsonl") for name in ("web", "books")],
                          shard_mb=0.04, heldout_share=0.1)
    process = start(config, "launch.processes=3")
    output, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, output
    before = hashes(folder_of(config))
    assert before == hashes(folder_of(once))
    one, other = read_manifest(folder_of(config)), read_manifest(folder_of(once))
    assert (one.outputs, one.counts, one.fingerprint) == (other.outputs, other.counts, other.fingerprint)
    assert f"1,800 documents in = {one.counts['train']:,} train + {one.counts['heldout']} validation" in output
    assert max(record["text_bytes"] for record in shard_records(one, "train", "web")) < 2 * 0.04e6

    stamps = {path: path.stat().st_mtime_ns for path in folder_of(config).rglob("*.tar")}
    lost, cut = folder_of(config) / "train/web-00002.tar", folder_of(config) / "heldout/books-00000.tar"
    lost.unlink()
    cut.write_bytes(cut.read_bytes()[:1000])
    assert run(config) == 0
    assert hashes(folder_of(config)) == before
    assert {path for path, stamp in stamps.items() if path.stat().st_mtime_ns != stamp} == {lost, cut}


def test_unreadable_documents_and_files_are_counted_and_named(tmp_path, capsys):
    lines = [b'{"text": "text %d"}' % number for number in range(100)]
    lines[10], lines[50] = b'{"text": "br\xffoken"}', b'{"text": "cut'
    (tmp_path / "f.jsonl").write_bytes(b"\n".join(lines))
    packed = gzip.compress(random.Random(5).randbytes(50_000).hex().encode())
    (tmp_path / "g.txt.gz").write_bytes(packed[:len(packed) // 2])
    config = write_config(tmp_path, [files_source("s", tmp_path / "f.jsonl"), files_source(
        "t", tmp_path / "g.txt.gz", separator="aa")], heldout_share=0.2)
    for most, told in (
            (0.001, ("documents cannot be read", "max_rejected_share 0.001", "s/f.jsonl:11: broken UTF-8")),
            (0.1, ("1 of 2 files cannot be read to their end", "g.txt.gz"))):
        assert run(config, f"shard.max_rejected_share={most}") == 2
        error = capsys.readouterr().err
        assert all(text in error for text in told) and "Traceback" not in error
    assert read_manifest(folder_of(config)) is None
    assert run(config, "shard.max_rejected_share=1") == 0
    rejected = [json.loads(line) for line in (folder_of(config) / "rejected.jsonl").read_text().splitlines()]
    assert [(entry["source"], entry["record"]) for entry in rejected[:2]] == [("s", 11), ("s", 51)]
    counts = read_manifest(folder_of(config)).counts["sources"]
    assert (counts["s"]["rejected"], counts["t"]["rejected"], len(rejected)) == (2, 1, 3)
    assert counts["t"]["train"] > 100, "what is read before the damage counts"


def test_what_makes_no_corpus_is_explained_all_at_once(tmp_path, capsys):
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "one.txt").write_text("one document")
    (tmp_path / "same.txt").write_text("one document")
    config = write_config(tmp_path, [files_source(name, tmp_path / f"{name}.txt") for name in ("one", "empty", "same")])
    assert run(config) == 2
    error = capsys.readouterr().err
    assert "source empty yields no documents: 1 read, of which 0 duplicate, 1 empty, 0 unreadable" in error
    assert "source same yields no documents: 1 read, of which 1 duplicate, 0 empty" in error
    assert "the corpus is a single document" in error and "separator" in error
    for name in ("empty", "same"):
        (tmp_path / f"{name}.txt").write_text(f"{name} no more")
    assert run(config, "shard.heldout_share=1e-9") == 2
    assert "none of the 3 documents is in the validation split" in capsys.readouterr().err
    assert run(config, "shard.heldout_share=0.5", "shard.heldout_rule=tail") == 0, "other settings need no --force"
    assert "finished units that are removed" in capsys.readouterr().out


TEXTS = st.one_of(st.sampled_from(["", "  ", "same", "other", "a\0", "\u2581 b"]), st.text(max_size=5))
LINES = st.lists(st.one_of(TEXTS.map(lambda text: {"text": text}),
                           st.sampled_from([{"text": None}, {"text": "\udc80"}, {"body": "x"}, [], "x"])), max_size=12)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow,
                                                                 HealthCheck.function_scoped_fixture])
@given(files=st.lists(st.tuples(st.sampled_from("ab"), LINES), min_size=2, max_size=6), drop=st.booleans())
def test_every_document_is_accounted_for(tmp_path_factory, files, drop):
    place = tmp_path_factory.mktemp("any")
    files = [("a", [{"text": "first of a"}]), ("b", [{"text": "first of b"}]), *files]
    for number, (source, lines) in enumerate(files):
        (place / source).mkdir(exist_ok=True)
        (place / source / f"{number}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = write_config(place, [files_source(name, place / name / "*.jsonl") for name in "ab"], heldout_share=0.5,
                          shard_mb=1e-5, max_rejected_share=1.0, drop_duplicates=drop)
    kept, fates, seen = {"train": [], "heldout": []}, Counter(), set()
    for number, (_, lines) in sorted(enumerate(files), key=lambda entry: entry[1][0]):
        for at, line in enumerate(lines, 1):
            text = line.get("text") if isinstance(line, dict) else None
            if not isinstance(text, str) or "\udc80" in text:
                fates["rejected"] += 1
            elif not text.strip():
                fates["empty"] += 1
            elif drop and text in seen:
                fates["duplicate"] += 1
            else:
                seen.add(text)
                kept["heldout" if share(text) < 0.5 else "train"].append((f"{number}.jsonl:{at}", text))
    status = run(config)
    if not kept["train"] or not kept["heldout"]:
        assert status == 2
        return
    assert status == 0
    found = {split: documents(config, split) for split in kept}
    assert {split: [(document.id, document.text) for document in found[split]] for split in kept} == kept
    everything = found["train"] + found["heldout"]
    for path in folder_of(config).glob("*/*.tar"):
        keys = [document.key for document in read_documents(path)]
        assert len(set(keys)) == len(keys)
    counts = read_manifest(folder_of(config)).counts
    assert counts["documents_with_nul"] == sum("\0" in document.text for document in everything)
    assert counts["documents_with_u2581"] == sum("\u2581" in document.text for document in everything)
    assert counts["text_bytes"] == {split: sum(len(document.text.encode()) for document in found[split])
                                    for split in found}
    assert counts["documents_in"] == sum(len(lines) for _, lines in files) == len(everything) + fates.total()
    assert counts["dropped"] == {"duplicate": fates["duplicate"], "empty": fates["empty"]}
    assert (counts["train"], counts["heldout"], counts["rejected"]) == (
        *map(len, kept.values()), fates["rejected"])


def test_names_of_any_bytes_go_through_the_stage(tmp_path):
    (tmp_path / "corpus").mkdir()
    for number in range(20):
        with open(os.fsencode(tmp_path) + b"/corpus/caf\xe9-%d.txt" % number, "wb") as file:
            file.write(b"text number %d" % number)
    config = write_config(tmp_path, [files_source("t", tmp_path / "corpus/**")], heldout_share=0.3)
    assert run(config) == 0
    names = {f"caf\\xe9-{number}.txt" for number in range(20)}
    assert {document.id for split in ("train", "heldout") for document in documents(config, split)} == names
    (tmp_path / "corpus" / os.fsdecode(b"caf\xe9-7.txt")).unlink()
    assert "t/caf\\xe9-7.txt is gone" in Run(load_config(config)).why("shard")


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
        assert run(corpus, "name=small") == 0
    assert run(corpus) == 0
    assert hashes(folder_of(corpus, "small")) == hashes(folder_of(corpus))
    rows, dropped = kept(corpus, "a"), read_manifest(folder_of(corpus)).counts["dropped"]
    assert kept(corpus, "small") == rows
    assert min(dropped["duplicate"], dropped["near_duplicate"]) > 10
    assert f"{dropped['duplicate']} duplicate, {dropped['near_duplicate']} near_duplicate" in capsys.readouterr().out
    stay = {(document.source, document.id) for split in ("train", "heldout") for document in documents(corpus, split)}
    assert len(rows) == dropped["duplicate"] + dropped["near_duplicate"]
    assert all((row["kept_source"], row["kept_id"]) in stay and (row["source"], row["id"]) not in stay for row in rows)
    assert run(corpus, "shard.near_duplicates.bands=9") == 2
    assert "shard.near_duplicates.bands: absent -> 9" in capsys.readouterr().err


def test_without_them_equal_documents_are_named_where_dropped_ones_are_kept(corpus):
    assert run(corpus, "shard.near_duplicates=null", "shard.keep_dropped=true", "shard.filters=[]") == 0
    rows = kept(corpus, "a")
    assert len(rows) == read_manifest(folder_of(corpus)).counts["dropped"]["duplicate"] > 10
    assert {row["kind"] for row in rows} == {"duplicate"}
    assert run(corpus, "shard.near_duplicates=null", "name=b") == 0
    assert not (folder_of(corpus, "b") / "duplicates").exists()


def test_what_cannot_work_is_refused_before_anything_is_read(corpus, capsys, monkeypatch):
    assert run(corpus, "shard.drop_duplicates=false") == 2
    assert "shard.near_duplicates drops near-duplicates, but" in capsys.readouterr().err
    monkeypatch.setattr("drover.pipeline.core.errors.find_spec", lambda name: None)
    assert run(corpus) == 2
    assert "shard.near_duplicates needs the package rensa, which is not installed" in capsys.readouterr().err


@pytest.mark.parametrize("base", [pytest.param(2.0, marks=pytest.mark.slow), pytest.param(1.1, marks=pytest.mark.soak)])
def test_killed_all_over_its_passes_it_ends_with_the_same_bytes(tmp_path, base):
    """Before a change of files whose number is a power of the base: first it is killed often where it begins, then far
    on its way. Each start goes on from what the killed one before it left. A worker that dies ends the stage too."""
    write_dirty(tmp_path, size=2)
    config = write_config(tmp_path, **every_pass(tmp_path))
    run_stage("shard", config)
    ends = []
    for number in itertools.takewhile(lambda _: 0 not in ends, itertools.count()):
        ends.append(cut_off_stage("shard", int(base ** number), "--config", str(config), "name=killed",
                                  f"launch.processes={1 + number % 3}")[0])
    assert len(ends) > 6 and {0, -signal.SIGKILL} <= set(ends) <= {0, 2, -signal.SIGKILL}
    one, other = (read_manifest(folder_of(config, name)) for name in ("a", "killed"))
    assert (one.outputs, one.counts, one.fingerprint) == (other.outputs, other.counts, other.fingerprint)
    killed = folder_of(config, "killed")
    assert not (killed / "staging").exists() and not list(killed.parent.rglob("*.tmp"))
