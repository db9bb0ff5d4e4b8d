"""Contamination: how much of each task item occurs in the training text, and the scores with and without such items.

A text is normalized (Unicode NFKC, case folded) and split into words, which are runs of letters and digits. An item is
its question and right answer, or the text to be predicted; wrong choices and few-shot examples are not part of it. Its
share is the share of its n-grams of words that occur inside some training document. n is N = 13 (Brown et al., Language
Models are Few-Shot Learners, 2020, appendix C); an item of fewer words is one n-gram. An item of fewer than LEAST words
is too short and is not classified. An item is dirty if its share is above DIRTY.

The index holds the items, so its memory does not grow with the corpus, which is read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

import numpy as np

from drover.pipeline.core.console import Watch
from drover.pipeline.data.item_index import ItemIndex
from drover.pipeline.evaluation.items import PerItem
from drover.pipeline.evaluation.scores import scored
from drover.pipeline.parallel.ranks import Ranks
from drover.pipeline.tokenization.texts import ShardTexts

N = 13
LEAST = 5
DIRTY = 0.5


def shares_in_training_text(texts: Sequence[str], shards: Sequence[ShardTexts], ranks: Ranks, watch: Watch = iter
                            ) -> list[float | None]:
    """The share of each text's n-grams in the documents of training shards, of which each rank reads a part."""
    index = ItemIndex(texts, N, LEAST)
    met = np.zeros(index.places, bool)
    for shard in watch(shards[ranks.rank::ranks.world]):
        for _, text in shard.read(None):
            met[index.places_in(text)] = True
    return index.shares(np.logical_or.reduce(ranks.gather(met)))


def clean_and_dirty(per_item: PerItem, shares: Sequence[float | None]) -> dict[str, Any]:
    """The scores and counts of a task's clean and dirty items.

    shares: of the items, in order. A part without items has no scores.
    """
    parts: dict[str, Any] = {"too_short": shares.count(None)}
    for name, is_dirty in (("clean", False), ("dirty", True)):
        chosen = [share is not None and (share > DIRTY) == is_dirty for share in shares]
        metrics = {metric: list(compress(items, chosen)) for metric, items in per_item["metrics"].items()}
        parts[name] = {"items": sum(chosen), "metrics": {
            metric: scored(items) for metric, items in metrics.items() if any(items)}}
    return parts
