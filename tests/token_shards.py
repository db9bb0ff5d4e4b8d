"""Token shards made of documents that a test has in hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.data.token_shards import write_shard


def write_documents(path: Path, documents: Sequence[Any], text_bytes: Sequence[int], keys: Sequence[str], *,
                    dtype: str, metadata: dict[str, str]) -> dict[str, Any]:
    """`write_shard` of documents that are arrays or lists of ids each."""
    offsets = np.cumsum([0, *(len(ids) for ids in documents)], dtype=np.int64)
    tokens = np.concatenate([np.empty(0, dtype), *(np.asarray(ids, dtype) for ids in documents)])
    return write_shard(path, tokens, offsets, text_bytes, keys, metadata=metadata)
