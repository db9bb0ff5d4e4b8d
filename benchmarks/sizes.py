"""Measure the passes of `shard` over a large corpus that is made as it is read, with duplicates that are known.

    python -m benchmarks.sizes --gb 1 --folder /tmp/sizes

A web server in a process of its own makes JSON lines from a seed, so the corpus takes no disk. Words follow Zipf's law;
half of the documents are longer than 2 KB. A tenth are exact copies of earlier ones, most often of the first ones. A
tenth are near-duplicates: 1%, 3% or 6% of their phrases of four words are others. For each pass the table has MB of the
corpus a second of processor time, the largest resident memory of a process, and the disk after it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measuring import print_machine, print_table
from drover.pipeline.core.console import Parser, Program
from drover.pipeline.core.errors import require
from drover.pipeline.core.files import read_json, write_text

DOCUMENTS = 8192
"""Of a part, a file of some 31 MB."""
PHRASES = 1 << 18
ORIGINAL, EXACT, NEAR = range(3)
CHANGED = (0.01, 0.03, 0.06)
"""Shares of phrases that are others in near-duplicates."""
POLL_S = 0.3
COLUMNS = {"core seconds": "{:,.1f}", "MB/s a core": "{:,.1f}", "GB of a process": "{:.2f}", "GB of disk": "{:.2f}",
           "files": "{:,}"}


def hashed(numbers: np.ndarray, salt: int) -> np.ndarray:
    """64 random bits for each number (splitmix64)."""
    mixed = (numbers.astype(np.uint64) + np.uint64(salt)) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


def shares(numbers: np.ndarray, salt: int) -> np.ndarray:
    """A random number from 0 to 1 for each number."""
    return (hashed(numbers, salt) >> np.uint64(11)) / 2.0**53


def kinds(numbers: np.ndarray) -> np.ndarray:
    """What documents are, by their numbers; the first is an original."""
    share = shares(numbers, 1)
    return np.where((share < 0.8) | (numbers == 0), ORIGINAL, np.where(share < 0.9, EXACT, NEAR))


def originals(numbers: np.ndarray) -> np.ndarray:
    """Of which original each document is made: itself, or an earlier one, of which the first are the most frequent."""
    result, open_ones = numbers.copy(), kinds(numbers) != ORIGINAL
    for attempt in range(100):
        found = (numbers * shares(numbers, 2 + attempt) ** 3).astype(np.int64)
        result[open_ones] = found[open_ones]
        open_ones &= kinds(result) != ORIGINAL
    return result


@lru_cache(1)
def phrases() -> tuple[list[bytes], np.ndarray]:
    """Phrases of four words, as JSON has them, some with the end of a line; and their lengths."""
    rng = np.random.default_rng(0)
    letters = np.frombuffer(b"etaoinshrdlucmfwypvbgkjqxz", np.uint8)
    ranks = np.arange(1, 100_001)
    words = [letters[(rng.random(2 + int(np.log2(rank) / 2.5) + rng.integers(3)) ** 2 * 26).astype(int)].tobytes()
             for rank in ranks]
    chosen = rng.choice(len(words), (PHRASES, 4), p=1 / (ranks + 2.7) / (1 / (ranks + 2.7)).sum())
    made = [b" ".join(words[word] for word in row) + (b"", b".\\n")[number % 8 == 0]
            for number, row in enumerate(chosen.tolist())]
    return made, np.array([*map(len, made)])


@dataclass(frozen=True)
class Part:
    """The documents of a part.

    chosen: numbers of phrases, one document after another. starts: where each begins. found: how many near-duplicates
    MinHash (14 bands of 8 rows, shingles of 5 words) is expected to link to their originals; others may link more.
    """

    first: int
    chosen: np.ndarray
    starts: np.ndarray
    size: int
    found: float

    def data(self) -> bytes:
        """Its JSON lines."""
        texts, ids = phrases()[0], self.chosen.tolist()
        ends = [*self.starts[1:].tolist(), len(ids)]
        return b"".join(b'{"id":"%010d","text":"%b"}\n' % (self.first + at, b" ".join(map(texts.__getitem__,
                                                                                          ids[start:end])))
                        for at, (start, end) in enumerate(zip(self.starts.tolist(), ends, strict=True)))


@lru_cache(8)
def part(number: int) -> Part:
    """A part by its number. Half of the documents have more than 90 phrases; at least 8, at most 4,000."""
    own = np.arange(number * DOCUMENTS, (number + 1) * DOCUMENTS)
    of, kind = originals(own), kinds(own)
    normal = np.sqrt(-2 * np.log(shares(of, 200) + 1e-12)) * np.cos(2 * np.pi * shares(of, 201))
    lengths = np.clip(90 * np.exp(0.9 * normal), 8, 4000).astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    places = np.arange(lengths.sum()) - np.repeat(starts, lengths)
    keys_of_original = (np.repeat(of, lengths) << 13) + places
    chosen = hashed(keys_of_original, 300) % np.uint64(PHRASES)
    near = np.repeat(kind == NEAR, lengths)
    key = (np.repeat(own, lengths)[near] << 13) + places[near]
    changed = shares(key, 400) < np.array(CHANGED)[own % 3].repeat(lengths)[near]
    chosen[near] = np.where(changed, hashed(key, 500) % np.uint64(PHRASES), chosen[near])
    # One more, so that none equals its original: which and where say the document's number.
    forced = starts + own // PHRASES % lengths
    chosen[forced[kind == NEAR]] = own[kind == NEAR].astype(np.uint64) % np.uint64(PHRASES)
    size = int(phrases()[1][chosen].sum() + (lengths - 1 + len('{"id":"0123456789","text":""}\n')).sum())
    equal = chosen == hashed(keys_of_original, 300) % np.uint64(PHRASES)
    pairs = np.add.reduceat(equal[:-1] & equal[1:] & (places[1:] > 0), starts)[kind == NEAR]  # have 4 shingles each
    similar = pairs / (2 * (lengths[kind == NEAR] - 1) - pairs)
    return Part(int(own[0]), chosen.astype(np.int64), starts, size, float((1 - (1 - similar**8) ** 14).sum()))


@lru_cache(6)
def content(number: int) -> bytes:
    """The bytes of a part."""
    return part(number).data()


class Handler(BaseHTTPRequestHandler):
    """Answers requests for `/part-NUMBER.jsonl`, with ranges."""

    protocol_version = "HTTP/1.1"
    made = threading.Lock()

    def log_message(self, *_: Any) -> None:
        """Nothing is said of a request."""

    def do_HEAD(self) -> None:
        """The size of a part."""
        self._answer(0, None)

    def do_GET(self) -> None:
        """A range of a part."""
        first, last = re.findall(r"\d+", self.headers["Range"])
        self._answer(int(first), int(last) + 1)

    def _answer(self, start: int, stop: int | None) -> None:
        number = int(self.path[-11:-6])
        with self.made:
            size = part(number).size
            data = b"" if stop is None else memoryview(content(number))[start:stop]
        self.send_response(200 if stop is None else 206)
        self.send_header("Content-Length", str(size if stop is None else len(data)))
        if stop is not None:
            self.send_header("Content-Range", f"bytes {start}-{start + len(data) - 1}/{size}")
        self.send_header("ETag", f'"{number}-{size}"')
        self.end_headers()
        self.wfile.write(data)


def serve(address: Any) -> None:
    """Serve the corpus, and send the server's port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    address.send(server.server_port)
    server.serve_forever()


