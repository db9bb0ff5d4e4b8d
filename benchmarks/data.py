"""Measure how fast text becomes tokens, compared with datatrove.

Sections: encode (the stage with each encoder, and datatrove's DocumentTokenizer with the same tokenizer.json; two
processes each), shard (the stage with one process and with two). Stages are commands, so their start is included. If
datatrove is not installed, its rows are missing.
"""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measuring import (
    RATES,
    Record,
    Row,
    Taken,
    alternated,
    command,
    compared,
    positive,
)
from drover.pipeline.contract.manifest import Manifest, read_manifest
from drover.pipeline.core.errors import UserError, installed_version
from drover.pipeline.core.files import read_json

FILES = 4
"""Files of the corpus: enough for two processes."""
PROCESSES = 2
# Forked workers start faster than its default ones, and their CPU time counts for the command.
THEIRS = """
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer

if __name__ == "__main__":
    LocalPipelineExecutor(pipeline=[
        JsonlReader({corpus!r}, glob_pattern="*.jsonl"),
        DocumentTokenizer({out!r}, {tokenizer!r}, eos_token={eos!r}, shuffle_documents=False)],
        tasks={processes}, workers={processes}, logging_dir={logs!r}, start_method="fork").run()
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--mb", type=float, default=12.0, help="MB of text, of the standard library (%(default)s)")
    add("--vocab", type=positive, default=16384, help="ids of the vocabulary (%(default)s)")
    add("--only", default=",".join(SECTIONS), help="sections, by comma (%(default)s)")


def run(options: argparse.Namespace, record: Record) -> None:
    """Measure each section."""
    names = options.only.split(",")
    if unknown := sorted(set(names) - set(SECTIONS)):
        raise UserError(f"--only does not know {', '.join(unknown)}; the sections are {', '.join(SECTIONS)}.")
    texts = corpus(options.mb)
    record.facts |= {"text_mb": sum(len(text.encode()) for text in texts) / 1e6, "documents": len(texts)}
    with tempfile.TemporaryDirectory(prefix="bench-data-") as place:
        for name in names:
            record.add(name, RATES, *SECTIONS[name](texts, record.facts["text_mb"], Path(place), options))


def corpus(most_mb: float) -> list[str]:
    """Different texts with about `most_mb` MB in all: files of the standard library."""
    found, left = dict[str, None](), most_mb * 1e6
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if "site-packages" not in path.parts and text.strip() and text not in found:
            found[text] = None
            left -= len(text.encode())
        if left <= 0:
            break
    return list(found)


def encode(texts: list[str], mb: float, place: Path, options: argparse.Namespace) -> list[Row]:
    """The stage encode with each encoder, for tiktoken ranks and for the tokenizer.json that datatrove uses too."""
    bpe = ("tokenizer.kind=bpe", f"tokenizer.vocab_size={options.vocab}", f"tokenizer.train_mb={min(mb, 8)}")
    ready = ("tokenizer.kind=huggingface", f"tokenizer.path={place}/ranks/tokenizer/hf")
    kinds = {"ranks": ("tiktoken ranks", bpe), "json": ("tokenizer.json", ready)}
    contenders: dict[str, Callable[[], Taken]] = {}
    for name, (about, settings) in kinds.items():
        for stage in ("shard", "tokenizer"):
            command(_stage(stage, texts, place, name, *settings))
        for encoder in ("reference", *(["fastokens"] if installed_version("fastokens") else [])):
            contenders[f"ours, {about}, {encoder}"] = partial(
                command, _stage("encode", texts, place, name, *settings, "--force", f"encode.encoder={encoder}"))
    if installed_version("datatrove"):
        contenders["datatrove"] = partial(_tokenize, place)
    rows = compared(alternated(contenders, options.rounds), mb, "MB", "datatrove")
    if "datatrove" in contenders:
        total = _manifest(place / "json/encode").counts["total"]
        rows[-1] |= {"tokens": sum(path.stat().st_size for path in (place / "theirs").glob("*.ds")) // 2,
                     "our_tokens": total["tokens"] - total["docs"]}  # ours have BOS as well
        print(f"tokens with EOS alone: ours {rows[-1]['our_tokens']:,}, datatrove {rows[-1]['tokens']:,}")
    return rows


def shard(texts: list[str], mb: float, place: Path, options: argparse.Namespace) -> list[Row]:
    """The stage shard with one process and with two."""
    contenders = {name: partial(command, _stage("shard", texts, place, "sharding", "--force",
                                                f"launch.processes={count}"))
                  for count, name in ((1, "1 process"), (2, "2 processes"))}
    return compared(alternated(contenders, options.rounds), mb, "MB", "1 process")


def _stage(stage: str, texts: list[str], place: Path, run: str, *settings: str) -> list[str]:
    """Write the corpus, and return the command of a stage."""
    folder = place / "corpus"
    folder.mkdir(exist_ok=True)
    for number in range(FILES):
        (folder / f"{number}.jsonl").write_text("".join(f"{json.dumps({'text': text})}\n"
                                                        for text in texts[number::FILES]), encoding="utf-8")
    sources = [{"kind": "files", "name": "text", "paths": [f"{folder}/*.jsonl"]}]
    config = place / f"{run}.yaml"
    config.write_text(json.dumps({"name": run, "runs_dir": str(place), "launch": {"processes": PROCESSES},
                                  "shard": {"shard_mb": 4, "sources": sources, "validation_share": 0.05}}))
    return [sys.executable, "-m", f"drover.pipeline.{stage}", "--config", str(config), *settings]


def _manifest(folder: Path) -> Manifest:
    found = read_manifest(folder)
    assert found is not None, f"{folder} has no manifest, though the stage succeeded"
    return found


def _tokenize(place: Path) -> Any:
    """Run datatrove with as many processes, and new logs each time: it would skip finished tasks."""
    tokenizer = place / "ranks/tokenizer/hf/tokenizer.json"
    eos = read_json(tokenizer.with_name("tokenizer_config.json"))["eos_token"]
    with tempfile.TemporaryDirectory(dir=place) as logs:
        script = Path(logs) / "theirs.py"
        script.write_text(THEIRS.format(corpus=str(place / "corpus"), out=str(place / "theirs"), eos=eos,
                                        tokenizer=str(tokenizer), processes=PROCESSES, logs=f"{logs}/logs"))
        return command([sys.executable, str(script)])


SECTIONS: dict[str, Callable[..., list[Row]]] = {
    "encode": encode, "shard": shard}
