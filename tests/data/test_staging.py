"""The end of each source's text as the held-out split (`shard.heldout_rule: tail`): exact to the character."""

import json
import random
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.contract.manifest import read_manifest
from tests.stages.test_shard import (
    documents,
    files_source,
    folder_of,
    hashes,
    kill_at,
    make_corpus,
    run,
    start,
    write_config,
)
from tests.waiting import HANG_S


def tail_config(place, sources, share=0.1, **shard_settings):
    return write_config(place, sources, heldout_rule="tail", heldout_share=share, **shard_settings)


def joined(config, split, source, name="a"):
    return "".join(document.text for document in documents(config, split, name) if document.source == source)


def test_one_text_is_cut_where_nanogpt_cuts_it(tmp_path, capsys):
    text = "".join(random.Random(4).choices("abc \n\r\tüß\u2581漢😀", k=12_347))
    (tmp_path / "play.txt").write_text(text, newline="")
    config = tail_config(tmp_path, [files_source("s", tmp_path / "play.txt")])
    assert run(config) == 0
    assert "1 documents in + 1 by cutting in two = 1 train + 1 held out" in capsys.readouterr().out
    [train], [heldout] = documents(config, "train"), documents(config, "heldout")
    assert (train.text, heldout.text) == (text[:int(len(text) * 0.9)], text[int(len(text) * 0.9):])
    assert (train.id, heldout.id) == ("play.txt[:11112]", "play.txt[11112:]")
    counts = read_manifest(folder_of(config)).counts
    assert (counts["documents_in"], counts["cut_in_two"], counts["train"], counts["heldout"]) == (1, 1, 1, 1)
    assert counts["text_bytes"] == {"train": len(train.text.encode()), "heldout": len(heldout.text.encode())}
    assert counts["documents_with_u2581"] == 2


def test_whole_documents_are_held_out_where_the_border_falls_between_them(tmp_path):
    (tmp_path / "f.txt").write_text("|".join(f"document {number}" for number in range(10)))
    config = tail_config(tmp_path, [files_source("s", tmp_path / "f.txt", separator="|")], share=0.3)
    assert run(config) == 0
    assert [document.text for document in documents(config, "heldout")] == ["document 7", "document 8", "document 9"]
    assert read_manifest(folder_of(config)).counts["cut_in_two"] == 0


def test_both_parts_keep_what_belongs_to_the_document(tmp_path):
    lines = [json.dumps({"text": letter * 10, "name": letter, "stars": 3}) for letter in "abc"]
    (tmp_path / "f.jsonl").write_text("\n".join(lines))
    source = files_source("s", tmp_path / "f.jsonl", id_field="name", meta_fields=["stars"])
    config = tail_config(tmp_path, [source], share=0.5)
    assert run(config) == 0
    found = [(document.id, document.text, document.meta) for split in ("train", "heldout")
             for document in documents(config, split)]
    assert found == [(name, text, {"stars": 3}) for name, text in (
        ("a", "a" * 10), ("b[:5]", "b" * 5), ("b[5:]", "b" * 5), ("c", "c" * 10))]
    keys = [document.key for split in ("train", "heldout") for document in documents(config, split)]
    assert len(set(keys)) == 4  # the two parts are equal texts


@pytest.mark.parametrize("share, trained", [(0.9, 10), (0.1, 90), (0.07, 93), (0.999, 0)])
def test_the_share_is_taken_as_it_is_written(tmp_path, capsys, share, trained):
    (tmp_path / "f.txt").write_text("x" * 99 + "y")
    config = tail_config(tmp_path, [files_source("s", tmp_path / "f.txt")], share=share)
    if not trained:
        assert run(config) == 2
        assert "all of the 1 documents fell into the held-out split" in capsys.readouterr().err
        return
    assert run(config) == 0
    assert len(joined(config, "train", "s")) == trained and len(joined(config, "heldout", "s")) == 100 - trained


