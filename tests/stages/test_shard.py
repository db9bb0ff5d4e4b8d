"""The shard stage as it is run: equal bytes for any number of processes and after any kill, and counts that add up."""

import gzip
import hashlib
import itertools
import os
import random
import re
import signal
from functools import partial

import pytest
import yaml

from drover.pipeline.config.loading import load_config
from drover.pipeline.contract.run import Run
from drover.pipeline.core.files import read_lines
from drover.pipeline.data.text_shards import SPLITS, read_shard, shard_records
from tests.conftest import run_stage
from tests.cut_off import cut_off_stage
from tests.data.filters.test_kinds import ENGLISH, GERMAN, TWO
from tests.data.source_files import write_jsonl
from tests.dirty_corpus import every_pass, write_dirty
from tests.stages.here import run_here
from tests.stages.training import manifest_of


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
    """A config over two sources of JSON lines, with duplicates within and between them and some empty texts, cut into
    many small units and shards."""
    rng, sources = random.Random(1), []
    for source in ("web", "books"):
        for number in range(6):
            write_jsonl(place / "in" / source / f"{number}.jsonl", ({"text": text(rng, source)} for _ in range(150)))
        sources.append(files_source(source, place / "in" / source / "*.jsonl"))
    return write_config(place, sources, shard_mb=0.04, validation_share=0.1)


run = partial(run_here, "shard")


def folder_of(config, name="a"):
    return config.parent / "runs" / name / "shard"


def hashes(folder):
    """sha256 of every tar and .jsonl, by path, but for the ledger; nothing else may be a lasting output."""
    assert not (folder / "staging").exists() and not list(folder.rglob("*.tmp"))
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in folder.rglob("*") if path.suffix in (".tar", ".jsonl")
            and path.relative_to(folder).parts[0] != "units"}


def finished(config, *overrides, name="a"):
    """Run the stage to its end; its manifest."""
    assert run(config, f"name={name}", *overrides) == 0
    return manifest_of(config, "shard", name)


def documents(config, split, name="a"):
    manifest = manifest_of(config, "shard", name)
    return [document for record in shard_records(manifest, split)
            for document in read_shard(folder_of(config, name), record)]


def test_bytes_are_equal_for_any_processes_and_place_and_lost_files_return(tmp_path, capsys):
    once, config = (corpus_config(tmp_path / name) for name in ("one", "deeper/other"))
    assert run(once) == 0
    output = run_stage("shard", config, "launch.processes=3").stdout
    before = hashes(folder_of(config))
    assert before == hashes(folder_of(once))
    one, other = manifest_of(config, "shard", "a"), manifest_of(once, "shard", "a")
    assert (one.outputs, one.counts, one.fingerprint) == (other.outputs, other.counts, other.fingerprint)
    assert f"1,800 documents in = {one.counts['train']:,} train + {one.counts['validation']} validation" in output
    assert max(record["text_bytes"] for record in shard_records(one, "train", "web")) < 2 * 0.04e6

    stamps = {path: path.stat().st_mtime_ns for path in folder_of(config).rglob("*.tar")}
    lost, cut = folder_of(config) / "train/web-00002.tar", folder_of(config) / "validation/books-00000.tar"
    lost.unlink()
    cut.write_bytes(cut.read_bytes()[:1000])
    assert run(config) == 0 and capsys.readouterr().out.count(": making it again") == 2
    assert hashes(folder_of(config)) == before
    assert {path for path, stamp in stamps.items() if path.stat().st_mtime_ns != stamp} == {lost, cut}


def test_documents_that_are_html_pages_are_counted_and_printed(tmp_path, capsys):
    page = "<?xml version='1.0'?><!-- a -->\n<!DOCTYPE html>"
    for name, beginning in (("web", page), ("api", "<html lang='en'>"), ("few", "plain ")):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"text": f"{beginning if number < 2 else ''}{name} {number}"}
                                                 for number in range(40)])
    sources = [files_source(name, tmp_path / f"{name}.jsonl", html="keep" if name == "api" else "pages")
               for name in ("web", "api", "few")]
    counts = finished(write_config(tmp_path, sources, validation_share=0.1)).counts
    assert (counts["documents_that_are_html"], counts["sources"]["api"]["documents_that_are_html"]) == (4, 2)
    message = [line for line in capsys.readouterr().out.splitlines() if "HTML" in line]
    assert len(message) == 1 and "source web: 2 of 40 documents begin as HTML pages" in message[0]
    filters = [{"kind": "length", "min_words": 9}]
    assert run(write_config(tmp_path, sources[:1], filters=filters), "name=b") == 2
    assert "2 of 40 documents begin as HTML pages" in " ".join(capsys.readouterr().err.split())


def test_a_language_of_which_other_filters_leave_nothing_is_named(tmp_path):
    pytest.importorskip("fasttext", reason="of the extra `clean`")
    write_jsonl(tmp_path / "a.jsonl", [{"text": f"{own} {row}"} for row in range(20) for own in (ENGLISH, GERMAN)])
    config = write_config(tmp_path, [files_source("a", tmp_path / "a.jsonl")], validation_share=0.2, filters=[
        {"kind": "language", "path": str(TWO), "languages": ["en", "de", "fr"]},
        {"kind": "language", "name": "strict", "path": str(TWO), "languages": ["en"]}])
    assert "warning: source a: other filters drop all documents in de that the filter language keeps; " in str(
        finished(config).counts["remarks"]["a"])


