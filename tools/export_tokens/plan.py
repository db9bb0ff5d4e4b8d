"""What an export is made of: the token shards of one split, in the order in which training lays them end to end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.contract.input_check import committed, refuse_changed
from pipeline.contract.run import Run
from pipeline.data.shard_table import NUMBERS, ShardTable
from pipeline.data.token_shards import TokenShard
from pipeline.errors import UserError
from pipeline.tokenization.kinds import vocabulary_record

BLOCK_TOKENS = 1 << 22
"""Tokens that a process holds at once."""
Region = tuple[str, int, int, str]
"""What was written of a file: its path in the export's folder, first byte, bytes, sha256 of them."""


@dataclass(frozen=True)
class Part:
    """One token shard's part of an export, as a process is given it.

    Attributes:
        number: of the part.
        shard: the token shard, which is opened where it is read; folder: the encode stage's.
        documents, tokens: how many of its source are before it in the export, and how many it gives itself.
        without_bos: whether documents lose the BOS at their beginning.
        bos: its id.
    """

    number: int
    folder: Path
    shard: TokenShard
    documents: tuple[int, int]
    tokens: tuple[int, int]
    without_bos: bool
    bos: int

    @property
    def source(self) -> str:
        """Name of the source."""
        return self.shard.source

    def refuse_changed(self) -> None:
        """UserError if the shard is not what the stage encode committed."""
        if not self.shard.path.is_file():
            raise UserError(f"{self.shard.path} is missing. Run --stage encode again: it makes only what is missing.")
        [expected] = committed(self.folder, [self.shard.record], "encode")
        refuse_changed(expected)

    def lengths(self) -> np.ndarray:
        """Tokens of each document, as they are exported."""
        return np.diff(self.shard.read_offsets()) - self.without_bos

    def blocks(self) -> Iterator[tuple[int, int, np.ndarray]]:
        """First document, the one after the last, and their tokens as they are exported, some at a time: whole
        documents, at least one.

        Raises:
            UserError: a document does not begin with BOS, which is to be left out.
        """
        offsets, first = self.shard.read_offsets(), 0
        while first < self.shard.documents:
            stop = max(first + 1, int(np.searchsorted(offsets, offsets[first] + BLOCK_TOKENS, "right")) - 1)
            tokens = self.shard.tokens(int(offsets[first]), int(offsets[stop]))
            if self.without_bos:
                starts = offsets[first:stop] - offsets[first]
                if (np.diff(offsets[first:stop + 1]) < 1).any() or (tokens[starts] != self.bos).any():
                    raise UserError(f"{self.shard.path} has a document that does not begin with BOS ({self.bos}), so "
                                    f"there is none to leave out. Run the command without --without-bos.")
                tokens = np.delete(tokens, starts)
            yield first, stop, tokens
            first = stop


@dataclass(frozen=True)
class Plan:
    """An export as it is asked for.

    Attributes:
        identity: what decides every byte of it; two plans with equal ones make equal exports.
        sources: of each source documents, tokens as exported, and UTF-8 bytes of text.
        dtype: of the ids as they are stored.
        vocabulary: what the tokenizer stage says of it.
    """

    folder: Path
    table: ShardTable
    rows: dict[str, np.ndarray]
    identity: dict[str, Any]
    sources: dict[str, dict[str, int]]
    dtype: str
    vocabulary: dict[str, Any]

    @property
    def without_bos(self) -> bool:
        """Whether documents lose their BOS."""
        return bool(self.identity["without_bos"])

    def __len__(self) -> int:
        return sum(map(len, self.rows.values()))

    def parts(self) -> Iterator[Part]:
        """The parts of all sources, in order."""
        number, docs, tokens = 0, NUMBERS.index("docs"), NUMBERS.index("tokens")
        for rows in self.rows.values():
            documents_before = tokens_before = 0
            for row in rows.tolist():
                record = self.table.record(row)
                own = int(self.table.numbers[row, docs])
                given = int(self.table.numbers[row, tokens]) - own * self.without_bos
                yield Part(number, self.folder, TokenShard(self.folder / record["path"], record),
                           (documents_before, own), (tokens_before, given), self.without_bos,
                           self.vocabulary["bos_id"])
                number, documents_before, tokens_before = number + 1, documents_before + own, tokens_before + given


def plan_of(run: Run, form: str, split: str, source: str | None, without_bos: bool) -> Plan:
    """What is to be exported.

    Raises:
        UserError: the run has no token shards, or none of this source and split.
    """
    manifest, folder = run.finished("encode"), run.stage_folder("encode")
    table, names = ShardTable.of(manifest.outputs), [own.name for own in run.config.shard.sources]
    if source is not None and source not in names:
        raise UserError(f"{run.folder} has no source {source}; it has {', '.join(names)}.")
    rows = {name: table.rows(split, name) for name in names if source in (None, name)}
    rows = {name: own for name, own in rows.items() if len(own)}
    if not rows:
        raise UserError(f"{folder} has no token shards of the split {split}{f' of {source}' if source else ''}.")
    vocabulary = vocabulary_record(run.stage_folder("tokenizer"))
    sources = {}
    for name, own in rows.items():
        counts = manifest.counts["splits"][split][name]
        found = dict(zip(NUMBERS, table.numbers[own].sum(axis=0).tolist(), strict=True))
        if (found["docs"], found["tokens"]) != (counts["docs"], counts["tokens"]):
            raise UserError(f"{folder}/manifest.json does not add up: its {split} shards of {name} have "
                            f"{found['docs']:,} documents, {found['tokens']:,} tokens, its counts say "
                            f"{counts['docs']:,}, {counts['tokens']:,}. Run --stage encode --force.")
        sources[name] = {"docs": counts["docs"], "tokens": counts["tokens"] - counts["docs"] * without_bos,
                         "text_bytes": counts["text_bytes"], "shards": len(own)}
    identity = {"format": form, "split": split, "sources": list(rows), "without_bos": without_bos,
                "encode": manifest.digest, "tokenizer_sha256": vocabulary["sha256"]}
    return Plan(folder, table, rows, identity, sources, str(manifest.counts["dtype"]), vocabulary)
