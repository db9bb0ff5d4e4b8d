"""Token shards in a store, made of numbers that a test can tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drover.pipeline.data.shard_table import ShardTable
from drover.pipeline.data.stored.copying import copy_shards
from drover.pipeline.data.stored.shards import Settings, StoredTokens
from tests.token_shards import write_shards

DOCUMENTS, LENGTH = 20, 50
CLOUDS = [pytest.param(name, marks=pytest.mark.slow) for name in ("seaweed", "google", "azurite")]


def make_shards(folder: Path, count: int = 6) -> list[dict[str, Any]]:
    """Shards `train/text-00000.arrow` ... in a folder, each with ids of its own; their output records."""
    return write_shards(folder, [(f"train/text-{number:05d}", [
        np.arange(LENGTH) + 1000 * number + document for document in range(DOCUMENTS)]) for number in range(count)])


def stored(url: str, records: list[dict[str, Any]], cache: Path, *, shards: float = 100, whole: bool = True,
           say: Any = print) -> StoredTokens:
    """A reader of shards that are in the store, with room for so many of them."""
    limit = int(shards * max(record["bytes"] for record in records))
    return StoredTokens(Settings(url, cache, limit, whole), ShardTable.of(records), [""] * len(records), say)


def copy(folder: Path, records: list[dict[str, Any]], url: str) -> str:
    """Copy the shards; the URL."""
    copy_shards(folder, records, url)
    return url
