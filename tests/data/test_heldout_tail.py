"""The end of each source's text as the held-out split (`shard.heldout_rule: tail`): exact to the character.

Which documents and parts of documents make the splits, test_passes.py compares for any corpus.
"""

import random

import pytest

from pipeline.contract.manifest import read_manifest
from tests.data.source_files import write_jsonl
from tests.stages.test_shard import documents, files_source, folder_of, run, write_config


def tail_config(place, text, share=0.1):
    """A source of one text."""
    (place / "f.txt").write_text(text, newline="")
    return write_config(place, [files_source("s", place / "f.txt")], heldout_rule="tail", heldout_share=share)


def test_one_text_is_cut_where_nanogpt_cuts_it(tmp_path, capsys):
    text = "".join(random.Random(4).choices("abc \n\r\tüß\u2581漢😀", k=12_347))
    config = tail_config(tmp_path, text)
    assert run(config) == 0
    assert "1 documents in + 1 by cutting in two = 1 train + 1 held out" in capsys.readouterr().out
    [train], [heldout] = documents(config, "train"), documents(config, "heldout")
    assert (train.text, heldout.text) == (text[:int(len(text) * 0.9)], text[int(len(text) * 0.9):])
    assert (train.id, heldout.id) == ("f.txt[:11112]", "f.txt[11112:]")
    counts = read_manifest(folder_of(config)).counts
    for own in (counts, counts["sources"]["s"]):
        assert (own["documents_in"], own["cut_in_two"], own["train"], own["heldout"]) == (1, 1, 1, 1)
    assert counts["text_bytes"] == {"train": len(train.text.encode()), "heldout": len(heldout.text.encode())}
    assert counts["documents_with_u2581"] == 2
    assert run(config, "shard.heldout_rule=hash") == 2
    assert 'shard.heldout_rule: "tail" -> "hash"' in capsys.readouterr().err


def test_both_parts_keep_what_belongs_to_the_document(tmp_path):
    write_jsonl(tmp_path / "f.jsonl", [{"text": letter * 10, "name": letter, "stars": 3} for letter in "abc"])
    source = files_source("s", tmp_path / "f.jsonl", id_field="name", meta_fields=["stars"])
    config = write_config(tmp_path, [source], heldout_rule="tail", heldout_share=0.5)
    assert run(config) == 0
    found = [document for split in ("train", "heldout") for document in documents(config, split)]
    assert [(document.id, document.text, document.meta) for document in found] == [
        (name, text, {"stars": 3}) for name, text in (
            ("a", "a" * 10), ("b[:5]", "b" * 5), ("b[5:]", "b" * 5), ("c", "c" * 10))]
    assert len({document.key for document in found}) == 4  # the two parts are equal texts


@pytest.mark.parametrize(("share", "text", "told"), [
    (0.9, "x" * 99 + "y", 10), (0.1, "x" * 99 + "y", 90), (0.07, "x" * 99 + "y", 93),
    (0.999, "x" * 99 + "y", "all of the 1 documents fell into the held-out split"),
    (0.1, " \n", "source s yields no documents: 1 read, of which 1 empty")])
def test_the_share_is_taken_as_it_is_written(tmp_path, capsys, share, text, told):
    config = tail_config(tmp_path, text, share)
    assert run(config) == (2 if isinstance(told, str) else 0)
    if isinstance(told, str):
        assert told in capsys.readouterr().err
    else:
        [train], [heldout] = documents(config, "train"), documents(config, "heldout")
        assert (len(train.text), len(heldout.text)) == (told, 100 - told)


def test_a_single_document_is_told_of_the_rule(tmp_path, capsys):
    config = tail_config(tmp_path, "the only document")
    assert run(config, "shard.heldout_rule=hash") == 2
    assert "shard.heldout_rule: tail" in capsys.readouterr().err
    assert run(config, "name=b") == 0
