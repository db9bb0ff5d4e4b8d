"""Which documents of token shards are measured. Their tokens are read on access."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from drover.pipeline.data.token_shards import TokenShard

_CANDIDATE = np.dtype([("key", "S16"), ("shard", "i8"), ("place", "i8"), ("length", "i8")])
"""A document that may be measured: its key, where it is, its tokens."""


@dataclass(frozen=True)
class Chosen:
    """The documents of one source to measure on, in the order in which they lie in the shards.

    Attributes:
        shards, places: (documents,) each: in which token shard of the source one lies, and its number in it.
        lengths: tokens of each, BOS and EOS with them.
        text_bytes: UTF-8 bytes of the original text of each.
        of_documents, of_tokens: how many the source has in all.
    """

    shards: np.ndarray
    places: np.ndarray
    lengths: np.ndarray
    text_bytes: np.ndarray
    of_documents: int
    of_tokens: int

    def __len__(self) -> int:
        return len(self.places)


def choose(shards: Sequence[TokenShard], tokens: int | None) -> Chosen:
    """Documents of a source until they have `tokens` tokens (None: all); at least one, if there is any.

    They are taken in the order of their keys, which are hashes of the text. So the same documents are measured
    everywhere, and no part of the corpus is favoured. Shards are read one by one; only documents that may still be
    chosen are kept in memory.
    """
    taken = np.empty(0, _CANDIDATE)
    of_documents = 0
    of_tokens = 0
    for number, shard in enumerate(shards):
        candidates = np.empty(shard.documents, _CANDIDATE)
        candidates["shard"], candidates["place"] = number, np.arange(shard.documents)
        candidates["length"] = np.diff(shard.read_offsets())
        of_documents, of_tokens = of_documents + shard.documents, of_tokens + shard.token_count
        if tokens is not None:
            candidates["key"] = shard.keys(0, shard.documents).view("S16")
        taken = np.concatenate([taken, candidates])
        if tokens is not None:
            taken = taken[np.argsort(taken["key"], kind="stable")]
            taken = taken[np.cumsum(taken["length"]) - taken["length"] < tokens]
    taken = taken[np.lexsort((taken["place"], taken["shard"]))]
    text_bytes = [shards[one["shard"]].document_bytes(int(one["place"])) for one in taken]
    return Chosen(taken["shard"], taken["place"], taken["length"], np.asarray(text_bytes, np.int64), of_documents,
                  of_tokens)


class ChosenDocuments(Sequence[np.ndarray]):
    """The ids of chosen documents. Each is read from its shard on access; only the last one stays in memory."""

    def __init__(self, shards: Sequence[TokenShard], chosen: Chosen) -> None:
        self._shards = shards
        self._chosen = chosen
        self._last: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, number: Any) -> Any:
        """The document of this number, from BOS to EOS."""
        if self._last is None or self._last[0] != number:  # windows of a long document follow each other
            shard = self._shards[self._chosen.shards[number]]
            self._last = number, shard.document_tokens(int(self._chosen.places[number]))
        return self._last[1]
