"""How a configuration says that token shards are read from an object store: `train.tokens_from`, `train.cache`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drover.pipeline.config.phases import in_phases
from drover.pipeline.config.tree import Config
from drover.pipeline.data.shard_table import NUMBERS, Opener, ShardTable
from drover.pipeline.data.stored.shards import Settings, StoredTokens
from drover.pipeline.data.token_shards import TokenShard

GB = 10**9


def reading(config: Config, table: ShardTable, url: str) -> Settings:
    """How shards are to be read from a store by this configuration."""
    cache = config.train.cache
    limit = int(cache.gb * GB)
    fits = int(used(config, table).sum()) <= limit
    return Settings(url, Path(cache.folder or tempfile.gettempdir()), limit,
                    cache.read == "shards" or (cache.read == "auto" and fits))


def used(config: Config, table: ShardTable) -> NDArray[np.int64]:
    """Bytes of each shard that is trained or measured on."""
    mixtures = [within.train.mixture for _, within in in_phases(config)]
    # What every phase leaves out; one without a mixture uses all.
    left_out = set.intersection(*({name for name, share in (mixture or {}).items() if share == 0}
                                  for mixture in mixtures))
    kinds = np.array([split == "validation" or source not in left_out for split, source, _ in table.kinds], bool)
    return table.numbers[kinds[table.kind], NUMBERS.index("bytes")] if len(table) else np.zeros(0, np.int64)


def opener_of(config: Config, folder: Path, table: ShardTable, say: Callable[[str], None]) -> Opener | None:
    """Opens shards of the encode stage in `folder` to read some of their documents: files if they are there, else from
    the store that the configuration names; None if it names none."""
    url = config.train.tokens_from
    if url is None:
        return None
    stored = StoredTokens(reading(config, table, url), table, [""] * len(table), say)

    def opened(row: int, record: dict[str, Any], whole: int) -> TokenShard:
        path = folder / record["path"]
        return TokenShard(path, record, whole) if path.is_file() else stored(row, record, whole)
    return opened


def validation_file(config: Config, folder: Path) -> Callable[[dict[str, Any]], bool]:
    """Whether a record is of a held-out shard that is a file in `folder`, so that its content can be compared there. A
    shard that is fetched whole from a store is compared when it is fetched."""
    stored = config.train.tokens_from is not None
    return lambda record: record.get("split") == "validation" and not (
        stored and not (folder / record["path"]).is_file())
