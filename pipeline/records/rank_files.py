"""Where ranks write files of their own: of few ranks in one folder, of many in a folder for each node.

Thousands of ranks that create files in one folder at one moment wait for one another: the folder has one lock.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

FLAT = 512
"""So many ranks, and fewer, write into one folder."""


def node_folders(folder: Path, ranks: int, nodes: int) -> list[Path]:
    """The folders that the ranks of so many nodes write into."""
    return [folder] if ranks <= FLAT else [folder / f"node{node}" for node in range(nodes)]


def own_folder(folder: Path, ranks: int, environment: Mapping[str, str] = os.environ) -> Path:
    """The one that this rank writes into."""
    return folder if ranks <= FLAT else folder / f"node{environment.get('GROUP_RANK', '0')}"


def rank_files(folder: Path, pattern: str) -> Iterator[Path]:
    """The files of all ranks that have such a name."""
    yield from folder.glob(pattern)
    yield from folder.glob(f"node*/{pattern}")