def test_bytes_are_the_same_for_any_number_of_processes_and_after_kills(tmp_path):
    make_corpus(tmp_path / "in")
    sources = [files_source(name, tmp_path / "in" / name / "*.jsonl") for name in ("web", "books")]
    config = tail_config(tmp_path, sources, shard_mb=0.04)
    assert run(config) == 0
    counts = read_manifest(folder_of(config)).counts
    assert counts["documents_in"] == 1800 and counts["cut_in_two"] == 2 and counts["dropped"]["duplicate"] > 20
    for phase, goal in (("read", 3), ("write", 2), ("write", 12)):
        kill_at(lambda: start(config, "name=b", "launch.processes=2"), folder_of(config, "b"), f"units/{phase}", goal)
    process = start(config, "name=b", "launch.processes=3")
    output, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, output
    assert hashes(folder_of(config, "b")) == hashes(folder_of(config))
    one, other = read_manifest(folder_of(config)), read_manifest(folder_of(config, "b"))
    assert (one.outputs, one.counts, one.fingerprint) == (other.outputs, other.counts, other.fingerprint)


def test_a_lost_shard_is_made_again_alone(tmp_path):
    (tmp_path / "f.txt").write_text("\n".join(f"line {number}" for number in range(500)))
    config = tail_config(tmp_path, [files_source("s", tmp_path / "f.txt")])
    assert run(config) == 0
    before = hashes(folder_of(config))
    (folder_of(config) / "heldout/s-00000.tar").unlink()
    kept = (folder_of(config) / "train/s-00000.tar").stat().st_mtime_ns
    assert run(config) == 0
    assert hashes(folder_of(config)) == before
    assert (folder_of(config) / "train/s-00000.tar").stat().st_mtime_ns == kept


def test_another_rule_is_another_corpus(tmp_path, capsys):
    (tmp_path / "f.txt").write_text("|".join(f"document {number}" for number in range(40)))
    config = tail_config(tmp_path, [files_source("s", tmp_path / "f.txt", separator="|")])
    assert run(config) == 0
    assert run(config, "shard.heldout_rule=hash") == 2
    assert 'shard.heldout_rule: "tail" -> "hash"' in capsys.readouterr().err


def test_a_single_document_is_told_of_the_rule(tmp_path, capsys):
    (tmp_path / "f.txt").write_text("the only document")
    config = tail_config(tmp_path, [files_source("s", tmp_path / "f.txt")])
    assert run(config, "shard.heldout_rule=hash") == 2
    assert "shard.heldout_rule: tail" in capsys.readouterr().err
    assert run(config) == 0


def test_nothing_to_cut_is_explained(tmp_path, capsys):
    (tmp_path / "f.txt").write_text(" \n")
    assert run(tail_config(tmp_path, [files_source("s", tmp_path / "f.txt")])) == 2
    assert "source s yields no documents: 1 read, of which 1 empty" in capsys.readouterr().err


TEXTS = st.lists(st.one_of(st.sampled_from(["", " \n", "same", "other", "ab"]), st.text(max_size=9)), max_size=12)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(files=st.lists(st.tuples(st.sampled_from("ab"), TEXTS), max_size=5), drop=st.booleans(),
       share=st.sampled_from(["0.1", "0.5", "0.25", "0.9"]))
def test_the_parts_of_each_source_are_its_text(tmp_path_factory, files, drop, share):
    """Every kept character is once in the shards, in order, and the border is where the share says."""
    place = tmp_path_factory.mktemp("any")
    files = [("a", ["the first text of a"]), ("b", ["the first text of b"]), *files]
    kept, seen = {"a": [], "b": []}, set()
    for number, (source, texts) in enumerate(files):
        (place / source).mkdir(exist_ok=True)
        (place / source / f"{number}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for source, texts in sorted(files, key=lambda entry: entry[0]):
        for text in texts:
            if text.strip() and not (drop and text in seen):
                kept[source].append(text)
                seen.add(text)
    config = tail_config(place, [files_source(name, place / name / "*.jsonl") for name in "ab"], share=float(share),
                         shard_mb=1e-5, drop_duplicates=drop)
    assert run(config) == 0
    counts = read_manifest(folder_of(config)).counts["sources"]
    for source, texts in kept.items():
        whole = "".join(texts)
        border = int(len(whole) * (1 - Fraction(share)))
        assert joined(config, "train", source) == whole[:border]
        assert joined(config, "heldout", source) == whole[border:]
        ends = {sum(map(len, texts[:number])) for number in range(len(texts) + 1)}
        own = counts[source]
        assert own["cut_in_two"] == (border not in ends)
        assert own["train"] + own["heldout"] == len(texts) + own["cut_in_two"]
        assert own["documents_in"] == sum(len(part) for name, part in files if name == source)
    every = [document for split in ("train", "heldout") for document in documents(config, split)]
    assert len({document.key for document in every}) == len(every)
