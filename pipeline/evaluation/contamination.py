"""How much of each item of a task stands in the training text, and the scores with and without those items.

A text is normalised (Unicode NFKC, case folded) and read as words, runs of letters and digits; what is between them
does not count. An item is its question and right answer (of a text to be predicted, the text); wrong choices and
few-shot examples do not belong to it. Its share is that of its n-grams of words that occur inside some training
document: n is N = 13 (Brown et al., Language Models are Few-Shot Learners, 2020, appendix C), for an item of fewer
words their number; one of fewer than LEAST words says nothing and is not judged. An item is dirty if its share is above
DIRTY.

The index is of the items, so its memory does not grow with the corpus, which is read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from drover.pipeline.contract.manifest import Manifest
from drover.pipeline.data.filters.item_index import ItemIndex
from drover.pipeline.data.text_shards import read_shard, shard_records
from drover.pipeline.evaluation.paired import scored
from drover.pipeline.parallel.ranks import Ranks

N = 13
LEAST = 5
DIRTY = 0.5


def shares_in_training_text(texts: Sequence[str], folder: Path, manifest: Manifest,
                            ranks: Ranks) -> list[float | None]:
    """Of each text the share of its n-grams in the training documents of a shard stage; each rank reads its part of the
    shards."""
    index = ItemIndex(texts, N, LEAST)
    met = np.zeros(index.places, bool)
    for record in shard_records(manifest, "train")[ranks.rank::ranks.world]:
        for document in read_shard(folder, record):
            met[index.places_in(document.text)] = True
    return index.shares(np.logical_or.reduce(ranks.gather(met)))


def clean_and_dirty(per_item: dict[str, Any], shares: Sequence[float | None]) -> dict[str, Any]:
    """The scores of a task's clean and dirty items, beside how many of each there are.

    per_item: as `items.of_items` has it. shares: of its items, in order. A part without items has no scores.
    """
    judged = {"clean": [share is not None and share <= DIRTY for share in shares],
              "dirty": [share is not None and share > DIRTY for share in shares]}
    found: dict[str, Any] = {"too_short": sum(share is None for share in shares)}
    for part, chosen in judged.items():
        own = {metric: [item if here else None for item, here in zip(items, chosen, strict=True)]
               for metric, items in per_item["metrics"].items()}
        found[part] = {"items": sum(chosen), "metrics": {
            metric: scored(items, per_item["forms"].get(metric, "ratio")) for metric, items in own.items()
            if any(items)}}
    return found
