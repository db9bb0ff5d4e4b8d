"""The training loader, beside rows of a mapped file: the least that any loader does for a batch."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from pipeline.config.phases import PhasePlan
from pipeline.config.training import TrainConfig
from pipeline.data.sampling.loader import Prefetcher, TrainingData
from pipeline.data.sampling.packing import Alone, make
from pipeline.data.shard_table import ShardTable, open_shards
from pipeline.data.token_shards import write_shard
from pipeline.files import output_record
from tools.bench_data.measuring import Row, alternated, rows_of, timed

LENGTH = 2048
"""Tokens of a sequence; a row has one more, for the last label."""
BATCHES = (8, 32)
TOKENS = 1 << 25
SHARDS = 8
DOCUMENT = 1000
"""Tokens of a document on average."""
SEQUENCES = 8192
"""That one measurement reads."""


def loader_section(texts: list[str], mb: float, place: Path, options: argparse.Namespace) -> list[Row]:
    """Batches by one loader thread, in millions of tokens a second, concatenated and packed by best fit, beside rows
    that are cut from one mapped file at random places, without labels' ends, documents and positions. Everything lies
    in the page cache; the texts are of no use here: made-up documents are of the lengths that web text has."""
    folder, flat = place / "encode", place / "tokens.bin"
    table = _made(folder, flat)
    shards = {"all": open_shards(folder, table, "train")}
    once = PhasePlan.of(TrainConfig(sequence_length=LENGTH, batch_tokens=LENGTH))
    packed = place / "plan", lambda planning: make(planning, Alone(), lambda text: print(f"  {text}"))
    ways = {"concatenated": TrainingData(shards, once, 0, None, 1 << 16),
            "packed": TrainingData(shards, once, 0, None, 1 << 16, packed)}
    print(f"  {ways['packed'].packings[0]}")
    rows = []
    for batch in BATCHES:
        beside = f"memmap rows, batches of {batch}"
        contenders = {f"{way}, batches of {batch}": timed(_loaded(data, batch)) for way, data in ways.items()}
        contenders[beside] = timed(_rows(flat, batch))
        for work in contenders.values():
            work()  # files are opened, and in memory
        found = rows_of("loader", alternated(contenders, options.rounds), SEQUENCES * (LENGTH + 1) / 1e6, beside)
        rows += [{**row, "unit": "M tokens"} for row in found]
    return rows


def _made(folder: Path, flat: Path) -> ShardTable:
    """Shards of made-up documents, and a file with their tokens one after another."""
    draw, records = np.random.default_rng(0), []
    with open(flat, "wb") as file:
        for number in range(SHARDS):
            count = TOKENS // SHARDS
            lengths = draw.lognormal(0, 1.2, count // DOCUMENT) + 0.01
            ends = np.floor(np.cumsum(lengths) / lengths.sum() * count).astype(np.int64)
            ends[-1] = count
            tokens = draw.integers(3, 1 << 16, count, dtype=np.uint16)
            path = folder / f"train/{number}.arrow"
            content = write_shard(path, tokens, np.concatenate([[0], ends]), [1] * len(ends), ["00" * 16] * len(ends),
                                  metadata={})
            records.append(output_record(folder, path, split="train", source="all", **content))
            file.write(tokens.tobytes())
    return ShardTable.of(records)


def _loaded(data: TrainingData, batch: int) -> Callable[[], None]:
    def read() -> None:
        ahead = Prefetcher(lambda step: data.batch(step * batch, batch), range(SEQUENCES // batch), threads=1)
        for _ in range(SEQUENCES // batch):
            ahead.next()
        ahead.close()
    return read


def _rows(flat: Path, batch: int) -> Callable[[], None]:
    def read() -> None:
        tokens, draw = np.memmap(flat, np.uint16, "r"), np.random.default_rng(1)
        for _ in range(SEQUENCES // batch):
            starts = draw.integers(0, len(tokens) - LENGTH - 1, batch)
            windows = torch.from_numpy(np.stack([tokens[at:at + LENGTH + 1] for at in starts]).astype(np.int64))
            windows[:, :-1], windows[:, 1:]
    return read
