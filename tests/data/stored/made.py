"""Token shards in a store, made of numbers that a test can tell."""


import numpy as np

from drover.pipeline.data.shard_table import ShardTable
from drover.pipeline.data.stored.copying import copy_shards
from drover.pipeline.data.stored.shards import Settings, StoredTokens
from tests.conftest import slow
from tests.token_shards import write_shards

DOCUMENTS, LENGTH = 20, 50
CLOUDS = slow("seaweed", "google", "azurite")


def make_shards(folder, count=6):
    """Shards `train/text-00000.arrow` ... in a folder, each with ids of its own; their output records."""
    return write_shards(folder, [(f"train/text-{number:05d}", [
        np.arange(LENGTH) + 1000 * number + document for document in range(DOCUMENTS)]) for number in range(count)])


def stored(url, records, cache, *, shards=100, whole=True, say=print):
    """A reader of shards that are in the store, with room for so many of them."""
    limit = int(shards * max(record["bytes"] for record in records))
    return StoredTokens(Settings(url, cache, limit, whole), ShardTable.of(records), [""] * len(records), say)


def copy(folder, records, url):
    """Copy the shards; the URL."""
    copy_shards(folder, records, url)
    return url
