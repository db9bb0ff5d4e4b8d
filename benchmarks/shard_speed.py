"""How fast one process reads files into staged documents, and writes and reads text shards; and two beside each other.

    python -m benchmarks.shard_speed                          40 MB a format, made up
    python -m benchmarks.shard_speed --beside ../before       the same with the code of another checkout, by turns

What is read and written lies in the page cache or goes through one fsync a file, so little is said of disks. Times are
of the processor, so that what else runs on the machine counts less; the last column is by the clock.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROUNDS = 3
FORMATS = ("jsonl", "txt", "parquet", "jsonl.gz")


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shard_speed", description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=40.0, help="text of each format")
    parser.add_argument("--beside", type=Path, help="another checkout, to be measured by turns with this one")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one is not None:
        print(json.dumps(measure(options.one[0], Path(options.one[1]))))
        return 0
    here = Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory(prefix="shard-speed-") as folder:
        make(Path(folder), options.megabytes * 1e6)
        print(f"{'':12}{'':18}{'CPU MB/s':>10}{'wall MB/s':>11}")
        for what in (*FORMATS, "write", "read shard"):
            for name, checkout in {"before": options.beside, "now": here}.items():
                if checkout is not None:
                    tell(what, name, [run(checkout, what, folder, 1) for _ in range(ROUNDS)])
            tell(what, "now, 2 processes", [run(here, what, folder, 2) for _ in range(ROUNDS)])
    return 0


def make(folder: Path, size: float) -> None:
    """The same texts in every format, lognormal in length."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    draw, texts, held = random.Random(0), list[str](), 0
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(5000)]
    words += ["na\u00efve", "\u20ac", "\u201cquoted\u201d"]
    while held < size:
        texts.append(" ".join(draw.choices(words, k=int(draw.lognormvariate(5.5, 1)) + 5)).replace(" ", "\n", 2))
        held += len(texts[-1])
    rows = [{"text": text, "id": f"page-{number}", "score": draw.random(), "language": "en"}
            for number, text in enumerate(texts)]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    (folder / "f.jsonl").write_bytes(lines)
    (folder / "f.jsonl.gz").write_bytes(gzip.compress(lines, 6))
    (folder / "f.txt").write_text("\n\n".join(texts))
    pq.write_table(pa.Table.from_pylist(rows), folder / "f.parquet", row_group_size=5000, compression="zstd")


def run(checkout: Path, what: str, folder: str, processes: int) -> list[dict[str, float]]:
    """One measurement in each of so many processes at a time."""
    command = [sys.executable, str(Path(__file__).resolve()), "--one", what, folder]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, cwd=checkout,
                                env={**os.environ, "PYTHONPATH": str(checkout)}) for _ in range(processes)]
    return [json.loads(process.communicate()[0]) for process in started]


def tell(what: str, name: str, rounds: list[list[dict[str, float]]]) -> None:
    """A line with the best round: text a second of all its processes together by the clock, of one by its processor."""
    processor = max(result["megabytes"] / result["cpu"] for results in rounds for result in results)
    clock = max(sum(result["megabytes"] / result["wall"] for result in results) for results in rounds)
    print(f"{what:12}{name:18}{processor:10.0f}{clock:11.0f}", flush=True)


def measure(what: str, folder: Path) -> dict[str, float]:
    """Seconds for one kind of work, the second time that it is done."""
    with tempfile.TemporaryDirectory(prefix="shard-speed-") as place:
        work = _writing(folder, Path(place)) if what == "write" else \
            _shard_reading(folder, Path(place)) if what == "read shard" else _reading(folder / f"f.{what}", Path(place))
        work()
        clock, processor = time.perf_counter(), time.process_time()
        size = work()
        return {"megabytes": size / 1e6, "cpu": time.process_time() - processor, "wall": time.perf_counter() - clock}


def _reading(path: Path, place: Path) -> Callable[[], int]:
    """Stage the file's documents; bytes of what is staged."""
    from pipeline.config.data import FilesSource, ShardConfig
    from pipeline.config.tree import Config
    from pipeline.data.sources import input_files, reading_units
    try:
        from pipeline.data.reading import stage_unit
    except ImportError:  # a checkout of before
        from pipeline.data.staging import stage_unit  # type: ignore[attr-defined, no-redef]
    separator = "\n\n" if path.suffix == ".txt" else None
    source = FilesSource(kind="files", name="s", paths=[str(path)], separator=separator)
    config = Config(shard=ShardConfig(sources=[source]))
    [(name, payload)] = reading_units(config.shard, input_files(config))
    if "files" in payload:
        payload = {"name": name, **payload, "sha256": [hashlib.sha256(path.read_bytes()).hexdigest()]}
    return lambda: int(stage_unit(place, payload)["outputs"][0]["bytes"])


def _members(folder: Path) -> list[tuple[str, bytes]]:
    from pipeline.data.documents import Document, digest, document_key, to_json
    rows = map(json.loads, (folder / "f.jsonl").read_bytes().splitlines())
    documents = [Document(row["text"], "s", row["id"], {}) for row in rows]
    return [(document_key(digest(document.text.encode())), to_json(document)) for document in documents]


def _writing(folder: Path, place: Path) -> Callable[[], int]:
    from pipeline.data.text_shards import write_members
    members = _members(folder)

    def work() -> int:
        write_members(place / "s.tar", members)
        return sum(len(member) for _, member in members)
    return work


def _shard_reading(folder: Path, place: Path) -> Callable[[], int]:
    from pipeline.data.documents import key_fits
    from pipeline.data.text_shards import read_documents
    size = _writing(folder, place)()

    def work() -> int:
        assert all(map(key_fits, read_documents(place / "s.tar"))), "a text has not the hash that its name says"
        return size
    return work


if __name__ == "__main__":
    sys.exit(main())
