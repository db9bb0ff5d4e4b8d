"""The shard stage's passes between reading and writing, on digests alone: rows a second and memory of each process.

    python -m benchmarks.planning_at_scale --documents 200000000 --folder /scratch/planning
    python -m benchmarks.planning_at_scale --components 100000000 --graph near --folder /scratch/planning

The first stages the indexes of so many documents (49 bytes each, no texts; a quarter of them drawn from few, a
hundredth all one page) and sorts, matches, decides and plans them, each unit in a process of its own, whose peak memory
the kernel says. It takes 80 bytes a document on the disk. The second labels the components of so many edges, 16 bytes
each, of a graph: `near`, from a random document to one some hundred after it, of 10 times as many documents; `pairs`,
of any two of as many documents: one component holds most; `tens`, stars of ten over the whole corpus, of all documents.
The folder must not exist, and goes at the end.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.config.data import FilesSource, ShardConfig
from pipeline.contract.stage_work import Unit
from pipeline.data.planning.components import label_components, labels_path
from pipeline.data.planning.layout import layout
from pipeline.data.planning.passes import decide
from pipeline.data.planning.runs import DIGEST, write_links
from pipeline.data.reading import INDEX, staged
from pipeline.files import atomic_file

UNIT_DOCUMENTS = 500_000
EQUAL = 0.25
BYTES = 4000


def main() -> None:
    """Run one of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=0)
    parser.add_argument("--components", type=int, default=0, metavar="EDGES")
    parser.add_argument("--graph", choices=["near", "pairs", "tens"], default="near")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=1)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True)  # refuses one that exists, since it is removed at the end
    try:
        if asked.documents:
            plan(asked.folder, asked.documents, asked.processes)
        if asked.components:
            join_components(asked.folder, asked.components, asked.graph)
    finally:
        shutil.rmtree(asked.folder)


class Work:
    """`do_units` of a stage that keeps no records: every unit in a new process."""

    def __init__(self, folder: Path, documents: int, processes: int) -> None:
        self.folder, self.documents, self.processes = folder, documents, processes

    def do_units(self, phase: str, units: list[Unit], function: Callable[[Path, Any], dict[str, Any]],
                 unit_word: str = "units") -> list[dict[str, Any]]:
        """Do all units, and say what it took."""
        begin = time.monotonic()
        with ProcessPoolExecutor(self.processes, max_tasks_per_child=1) as pool:
            futures = [pool.submit(measured, function, self.folder, unit.payload) for unit in units]
            done = [future.result() for future in futures]
        if units:
            wall = time.monotonic() - begin
            print(f"{phase:<11} {len(units):>5} {unit_word:<10} {wall:>7.1f} s  {self.documents / wall / 1e6:>6.2f} M "
                  f"documents/s  {max(peak for _, peak in done):>7.0f} MB a process at most", flush=True)
        return [record for record, _ in done]


def measured(function: Callable[[Path, Any], dict[str, Any]], folder: Path,
             payload: Any) -> tuple[dict[str, Any], float]:
    """A unit's record, and this process's peak memory in MB."""
    return function(folder, payload), peak_mb()