def processes(root: int) -> Iterator[tuple[float, float]]:
    """Of a process and all below it: seconds of processor time, with those of ended children, and GB of memory."""
    below = defaultdict(list)
    about = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        own = int(path.parts[2])
        below[int(fields[1])].append(own)
        about[own] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK"), int(fields[21]) * 4096 / 1e9
    waiting = [root]
    while waiting:
        own = waiting.pop()
        waiting += below[own]
        if own in about:
            yield about[own]


def disk(folder: Path) -> Counter[str]:
    """GB that files take, by their kind, and how many there are."""
    result = Counter[str]()
    for place, _, names in os.walk(folder):
        inside = Path(place).relative_to(folder).parts
        for name in names:
            kind = inside[1] if inside[:1] == ("staging",) and inside[1:2] in (("runs",), ("links",)) else \
                Path(name).suffix if inside[:1] == ("staging",) else inside[0] if inside else "other"
            try:
                size = Path(place, name).stat().st_blocks * 512 / 1e9
            except OSError:
                continue
            result.update({kind: size, "GB of disk": size, "files": 1})
    return result


def add_options(parser: Parser) -> None:
    """The options."""
    parser.add_argument("--gb", type=float, default=1.0, help="of the corpus (%(default)s)")
    parser.add_argument("--folder", type=Path, required=True, help="for the run, which is deleted at the end")
    parser.add_argument("--processes", type=int, default=2, help="of the stage (%(default)s)")
    parser.add_argument("--shard-mb", type=int, default=128, help="of a shard and a unit of reading (%(default)s)")
    parser.add_argument("--lines", action="store_true", help="also remove frequent lines")


