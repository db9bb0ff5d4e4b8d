"""Components as a dictionary of all documents that have an edge finds them, one edge after another: what the pass is
compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pipeline.data.planning.near import EDGE

LABEL = np.dtype([("place", "<u4"), ("kept", "<u8")])


def labels_in_memory(paths: list[Path], starts: list[int], keep: str) -> tuple[bytes, dict[str, Any]]:
    """The labels' file of these files of edges, and how many documents have an edge, in how many components."""
    chosen = max if keep == "last" else min
    above: dict[int, int] = {}

    def kept_of(document: int) -> int:
        way = []
        while above[document] != document:
            way.append(document)
            document = above[document]
        above.update(dict.fromkeys(way, document))
        return document

    for path in paths:
        for edge in np.fromfile(path, EDGE):
            roots = []
            for number in (int(edge["first"]), int(edge["other"])):
                above.setdefault(number, number)
                roots.append(kept_of(number))
            above.update(dict.fromkeys(roots, chosen(roots)))
    kept_of_all = {document: kept_of(document) for document in sorted(above)}
    groups: list[list[tuple[int, int]]] = [[] for _ in starts[1:]]
    for document, kept in kept_of_all.items():
        if kept != document:
            group = max(number for number, start in enumerate(starts[:-1]) if start <= document)
            groups[group].append((document - starts[group], kept))
    ends = np.cumsum([0, *map(len, groups)]).astype("<u8").tobytes()
    rows = np.array([row for group in groups for row in group], LABEL).tobytes()
    return ends + rows, {"nodes": len(above), "components": len(set(kept_of_all.values()))}
