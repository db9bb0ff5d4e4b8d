"""Which documents of a component are dropped, for which that stays: a greedy choice in the order of documents.

The first of a component stays. With `verify`, each next one is compared with those that stay so far, in order, and is
dropped for the first that is similar enough; else it stays too. `compare` does so with the first of each component, in
units of groups; it writes the others as a run. `resolve` reads a partition of these runs, in which components are
whole, and does the rest. Both write links, in the column after the bands.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from drover.pipeline.data.planning.components import read_labels
from drover.pipeline.data.planning.layout import Layout, StagedDocuments
from drover.pipeline.data.planning.runs import by_key, read_runs, write_links, write_run
from drover.pipeline.data.planning.signatures import mixed, words

NGRAM = 3
"""Words of the shingles by which two documents are compared."""
MOST_COMPARED = 256
"""Documents of a component that stay and that later ones are compared with, beside its first: they are in memory."""
Shingles = set[tuple[str, ...]]


def near_column(plan: Layout) -> int:
    """The column of near-duplicates that are dropped."""
    return plan.bands + 1


def compare_group(folder: Path, payload: dict[str, Any]) -> dict[str, Any]:
    """Compare the documents of a group with the first of their component. Returns the files as `outputs`.

    payload: `group`; `verify` (the least similarity, None: any will do); `words` (see `signatures.words`).
    """
    plan, group, least = Layout.read(folder), payload["group"], payload["verify"]
    begin, end = plan.bounds(group)
    labels, documents = read_labels(folder, plan, group), StagedDocuments(folder, plan)
    others = np.flatnonzero(labels != np.arange(begin, end))
    like, last = np.ones(len(others), bool), -1
    for at in np.argsort(labels[others], kind="stable").tolist() if least is not None else ():
        if (first := int(labels[others[at]])) != last:
            last, of_last = first, shingles(documents.document(first).text, payload["words"])
        own = shingles(documents.document(begin + int(others[at])).text, payload["words"])
        like[at] = similarity(own, of_last) >= least
    places, column = others[~like], near_column(plan)
    keys = mixed(labels[places].astype(np.uint64))  # mixed, so that partitions are about equal; still one a component
    order = by_key([keys])
    return {"outputs": [write_run(folder, plan, group, column, [keys[order]], places[order]),
                        write_links(folder, plan, column, plan.group_names[group], others[like] + begin,
                                    labels[others[like]])]}


def resolve_partition(folder: Path, payload: dict[str, Any]) -> dict[str, Any]:
    """Compare the documents of components that are not like the first with each other. Returns the file as `outputs`.

    payload: `partition`, and `verify` and `words` as above.
    """
    plan, column, partition = Layout.read(folder), payload["column"], payload["partition"]
    numbers, rows = read_runs(folder, plan, column, partition)
    documents, links = StagedDocuments(folder, plan), list[tuple[int, int]]()
    component, staying = None, list[tuple[int, Shingles]]()
    for at in by_key([rows["key"]], plan.last).tolist():
        if rows["key"][at] != component:
            component, staying = rows["key"][at], []
        number = int(numbers[at])
        own = shingles(documents.document(number).text, payload["words"])
        kept = next((other for other, its in staying if similarity(own, its) >= payload["verify"]), None)
        if kept is not None:
            links.append((number, kept))
        elif len(staying) < MOST_COMPARED:
            staying.append((number, own))
    others, kepts = np.array(links, np.int64).reshape(-1, 2).T
    return {"outputs": [write_links(folder, plan, column, f"partition-{partition:06d}", others, kepts)]}


def shingles(text: str, kind: str) -> Shingles:
    """All runs of `NGRAM` words of a text, or its words where they are fewer; kind: see `signatures.words`."""
    own = words(text, kind)
    return {tuple(own[place:place + NGRAM]) for place in range(max(1, len(own) - NGRAM + 1))}


def similarity(one: Shingles, other: Shingles) -> float:
    """Jaccard similarity of two sets, of which one holds something."""
    shared = len(one & other)
    return shared / (len(one) + len(other) - shared)
