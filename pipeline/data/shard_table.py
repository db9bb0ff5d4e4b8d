"""What a manifest says of token shards, as columns, and the shards that are open now: both of bounded size.

A hundred thousand records as JSON are 150 MB of Python objects; as columns they are 20 MB, which one rank sends to all.
A shard becomes an object when it is read, and its file is opened then. The ones read last are kept, all others are
forgotten: neither descriptors nor memory grow with the number of shards that were read.
"""

from __future__ import annotations

import resource
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import numpy as np
from numpy.typing import NDArray

from drover.pipeline.contract.manifest import check_record
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Count
from drover.pipeline.data.token_shards import KEY_BYTES, TokenShard

NUMBERS = ("bytes", "docs", "tokens", "data_offset", "offsets_offset", "bytes_offset", "keys_offset")
"""Fields of an output record that are whole numbers, in the order of the columns."""
MOST_OPEN = 1024
"""Shards that are kept open; fewer where a process may have fewer files (`most_open`)."""
OFFSETS_BYTES = 1 << 26
"""Memory for the places at which documents begin, of all shards that are kept."""


def is_sha256(text: str) -> None:
    """ValueError unless this is a hash in hexadecimal digits."""
    if len(bytes.fromhex(text)) != 32:
        raise ValueError(f"{text[:70]!r} is no sha256")


def _beyond(numbers: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Of each record whether a column ends beyond the file. sizes: bytes of a token."""
    size, docs, tokens, *offsets = numbers.T
    counts = (tokens, docs + (docs > 0), docs, docs)
    return np.any([count > (size - offset) // item for offset, count, item in
                   zip(offsets, counts, (sizes, 8, 8, KEY_BYTES), strict=True)], axis=0)


class TokenRecord(TypedDict):
    """What of a shard's output record is read by."""

    path: str
    sha256: Annotated[str, is_sha256]
    split: str
    source: str
    dtype: Literal["uint16", "uint32"]
    bytes: Count
    docs: Count
    tokens: Count
    data_offset: Count
    offsets_offset: Count
    bytes_offset: Count
    keys_offset: Count


@dataclass(frozen=True)
class ShardTable:
    """The records of token shards, a row each, in the order in which the manifest has them.

    Attributes:
        numbers: (shards, 7) int64, `NUMBERS`.
        sha256: (shards, 32) uint8.
        paths: where each is inside the stage's folder.
        kind: (shards,) the row of `kinds`: what many shards share, (split, source, dtype).
    """

    numbers: NDArray[np.int64]
    sha256: NDArray[np.uint8]
    paths: list[str]
    kind: NDArray[np.int32]
    kinds: tuple[tuple[str, str, str], ...]

    @classmethod
    def of(cls, records: Sequence[dict[str, Any]]) -> ShardTable:
        """The output records of an encode stage as columns; UserError if a record contradicts itself."""
        for record in records:
            check_record(record, TokenRecord, "encode")
        numbers = np.array([[record[name] for name in NUMBERS] for record in records], np.int64)
        numbers = numbers.reshape(-1, len(NUMBERS))
        sizes = np.array([np.dtype(record["dtype"]).itemsize for record in records], np.int64)
        if (beyond := np.flatnonzero(_beyond(numbers, sizes))).size:
            raise UserError(f"The manifest of the stage encode is damaged: {records[beyond[0]]['path']} is too "
                            f"small for the documents that it lists. Run the stage again with --force.")
        digests = np.frombuffer(bytes.fromhex("".join(record["sha256"] for record in records)), np.uint8)
        shared = [(record["split"], record["source"], record["dtype"]) for record in records]
        kinds = {kind: number for number, kind in enumerate(dict.fromkeys(shared))}
        return cls(numbers, digests.reshape(-1, 32), [record["path"] for record in records],
                   np.array([kinds[kind] for kind in shared], np.int32), tuple(kinds))

    def __len__(self) -> int:
        return len(self.numbers)

    def digest(self, row: int) -> str:
        """Hex sha256 of the shard's file."""
        return self.sha256[row].tobytes().hex()

    def record(self, row: int) -> dict[str, Any]:
        """What the manifest says of a shard, as far as reading it needs that."""
        split, source, dtype = self.kinds[self.kind[row]]
        return {"path": self.paths[row], "sha256": self.digest(row), "split": split, "source": source, "dtype": dtype,
                **dict(zip(NUMBERS, self.numbers[row].tolist(), strict=True))}

    def rows(self, split: str, source: str | None = None) -> NDArray[np.int64]:
        """The shards of one split (and source), in the order of their paths."""
        chosen = np.array([kind[0] == split and source in (None, kind[1]) for kind in self.kinds], bool)
        result = np.flatnonzero(chosen[self.kind]).tolist()
        return np.array(sorted(result, key=self.paths.__getitem__), np.int64)

    def content(self, split: str) -> Iterator[list[str]]:
        """(path, sha256) of each shard of a split, in the manifest's order: what identifies the tokens."""
        chosen = [kind[0] == split for kind in self.kinds]
        digests = self.sha256.tobytes()
        return ([path, digests[32 * row:32 * row + 32].hex()]
                for row, (path, kind) in enumerate(zip(self.paths, self.kind.tolist(), strict=True)) if chosen[kind])


def most_open() -> int:
    """Shards that may be open at once: a quarter of the files that this process may have, `MOST_OPEN` at most."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_OPEN if soft == resource.RLIM_INFINITY else max(1, min(MOST_OPEN, soft // 4))


class OpenShards:
    """The shards of a table that were read last. Threads may share it.

    A shard that is forgotten while another thread reads it closes its file when that thread is done with it.

    Attributes:
        shard: gives the shard in a row of the table.
    """

    def __init__(self, table: ShardTable, folder: Path) -> None:
        self.table = table
        most = most_open()
        self._kept_offsets = OFFSETS_BYTES // max(1, min(most, len(table)))
        self.shard = lru_cache(most)(lambda row: TokenShard(folder / table.paths[row], table.record(row),
                                                            self._kept_offsets))


class Shards(Sequence[TokenShard]):
    """Some shards of a table, in order.

    Attributes:
        token_counts: (shards,) int64.
    """

    def __init__(self, opened: OpenShards, rows: NDArray[np.int64]) -> None:
        self.opened = opened
        self.rows = rows
        self.token_counts: NDArray[np.int64] = opened.table.numbers[rows, NUMBERS.index("tokens")]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.opened.shard(int(self.rows[index]))


def joined(parts: Sequence[Shards]) -> Shards:
    """Shards of one table, open together, one after another."""
    return Shards(parts[0].opened, np.concatenate([part.rows for part in parts]))


def open_shards(table: ShardTable, split: str, sources: Iterable[str], folder: Path) -> dict[str, Shards]:
    """The shards of a split by source, in the order of their paths, which are open together: all sources share what may
    be open. No file is touched before it is read."""
    opened = OpenShards(table, folder)
    return {source: Shards(opened, table.rows(split, source)) for source in sources}


def size_problems(folder: Path, table: ShardTable, rows: Iterable[int]) -> list[str]:
    """A sentence for each of these shards whose file is missing or has another size: one stat a shard."""
    problems = (TokenShard(folder / table.paths[row], table.record(row)).size_problem() for row in rows)
    return [problem for problem in problems if problem]
