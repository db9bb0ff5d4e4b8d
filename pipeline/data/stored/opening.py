"""How a configuration says that token shards are read from an object store: `train.tokens_from`, `train.cache`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from drover.pipeline.config.phases import in_phases
from drover.pipeline.config.tree import Config
from drover.pipeline.data.shard_table import NUMBERS, Shards, ShardTable, files_in, open_shards
from drover.pipeline.data.stored.shards import Settings, StoredTokens

if TYPE_CHECKING:
    from drover.pipeline.contract.input_check import Expected
    from drover.pipeline.contract.stage_work import Work

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
    return table.numbers[kinds[table.kind], NUMBERS.index("bytes")]


def shards_of(work: Work, split: str) -> dict[str, Shards]:
    """The token shards of a split by source, to read some of their documents: files, or where the configuration names a
    store, from there those that are no files here."""
    folder, manifest = work.input("encode")
    sources = work.config.shard.source_names
    table, files = ShardTable.of(manifest.outputs), files_in(folder)
    if (url := work.config.train.tokens_from) is None:
        return open_shards(table, split, sources, files)
    stored = StoredTokens(reading(work.config, table, url), table, [""] * len(table), work.say)
    return open_shards(table, split, sources, lambda row, record, whole: (
        files(row, record, whole) if (folder / record["path"]).is_file() else stored(row, record, whole)))


def validation_files(work: Work) -> list[Expected]:
    """The validation shards that are files, so that their content can be compared. A shard that is fetched whole from a
    store is compared when it is fetched."""
    folder, only_files = work.input("encode")[0], work.config.train.tokens_from is None
    return work.committed("encode", chosen=lambda record: record.get("split") == "validation" and (
        only_files or (folder / record["path"]).is_file()))
