"""How much of an item stands in the training text; tests/data/filters has the index that finds it."""

import random
from types import SimpleNamespace

from drover.pipeline.evaluation.contamination import DIRTY, LEAST, clean_and_dirty, shares_in_training_text
from drover.pipeline.tokenization.texts import ShardTexts

ALPHABET = [f"{letter}{number}" for letter in "abcdefgh" for number in range(60)]


def text_of(seed, count):
    """Words by chance: two texts of 20 share no sequence of 5."""
    return [random.Random(f"{seed}/{place}").choice(ALPHABET) for place in range(count)]


def shard_of(documents):
    """A shard with these documents, each a list of words."""
    return ShardTexts("", "s", 0, lambda only: (("", " ".join(words)) for words in documents))


def test_shares_are_of_what_single_training_documents_hold():
    """Not over the edge of a document. Each of two ranks reads some of the shards."""
    items = [text_of(f"item {number}", 20) for number in range(4)]
    items += [text_of("least", LEAST), text_of("short", LEAST - 1)]
    shards = [[text_of("filler", 60) + items[0], items[1][:10], items[1][10:]],
              [items[2][:15], items[2][:13], items[4] + items[5]]]  # 3 of its 8 n-grams of 13 words, one twice
    texts, shards = [" ".join(item) for item in items], [*map(shard_of, shards)]
    parts = []  # what each rank met, as it hands it in
    for rank in range(2):
        shares_in_training_text(texts, shards, SimpleNamespace(
            rank=rank, world=2, gather=lambda value: [parts.append(value), value][1:]))
    together = shares_in_training_text(texts, shards, SimpleNamespace(rank=0, world=2, gather=lambda value: parts))
    assert together == [1.0, 0.0, 3 / 8, 0.0, 1.0, None]


def test_clean_and_dirty_scores():
    items = {"metrics": {"acc": [None, None, (1.0, 1.0), (0.0, 1.0), None],
                         "bits_per_byte": [None, (6.0, 2.0), (2.0, 4.0), (4.0, 4.0), (9.0, 3.0)]}}
    result = clean_and_dirty(items, [1.0, DIRTY + 0.01, DIRTY, 0.0, None])
    assert result["dirty"] == {"items": 2, "metrics": {"bits_per_byte": {"value": 3.0, "stderr": None}}}
    clean = result["clean"]["metrics"]
    assert (clean["acc"]["value"], clean["bits_per_byte"]["value"]) == (0.5, 6 / 8)
    assert (result["clean"]["items"], result["too_short"]) == (2, 1)
