"""The held-out documents as tokens and as the bytes they came from, and the training text's byte counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.contract.manifest import Manifest
from pipeline.data.shard_table import open_shards
from pipeline.data.text_shards import read_shard, shard_records
from pipeline.data.token_shards import TokenShard
from pipeline.errors import UserError
from pipeline.evaluation.baselines import byte_counts
from pipeline.evaluation.bits_per_byte import HeldoutText


def read_heldout(shard: tuple[Path, Manifest], encode: tuple[Path, Manifest], source: str,
                 tokens: int | None) -> tuple[HeldoutText, bytes]:
    """The first held-out documents of a source, up to `tokens` tokens (None: all): ids, and the joined text.

    Raises:
        UserError: the token shards are not of these text shards.
    """
    texts = _texts(*shard, source)
    documents: list[np.ndarray] = []
    joined: list[bytes] = []
    total = 0
    for token_shard in open_shards(encode[0], encode[1].outputs, "heldout", source):
        for number in range(token_shard.documents):
            if tokens is not None and total >= tokens:
                return HeldoutText(documents, sum(len(part) for part in joined)), b"".join(joined)
            joined.append(_check(next(texts, None), token_shard, number))
            documents.append(token_shard.document_tokens(number))
            total += len(documents[-1])
    if next(texts, None) is not None:
        raise UserError(f"{encode[0]} holds fewer held-out documents of {source} than {shard[0]}. "
                        f"Run the stage encode again with --force.")
    return HeldoutText(documents, sum(len(part) for part in joined)), b"".join(joined)


def _texts(folder: Path, manifest: Manifest, source: str) -> Iterator[tuple[str, bytes]]:
    """Key and text of each held-out document, in the order in which they were encoded."""
    for record in sorted(shard_records(manifest, "heldout", source), key=lambda record: str(record["path"])):
        for document in read_shard(folder, record):
            yield document.key, document.text.encode()


def _check(found: tuple[str, bytes] | None, shard: TokenShard, number: int) -> bytes:
    """The text, if these tokens were made of it: otherwise bits per byte would be of something else."""
    if found is None or (found[0], len(found[1])) != (shard.document_key(number), shard.document_bytes(number)):
        raise UserError(f"Document {number} of {shard.path} was made of another text "
                        f"({shard.document_key(number)}) than the text shards have there "
                        f"({found[0] if found else 'none'}). Run the stage encode again with --force.")
    return found[1]


def training_byte_counts(folder: Path, manifest: Manifest, max_bytes: int, rank: int, world: int) -> np.ndarray:
    """This rank's part of the byte counts of the training text: (256,) int64.

    Of each shard the first documents are read, until it has given its equal share of `max_bytes`.
    """
    records: list[dict[str, Any]] = shard_records(manifest, "train")
    share = max_bytes / max(1, len(records))
    counts = np.zeros(256, np.int64)
    for record in records[rank::world]:
        taken = 0
        for document in read_shard(folder, record):
            text = document.text.encode()
            counts += byte_counts(text)
            taken += len(text)
            if taken >= share:
                break
    return counts