def peak_mb() -> float:
    """The most memory that this process held so far; getrusage would count what its parent held when it began."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) / 1e3


def plan(folder: Path, documents: int, processes: int) -> None:
    """Stage, sort, match, decide and plan."""
    units = -(-documents // UNIT_DOCUMENTS)
    names, read = [f"web-{unit:05d}" for unit in range(units)], []
    for unit, name in enumerate(names):
        count = min(UNIT_DOCUMENTS, documents - unit * UNIT_DOCUMENTS)
        stage(folder, name, unit, count, documents)
        read.append({"documents": count, "outputs": [{"path": f"{name}{ending}", "sha256": name}
                                                     for ending in (".documents", ".npy")]})
    print(f"{documents:,} documents in {units:,} units", flush=True)
    config = ShardConfig(sources=[FilesSource(kind="files", name="web", paths=["none"])], shard_mb=256.0)
    begin = time.monotonic()
    decided = decide(Work(folder, documents, processes), config, names, [0] * units, read)  # type: ignore[arg-type]
    dropped = int(decided.summary.dropped.sum())
    kept = sum(pieces.total("documents") for split in decided.pieces for pieces in split)
    assert dropped + kept == documents, (dropped, kept)
    print(f"{kept:,} kept, {dropped:,} equal to others, {len(decided.payloads):,} shards planned; "
          f"{time.monotonic() - begin:.1f} s in all, {peak_mb():.0f} MB in the process that plans", flush=True)


def stage(folder: Path, name: str, unit: int, count: int, documents: int) -> None:
    """The index of a unit: digests are those of numbers, a quarter of which are drawn again and again."""
    rng = np.random.default_rng(unit)
    numbers = np.arange(count, dtype=np.uint64) + np.uint64(unit * UNIT_DOCUMENTS)
    again = rng.random(count) < EQUAL
    numbers[again] = rng.integers(0, max(1, documents // 10), int(again.sum()), dtype=np.uint64)
    numbers[rng.random(count) < 0.01] = 0
    index = np.zeros(count, INDEX)
    index["high"], index["low"] = scrambled(numbers), scrambled(numbers + np.uint64(2**40))
    index["text_bytes"] = index["characters"] = index["length"] = rng.integers(1, 2 * BYTES, count)
    with atomic_file(staged(folder, name, ".npy")) as file:
        np.save(file, index)


def scrambled(numbers: np.ndarray) -> np.ndarray:
    """Numbers that look like digests (SplitMix64)."""
    numbers = numbers * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers = (numbers ^ (numbers >> np.uint64(shift))) * np.uint64(factor)
    return numbers ^ (numbers >> np.uint64(31))


def join_components(folder: Path, edges: int, graph: str) -> None:
    """Label the components of one of the graphs."""
    documents = {"near": 10 * edges, "pairs": edges, "tens": edges // 9 * 10}[graph]
    unit = 4_000_000
    counts = [min(unit, documents - start) for start in range(0, documents, unit)]
    plan = layout([f"web-{number:05d}" for number in range(len(counts))], [0] * len(counts), counts, bands=1)
    plan.write(folder)
    names = [*plan.group_names, *(f"partition-{partition:06d}" for partition in range(plan.partitions))]
    for number, name in enumerate(names):
        ends = edges_of(graph, np.arange(edges * number // len(names), edges * (number + 1) // len(names)), documents)
        write_links(folder, plan, DIGEST + 1, name, np.maximum(*ends), np.minimum(*ends))
    begin = time.monotonic()
    with ProcessPoolExecutor(1, max_tasks_per_child=1) as pool:
        _, peak = pool.submit(measured, label_components, folder, {}).result()
    wall = time.monotonic() - begin
    labels = np.memmap(labels_path(folder), "<u8", "r")
    others = sum(int((labels[start:start + unit] != np.arange(start, min(start + unit, documents))).sum())
                 for start in range(0, documents, unit))
    print(f"components  {edges:,} edges of {documents:,} documents, of which {others:,} are like an earlier one: "
          f"{wall:.1f} s, {edges / wall / 1e6:.2f} M edges/s, {peak:.0f} MB")


def edges_of(graph: str, edges: np.ndarray, documents: int) -> tuple[np.ndarray, np.ndarray]:
    """Both ends of the edges of these numbers."""
    rng = np.random.default_rng(edges[:1])
    if graph == "tens":
        tenth, star, ray = documents // 10, edges // 9, edges % 9 + 1
        return star % tenth, (star * 7919 + ray * 104_729) % tenth + ray * tenth
    one = rng.integers(0, documents, len(edges))
    if graph == "pairs":
        return one, rng.integers(0, documents, len(edges))
    return one, np.minimum(one + rng.geometric(1e-2, len(edges)), documents - 1)


if __name__ == "__main__":
    sys.exit(main())
