"""Run `shard` over a corpus of any size, with duplicates that are known.

    python -m benchmarks.sizes --files 28

A web server makes files of 36 MB as they are read, so that the corpus takes no disk; the run takes twice its size, in
TMPDIR. The words follow Zipf's law, and half of the documents have more than 2 KB. In each file but the first a tenth
of the documents are copies from an earlier one. Another tenth differ from such in 2% of their phrases, at least in one.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from argparse import Namespace
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np

from benchmarks.data import python
from drover.pipeline.core.console import Parser, Program
from drover.pipeline.core.files import read_json, write_text

DOCUMENTS = 10_000
"""Documents of a file."""
PHRASES = 1 << 18


@lru_cache
def phrases() -> np.ndarray:
    """Four words each, which are numbers: the most frequent is 1."""
    return np.array([b"%x %x %x %x" % (*four,) for four in np.random.default_rng(0).zipf(1.2, (PHRASES, 4)).tolist()])


def originals(number: int) -> list[np.ndarray]:
    """The phrases of the documents of a file, before copies take the place of some."""
    rng = np.random.default_rng(number)
    lengths = 8 + rng.lognormal(5.2, 0.9, DOCUMENTS).astype(int)
    return np.split(rng.integers(0, PHRASES, lengths.sum()), lengths.cumsum()[:-1])


@lru_cache(8)
def content(number: int) -> bytes:
    """JSON lines."""
    texts, rng = originals(number), np.random.default_rng([number, 1])
    if number:
        earlier = originals(int(rng.integers(number)))
        texts[::10] = earlier[2::10]  # those are originals in every file
        texts[1::10] = near = earlier[3::10]
        for text in near:
            text[::50] = rng.integers(PHRASES)
    return b"".join(b'{"text": "%b"}\n' % b" ".join(phrases()[text].tolist()) for text in texts)


class Handler(BaseHTTPRequestHandler):
    """Answers requests for a range of `/NUMBER.jsonl`, and for its size."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """A range, or with HEAD all but the content."""
        data = content(int(self.path[1:-6]))
        span = self.headers.get("Range", f"bytes=0-{len(data)}")[6:]
        first, last = map(int, span.split("-"))
        part = data[first:last + 1]
        self.wfile.write(b'HTTP/1.1 206 Partial Content\r\nETag: "%d"\r\nContent-Length: %d\r\nContent-Range: bytes '
                         b'%b/%d\r\n\r\n' % (len(data), len(part), span.encode(), len(data)))
        self.wfile.write(part if self.command == "GET" else b"")

    do_HEAD = do_GET  # noqa: N815 - as http.server calls it


def add_options(parser: Parser) -> None:
    """The options."""
    parser.add_argument("--files", type=int, default=28, help="of the corpus, 36 MB each (%(default)s)")


def work(options: Namespace) -> None:
    """Run the stage. Print what was planted and found, and the stage's processor time."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    paths = [f"http://127.0.0.1:{server.server_port}/{number}.jsonl" for number in range(options.files)]
    with tempfile.TemporaryDirectory() as folder:
        write_text(Path(folder, "run.yaml"), f"""
            {{name: run, runs_dir: {folder}, shard: {{near_duplicates: {{preset: fineweb}},
             sources: [{{kind: files, name: web, paths: {paths}}}]}}}}""")
        python("-m", "drover.pipeline.shard", "--config", f"{folder}/run.yaml")
        counts = read_json(Path(folder, "run/shard/manifest.json"))["counts"]
    print(f"1,000 copies and 1,000 near-duplicates in each of {options.files} files but the first, found: "
          f"{counts['dropped']}; {sum(os.times()[2:4]):.0f} s of processor time")


main = Program("python -m benchmarks.sizes", __doc__, add_options, work)

if __name__ == "__main__":
    sys.exit(main())
