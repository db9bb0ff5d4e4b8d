"""Measure how fast text becomes tokens, compared with datatrove.

    python -m benchmarks.data
    python -m benchmarks.data --files 'a*.py' --vocab 1024

The stages shard and encode, and datatrove's DocumentTokenizer with encode's tokenizer.json: commands of two processes,
so their start is included. They run one after the other: on a machine that does other work, repeat it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, run

from benchmarks.measuring import print_machine, print_table, seconds
from drover.pipeline.core.console import Parser, Program
from drover.pipeline.core.errors import require
from drover.pipeline.core.files import read_json, write_text

COLUMNS = {"MB/s": "{:.2f}", "of datatrove": "{:.2f}", "tokens, with EOS alone": "{:,}"}
# Forked workers start faster than its default ones.
THEIRS = """
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer

if __name__ == "__main__":
    LocalPipelineExecutor(pipeline=[
        JsonlReader({folder!r} + "/corpus", glob_pattern="*.jsonl"),
        DocumentTokenizer({folder!r} + "/theirs", {hf!r} + "/tokenizer.json", eos_token={eos!r},
                          shuffle_documents=False)],
        tasks=2, workers=2, start_method="fork", logging_dir={folder!r} + "/logs").run()
"""


def add_options(parser: Parser) -> None:
    """The options."""
    parser.add_argument("--files", default="*.py", metavar="PATTERN", help="of the standard library (%(default)s)")
    parser.add_argument("--vocab", type=int, default=16384, help="ids of the vocabulary (%(default)s)")


def work(options: argparse.Namespace) -> None:
    """Measure the stages and datatrove, and print a table."""
    require("benchmarks.data", "datatrove")
    print_machine()
    with tempfile.TemporaryDirectory(prefix="bench-data-") as folder:
        mb = write_corpus(Path(folder, "corpus"), options.files)
        config = {"name": "ours", "runs_dir": folder, "launch": {"processes": 2},
                  "tokenizer": {"kind": "bpe", "vocab_size": options.vocab, "train_mb": min(mb, 8)},
                  "shard": {"shard_mb": 4, "sources": [
                      {"kind": "files", "name": "text", "paths": [f"{folder}/corpus/*.jsonl"]}]}}
        write_text(Path(folder, "ours.yaml"), json.dumps(config))
        rates = {stage: mb / seconds(partial(python, "-m", f"drover.pipeline.{stage}", "--config",
                                             f"{folder}/ours.yaml")) for stage in ("shard", "tokenizer", "encode")}
        hf = Path(folder, "ours/tokenizer/hf")
        eos = read_json(hf / "tokenizer_config.json")["eos_token"]
        write_text(Path(folder, "theirs.py"), THEIRS.format(folder=folder, hf=str(hf), eos=eos))
        theirs = mb / seconds(partial(python, f"{folder}/theirs.py"))
        total = read_json(Path(folder, "ours/encode/manifest.json"))["counts"]["total"]
        print_table({
            "shard": {"MB/s": rates["shard"]},
            "encode": {"MB/s": rates["encode"], "of datatrove": rates["encode"] / theirs,
                       "tokens, with EOS alone": total["tokens"] - total["docs"]},  # datatrove adds no BOS
            "datatrove": {"MB/s": theirs, "tokens, with EOS alone": sum(
                path.stat().st_size // 2 for path in Path(folder, "theirs").glob("*.ds"))}}, COLUMNS)


def python(*arguments: str) -> None:
    """Run a program. CalledProcessError if it fails; its errors are printed."""
    run([sys.executable, *arguments], check=True, stdout=DEVNULL)


def write_corpus(folder: Path, pattern: str) -> float:
    """Write the different files of the standard library into two files, one for each process; the MB of text."""
    library = Path(json.__file__).parents[1]
    paths = [path for path in sorted(library.rglob(pattern)) if "site-packages" not in path.parts]
    texts = [*filter(str.strip, dict.fromkeys(path.read_text("utf-8", "replace") for path in paths))]
    for number in (0, 1):
        lines = [json.dumps({"text": text}) for text in texts[number::2]]
        write_text(folder / f"{number}.jsonl", "\n".join([*lines, ""]))
    return sum(len(text.encode()) for text in texts) / 1e6


main = Program("python -m benchmarks.data", __doc__, add_options, work)

if __name__ == "__main__":
    sys.exit(main())