def work(options: argparse.Namespace) -> int:
    """Measure, and print tables."""
    require("benchmarks.sizes", "obstore")
    print_machine()
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("fork").Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    parts = max(1, round(options.gb * 1e9 / part(0).size))
    address = f"http://127.0.0.1:{ours.recv()}"
    config = {"name": "sizes", "runs_dir": str(options.folder), "launch": {"processes": options.processes},
              "shard": {"shard_mb": options.shard_mb, "near_duplicates": {"preset": "fineweb"},
                        "filters": [{"kind": "duplicate_lines"}] if options.lines else [],
                        "sources": [{"kind": "files", "name": "web", "id_field": "id",
                                     "paths": [f"{address}/part-{number:05d}.jsonl" for number in range(parts)]}]}}
    write_text(options.folder / "sizes.yaml", json.dumps(config))
    mb, expected = np.sum([(part(number).size / 1e6, part(number).found) for number in range(parts)], 0)
    rows, kinds_of_files, status = measured(options.folder, mb)
    print_table({**rows, "server": {"core seconds": sum(next(processes(int(server.pid or 0)))[:1])}}, COLUMNS)
    print(f"\n{mb:,.0f} MB in {parts:,} files. GB of disk by kind, each at its peak: "
          f"{', '.join(f'{kind} {size:.2f}' for kind, size in sorted(kinds_of_files.items()))}")
    if not status:
        counts = read_json(options.folder / "sizes/shard/manifest.json")["counts"]
        kind = kinds(np.arange(parts * DOCUMENTS))
        print(f"planted: {len(kind):,} documents, of which {(kind == EXACT).sum():,} are copies and "
              f"{(kind == NEAR).sum():,} near-duplicates, {expected:,.0f} of them by MinHash alone; found: "
              f"{counts['documents_in']:,} documents, {counts['dropped']}")
        shutil.rmtree(options.folder / "sizes")
    server.kill()
    return status


def measured(folder: Path, mb: float) -> tuple[dict[str, dict[str, float]], dict[str, float], int]:
    """A row for each pass, the peak of each kind of files, and the exit status."""
    rows = dict[str, dict[str, float]]()
    peaks = dict[str, float]()
    stage = subprocess.Popen([sys.executable, "-m", "drover.pipeline.shard", "--config", str(folder / "sizes.yaml")],
                             stdout=subprocess.PIPE, text=True)
    most = [0.0]
    over = threading.Event()

    def watch() -> None:
        rounds = 0
        while not over.wait(POLL_S):
            most[0] = max([most[0], *(memory for _, memory in processes(stage.pid))])
            rounds += 1
            if rounds % 30 == 0:
                for kind, size in disk(folder / "sizes/shard").items():
                    peaks[kind] = max(size, peaks.get(kind, 0))
    threading.Thread(target=watch, daemon=True).start()
    before = 0.0
    for line in stage.stdout or ():
        print(line, end="", flush=True)
        if (ended := re.match(r"shard +([\w-]+): ([\d,]+)/\2 ", line)) is not None:
            now = sum(seconds for seconds, _ in processes(stage.pid))
            there = disk(folder / "sizes/shard")
            for kind, size in there.items():
                peaks[kind] = max(size, peaks.get(kind, 0))
            rows[ended[1]] = {"core seconds": now - before, "MB/s a core": mb / max(now - before, 0.01),
                              "GB of a process": most[0], **{name: there[name] for name in ("GB of disk", "files")}}
            before, most[0] = now, 0.0
    over.set()
    rows["all"] = {"core seconds": before, "MB/s a core": mb / before,
                   "GB of a process": max(row["GB of a process"] for row in rows.values()),
                   "GB of disk": peaks["GB of disk"]}
    return rows, peaks, stage.wait()


main = Program("python -m benchmarks.sizes", __doc__, add_options, work)

if __name__ == "__main__":
    sys.exit(main())