def test_a_source_of_which_more_than_half_is_dropped_is_named_with_the_reasons(tmp_path, capsys):
    for name, most in (("web", 26), ("books", 25)):
        write_jsonl(tmp_path / f"{name}.jsonl", [
            {"text": f"{name} {number}" if number < most else f"{number} {name} " * 9} for number in range(50)])
    config = write_config(tmp_path, [files_source(name, tmp_path / f"{name}.jsonl") for name in ("web", "books")],
                          validation_share=0.1, filters=[{"kind": "length", "min_words": 3}])
    [message] = [line for line in finished(config).counts["remarks"]["web"] if "warning" in line]
    assert message == "warning: source web: 26 of 50 documents (52%) are dropped, most as 26 length: fewer than 3 words"
    assert message in capsys.readouterr().out
    assert "are dropped" not in str(finished(config).counts["remarks"]["books"])


def test_unreadable_documents_and_files_are_counted_and_named(tmp_path, run):
    rows = [b'{"text": "text %d"}' % number for number in range(100)]
    rows[10], rows[50] = b'{"text": "br\xffoken"}', b'{"text": "cut'
    (tmp_path / "f.jsonl").write_bytes(b"\n".join(rows))
    packed = gzip.compress(random.Random(5).randbytes(50_000).hex().encode())
    (tmp_path / "g.txt.gz").write_bytes(packed[:len(packed) // 2])
    config = write_config(tmp_path, [files_source("s", tmp_path / "f.jsonl"), files_source(
        "t", tmp_path / "g.txt.gz", separator="aa")], validation_share=0.2)
    error = run("shard", config, expect=2).err
    for part in ("1 of 2 files cannot be read to their end", "t/g.txt.gz (",
                 "max_rejected_share 0.001", "(1 as s/f.jsonl:11: bytes that utf-8 has not", "1 as t/g.txt.gz:"):
        assert part in error
    assert "3 of " in run("shard", config, "shard.max_rejected_share=0.002", expect=2).err, "as it is set"
    assert manifest_of(config, "shard", "a") is None
    enough = re.search("add (shard.max_rejected_share=[0-9.]+) ", error)[1]
    run("shard", config, enough)
    rejected = list(read_lines(folder_of(config) / "rejected.jsonl"))
    assert [(entry["source"], entry["record"]) for entry in rejected[:2]] == [("s", 11), ("s", 51)]
    counts = manifest_of(config, "shard", "a").counts["sources"]
    assert (counts["s"]["rejected"], counts["t"]["rejected"], len(rejected)) == (2, 1, 3)
    assert counts["t"]["train"] > 100, "what is read before the damage counts"


def test_what_makes_no_corpus_is_explained_all_at_once(tmp_path, run):
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "one.txt").write_text("one document")
    (tmp_path / "same.txt").write_text("one document")
    config = write_config(tmp_path, [files_source(name, tmp_path / f"{name}.txt") for name in ("one", "empty", "same")])
    error = run("shard", config, expect=2).err
    assert "source empty yields no documents: 1 read, of which 0 duplicate, 1 empty, 0 unreadable" in error
    assert "source same yields no documents: 1 read, of which 1 duplicate, 0 empty" in error
    assert "the corpus is a single document" in error and "separator" in error and "validation_rule: tail" in error
    (tmp_path / "x.txt").write_text("x")
    assert "none of the 1 documents is in the train split" in run("shard", config, "shard.validation_rule=tail", (
        f"shard.sources=[{{kind: files, name: x, paths: [{tmp_path}/x.txt]}}]"), expect=2).err
    for name in ("empty", "same"):
        (tmp_path / f"{name}.txt").write_text(f"{name} no more")
    error = run("shard", config, "shard.validation_share=1e-9", expect=2).err
    assert "none of the 3 documents is in the validation split" in error
    assert "Take the end of each source's text instead (shard.validation_rule: tail)" in error
    others = ("shard.validation_share=0.5", "shard.validation_rule=tail")
    assert "finished tasks that are removed" in run("shard", config, *others).out, "other settings need no --force"


def test_every_document_is_accounted_for_in_files_of_any_name(tmp_path):
    """Kept with its place, a duplicate, empty or rejected; tests/data/planning/test_passes.py has which, in any
    corpus."""
    texts = ["a\0", "b\0", "\u2581 b", *(f"text {number}" for number in range(30))]
    for number, own in enumerate(([*texts, "", None], [" \n", *texts[:3], "another", 7])):
        write_jsonl(tmp_path / "in" / os.fsdecode(b"caf\xe9-%d.jsonl" % number), ({"text": text} for text in own))
    config = write_config(tmp_path, [files_source("t", tmp_path / "in/*")], validation_share=0.5,
                          max_rejected_share=0.1)
    assert run(config) == 0
    result = {split: documents(config, split) for split in SPLITS}
    kept = [*((f"caf\\xe9-0.jsonl:{at}", text) for at, text in enumerate(texts, 1)), ("caf\\xe9-1.jsonl:5", "another")]
    assert sorted((document.id, document.text) for own in result.values() for document in own) == sorted(kept)
    counts = manifest_of(config, "shard", "a").counts
    assert (counts["documents_in"], counts["rejected"], counts["dropped"]) == (41, 2, {"duplicate": 3, "empty": 2})
    assert counts["documents_with_u2581"] == 1
    assert {split: len(own) for split, own in result.items()}.items() <= counts.items() and all(result.values())
    (tmp_path / "in" / os.fsdecode(b"caf\xe9-1.jsonl")).unlink()
    assert "t/caf\\xe9-1.jsonl is gone" in Run(load_config(config)).why("shard")


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
    one, other = (manifest_of(config, "shard", name) for name in ("a", "killed"))
    assert (one.outputs, one.counts, one.fingerprint) == (other.outputs, other.counts, other.fingerprint)
    killed = folder_of(config, "killed")
    assert not (killed / "staging").exists() and not list(killed.parent.rglob("*.tmp"))
