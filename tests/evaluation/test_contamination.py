"""Planted overlaps are found wherever they lie in the training text, and nothing else is."""

import math
import random
from types import SimpleNamespace

from drover.pipeline.contract.manifest import Manifest
from drover.pipeline.core.files import output_record
from drover.pipeline.data.comparable_words import comparable_words
from drover.pipeline.data.documents import Document, digest, document_key, to_json
from drover.pipeline.data.text_shards import write_members
from drover.pipeline.evaluation.contamination import (
    DIRTY,
    LEAST,
    clean_and_dirty,
    shares_in_training_text,
)

ALPHABET = [f"{letter}{number}" for letter in "abcdefgh" for number in range(60)]


def text_of(seed, count):
    """Words by chance: two texts of 20 share no sequence of 5."""
    return [random.Random(f"{seed}/{place}").choice(ALPHABET) for place in range(count)]


def corpus(folder, shards, held=()):
    """A shard stage's folder and manifest with these documents, each a list of words or a text."""
    records = []
    for number, documents in enumerate([*shards, *([held] if held else [])]):
        members = []
        for text in (text if isinstance(text, str) else " ".join(text) for text in documents):
            key = document_key(digest(text.encode()))
            members.append((key, to_json(Document(text, "s", key, {}))))
        split = "heldout" if number == len(shards) else "train"
        write_members(folder / f"{number}.tar", members)
        records.append(output_record(folder, folder / f"{number}.tar", split=split, source="s", docs=len(documents)))
    return folder, Manifest("shard", {}, records, {}, "")


def alone():
    return SimpleNamespace(rank=0, world=1, gather=lambda value: [value])


def shares(folder, shards, items, **more):
    return shares_in_training_text([" ".join(item) for item in items], *corpus(folder, shards, **more), alone())


def test_planted_items_are_found_at_every_edge(tmp_path):
    filler = [text_of(f"filler {number}", 60) for number in range(6)]
    items = [text_of(f"item {number}", 20) for number in range(8)]
    shards = [[items[0] + filler[0], filler[1] + items[1]],          # first words of a shard; last of a document
              [items[2], filler[2]],                                  # a whole document
              [filler[3], filler[4][:30] + items[3] + filler[4][30:]],  # inside of the last document of a shard
              [filler[5], items[4][:10], items[4][10:]],              # torn over two documents
              [items[5][:10]], [items[5][10:]],                       # torn over two shards
              [items[7][:15], items[7][:13]]]                         # 3 of its 8 n-grams of 13 words, one twice
    assert shares(tmp_path, shards, items) == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 3 / 8]


def test_held_out_text_does_not_count(tmp_path):
    item = text_of("item", 20)
    assert shares(tmp_path, [[text_of("other", 50)]], [item], held=[item]) == [0.0]


def test_short_items_are_whole_or_not_there(tmp_path):
    item, least, too_short = text_of("item", 7), text_of("least", LEAST), text_of("short", LEAST - 1)
    document = text_of("x", 5) + item + text_of("y", 5) + least + text_of("z", 5) + too_short
    assert shares(tmp_path / "a", [[document]], [item, least, too_short]) == [1.0, 1.0, None]
    assert shares(tmp_path / "b", [[[*item[:6], "other"]]], [item, least, []]) == [0.0, 0.0, None]


def test_punctuation_case_and_forms_of_letters_do_not_hide_a_copy(tmp_path):
    assert comparable_words("The ﬁrst, GRÖSSE_of it:\n 3.5") == ["the", "first", "grösse", "of", "it", "3", "5"]
    said = "To be, or not to be: that is the question; whether 'tis nobler in the mind."
    copied = "TO BE OR NOT TO BE -- THAT IS THE\nQUESTION: WHETHER ’TIS NOBLER IN THE MIND"
    assert shares(tmp_path, [[copied]], [said.split()]) == [1.0]


def test_ranks_share_the_shards_and_agree(tmp_path):
    items = [" ".join(text_of(f"item {number}", 16)) for number in range(4)]
    place = corpus(tmp_path, [[items[0]], [items[1]], [items[2]]])
    parts = []  # what each of two ranks met, as it hands it in
    for rank in range(2):
        shares_in_training_text(items, *place, SimpleNamespace(
            rank=rank, world=2, gather=lambda value: [parts.append(value), value][1:]))
    together = shares_in_training_text(items, *place, SimpleNamespace(rank=0, world=2, gather=lambda value: parts))
    assert together == [1.0, 1.0, 1.0, 0.0]


def test_clean_and_dirty_scores():
    items = {"forms": {"perplexity": "perplexity"},
             "metrics": {"perplexity": [None, None, (2.0, 2.0), (4.0, 2.0), None],
                         "acc": [(1.0, 1.0), (1.0, 1.0), (0.0, 1.0), (0.0, 1.0), (1.0, 1.0)],
                         "bits_per_byte": [None, (6.0, 2.0), (2.0, 4.0), (4.0, 4.0), (9.0, 3.0)]}}
    found = clean_and_dirty(items, [1.0, DIRTY + 0.01, DIRTY, 0.0, None])
    assert found["too_short"] == 1
    assert found["dirty"] == {"items": 2, "metrics": {"acc": {"value": 1.0, "stderr": 0.0},
                                                      "bits_per_byte": {"value": 3.0, "stderr": None}}}
    assert found["clean"]["metrics"]["perplexity"]["value"] == math.exp(6 / 4)
    assert found["clean"]["items"] == 2 and found["clean"]["metrics"]["bits_per_byte"]["value"] == 6 / 8
    assert clean_and_dirty(items, [0.0] * 5)["dirty"] == {"items": 0, "metrics": {}}
