"""Token shards in a store, made of numbers that a test can tell."""

import numpy as np

from tests.token_shards import write_shards

DOCUMENTS, LENGTH = 20, 50


def make_shards(folder):
    """Six shards `train/text-00000.arrow` ... in a folder, each with ids of its own; their output records."""
    return write_shards(folder, [(f"train/text-{number:05d}", [
        np.arange(LENGTH) + 1000 * number + document for document in range(DOCUMENTS)]) for number in range(6)])
