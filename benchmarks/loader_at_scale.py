"""What the loader costs one rank over very many shards: start-up, memory, files, samples a second.

    python -m benchmarks.loader_at_scale                                    120,000 shards, 15 x 10^12 tokens
    python -m benchmarks.loader_at_scale --encode runs/demo/encode --length 256    a run's own shards

The shards of the first are a few sparse files under 120,000 names: sizes, numbers of documents and where they begin are
true, tokens are zeros that take no room on the disk. What is read lies in the page cache, so nothing is said of disks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

MIXTURE = {"web": 0.7, "code": 0.2, "books": 0.1}
FILES = 12
"""That lie under the names of all shards."""
FIRST = 4096
"""Byte at which a made-up shard's offsets begin; keys and sizes of documents are not read, and share their place."""


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loader_at_scale", description=__doc__.splitlines()[0])
    parser.add_argument("--encode", type=Path, help="folder of an encode stage that is done; default: made-up shards")
    parser.add_argument("--shards", type=int, default=120_000)
    parser.add_argument("--tokens", type=float, default=15e12)
    parser.add_argument("--document", type=int, default=1000, help="tokens of a document on average")
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--length", type=int, default=8192, help="tokens of a sample")
    parser.add_argument("--batch", type=int, default=16, help="samples that are asked for at once")
    options = parser.parse_args(arguments)
    if options.encode is not None:
        measure(options.encode, options.samples, options.length, options.batch)
        return 0
    with tempfile.TemporaryDirectory(prefix="loader-") as folder:
        make(Path(folder), options.shards, int(options.tokens), options.document)
        sys.stdout.flush()
        if (child := os.fork()) == 0:  # a process of its own: memory for making them is not the loader's
            rest = [f"--{name}={getattr(options, name)}" for name in ("samples", "length", "batch")]
            os.execv(sys.executable, [sys.executable, "-m", "benchmarks.loader_at_scale", "--encode", folder, *rest])
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def make(folder: Path, shards: int, tokens: int, document: int) -> None:
    """An encode stage's folder with so many shards of so many tokens in all."""
    draw, kinds = np.random.default_rng(0), []
    (folder / "train").mkdir(parents=True)
    for number in range(FILES):
        count = tokens // shards + (number - FILES // 2) * 1000
        lengths = draw.lognormal(0, 1.5, count // document) + 0.01
        ends = np.floor(np.cumsum(lengths) / lengths.sum() * count).astype(np.int64)
        ends[-1] = count
        offsets = np.concatenate([[0], ends]).astype("<i8")
        path, data = folder / f"file-{number}", FIRST + offsets.nbytes
        with open(path, "wb") as file:
            file.seek(FIRST)
            file.write(offsets.tobytes())
            file.truncate(data + 4 * count)
        kinds.append((path, {"bytes": path.stat().st_size, "docs": len(ends), "tokens": count, "dtype": "uint32",
                             "text_bytes": 4 * count, "data_offset": data, "offsets_offset": FIRST,
                             "bytes_offset": FIRST, "keys_offset": FIRST}))
    sources, outputs = list(MIXTURE), []
    for number in range(shards):
        source, (path, facts) = sources[number % len(sources)], kinds[number % FILES]
        digest, name = hashlib.sha256(str(number).encode()).hexdigest(), f"{source}-{number:05d}"
        (folder / f"train/{name}.arrow").symlink_to(path)
        outputs.append({"path": f"train/{name}.arrow", "bytes": facts["bytes"], "sha256": digest, "split": "train",
                        "source": source, **facts, "input": f"train/{name}.tar", "input_sha256": digest})
    manifest = {"stage": "encode", "fingerprint": {}, "outputs": outputs, "counts": {"vocab_size": 128_256},
                "config_sha256": "", "format": 1}
    with open(folder / "manifest.json", "w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)


def measure(folder: Path, samples: int, length: int, batch: int) -> None:
    """Do what a rank does at its start, then read samples at random places, and say what it took."""
    import torch  # noqa: F401 - what a rank has in memory before

    from pipeline.contract.manifest import read_manifest
    from pipeline.data.sampling.loader import TrainingData
    from pipeline.data.shard_table import ShardTable, open_by_source

    opened = [0]

    def count(event: str, values: tuple[Any, ...]) -> None:
        opened[0] += event == "open" and str(values[0]).endswith(".arrow")
    sys.addaudithook(count)
    before, began = memory_mb(), time.process_time()
    manifest = read_manifest(folder)
    assert manifest is not None
    read, mib = time.process_time(), (folder / "manifest.json").stat().st_size / 2**20
    table = ShardTable.of(manifest.outputs)
    counts, sources = manifest.counts, list(dict.fromkeys(source for _, source, _ in table.kinds))
    del manifest
    columns = time.process_time()
    shards = open_by_source(folder, table, "train", sources)
    mixture = {source: MIXTURE.get(source, 1.0) for source in sources}
    data = TrainingData(shards, length, 0, mixture, table.content("train"), counts.get("vocab_size"))
    ready = time.process_time()
    size = table.numbers.nbytes + table.sha256.nbytes + sum(map(len, table.paths)) + table.kind.nbytes
    print(f"{len(table):,} shards, {table.numbers[:, 2].sum():,} tokens, {data.order.counts.sum():,} samples an epoch")
    print(f"start-up, seconds of one core: {ready - began:.2f}; on one rank {read - began:.2f} for a manifest of "
          f"{mib:.0f} MiB and {columns - read:.2f} for columns, on every rank {ready - columns:.2f}; {opened[0]} "
          f"shards opened")
    print(f"columns {size / 1e6:.1f} MB; memory {before:.0f} MB before, {memory_mb():.0f} MB after "
          f"(at most {memory_mb('VmHWM'):.0f} MB)")
    draw, done, seen = np.random.default_rng(1), 0, []
    began, wall = time.process_time(), time.perf_counter()
    while done < samples:
        data.batch_of(draw.integers(0, data.order.counts.sum(), min(batch, samples - done)))
        done += min(batch, samples - done)
        if done * 10 // samples > len(seen):
            seen.append(memory_mb())
    seconds, wall = time.process_time() - began, time.perf_counter() - wall
    print(f"memory at each tenth of the samples, MB: {' '.join(f'{value:.0f}' for value in seen)}")
    print(f"{done:,} samples of {length} tokens: {done / seconds:,.0f} a second of one core ({wall:.0f} s in all); "
          f"{opened[0]:,} opens; {len(list(Path('/proc/self/fd').iterdir()))} descriptors at the end")


def memory_mb(field: str = "VmRSS") -> float:
    """Memory of this process, in MB."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(text.partition(f"{field}:")[2].split()[0]) * 1024 / 1e6


if __name__ == "__main__":
    sys.exit(main())
