"""Which documents of a component are dropped, for which that stays: a greedy choice in the order of documents.

The first of a component stays. With `verify`, each next one is compared with those that stay so far, in order, and is
dropped for the first that is similar enough; else it stays too. A unit is a part of the components. It writes links, in
the column after the bands.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from drover.pipeline.data.planning.components import read_followers
from drover.pipeline.data.planning.layout import Layout, StagedDocuments
from drover.pipeline.data.planning.runs import LINK, write_links
from drover.pipeline.data.planning.signatures import words

NGRAM = 3
"""Words of the shingles by which two documents are compared."""
MOST_COMPARED = 256
"""Documents of a component that stay and that later ones are compared with, beside its first: they are in memory."""
Shingles = set[tuple[str, ...]]


def near_column(plan: Layout) -> int:
    """The column of near-duplicates that are dropped."""
    return plan.bands + 1


def resolve_partition(folder: Path, payload: dict[str, Any]) -> dict[str, Any]:
    """Choose in one part of the components. Returns the file as `outputs`.

    payload: `partition`; `verify` (the least similarity, None: any will do); `words` (see `signatures.words`).
    """
    plan, partition = Layout.read(folder), payload["partition"]
    links = read_followers(folder, plan, partition)
    if payload["verify"] is not None:
        links = _similar(StagedDocuments(folder, plan), links, payload["verify"], payload["words"])
    return {"outputs": [write_links(folder, plan, near_column(plan), plan.partition_names[partition], links["other"],
                                    links["kept"])]}


def _similar(documents: StagedDocuments, followers: np.ndarray, least: float, kind: str) -> np.ndarray:
    """Of followers, those that are dropped, and for which."""
    found, component, staying = list[tuple[int, int]](), None, list[tuple[int, Shingles]]()
    for number, first in followers.tolist():
        if first != component:
            component, staying = first, [(first, shingles(documents.document(first).text, kind))]
        own = shingles(documents.document(number).text, kind)
        kept = next((other for other, its in staying if similarity(own, its) >= least), None)
        if kept is not None:
            found.append((number, kept))
        elif len(staying) <= MOST_COMPARED:
            staying.append((number, own))
    return np.array(found, LINK)


def shingles(text: str, kind: str) -> Shingles:
    """All runs of `NGRAM` words of a text, or its words where they are fewer; kind: see `signatures.words`."""
    own = words(text, kind)
    return {tuple(own[place:place + NGRAM]) for place in range(max(1, len(own) - NGRAM + 1))}


def similarity(one: Shingles, other: Shingles) -> float:
    """Jaccard similarity of two sets, of which one holds something."""
    shared = len(one & other)
    return shared / (len(one) + len(other) - shared)
