"""The stages shard and encode as commands, beside datatrove's tokenizer step."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from pipeline.contract.manifest import read_manifest
from pipeline.files import read_json
from tools.bench_data.measuring import Contender, Row, Taken, alternated, command, rows_of, version_of

PIECES = 4
"""Files that the corpus is cut into, so that two processes have something each."""
PROCESSES = 2
SHORT = "short"
"""The corpus of sixteen short documents, half of them held out."""
# Forked workers start faster than those of its default, and their processor time is counted with the command's.
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


def encode_section(texts: list[str], mb: float, place: Path, options: argparse.Namespace) -> list[Row]:
    """The stage encode with each encoder, over ranks and over the tokenizer.json that datatrove is given too."""
    _pieces(texts, place / "corpus")
    _pieces([text[:200] for text in texts[:16]], place / SHORT)
    bpe = ("tokenizer.kind=bpe", f"tokenizer.vocab_size={options.vocab}", f"tokenizer.train_mb={min(mb, 8)}")
    _make(place, "ranks", "corpus", *bpe)
    ready = ("tokenizer.kind=huggingface", f"tokenizer.path={place}/ranks/tokenizer/hf")
    _make(place, "json", "corpus", *ready)
    _make(place, "short-json", SHORT, *ready)
    _make(place, "short-ranks", SHORT, "tokenizer.kind=tiktoken", f"tokenizer.path={place}/ranks/tokenizer")
    encoders = ["reference", *(["fastokens"] if version_of("fastokens") else [])]
    kinds = {"ranks": bpe, "json": ready}
    contenders, short = {}, {}
    for run, settings in kinds.items():
        for encoder in encoders:
            name = f"ours, {'tiktoken ranks' if run == 'ranks' else 'tokenizer.json'}, {encoder}"
            contenders[name] = _encoding(place, run, "corpus", settings, encoder)
            own = settings if run == "json" else ("tokenizer.kind=tiktoken", f"tokenizer.path={place}/ranks/tokenizer")
            short[name] = _encoding(place, f"short-{run}", SHORT, own, encoder)
    if version_of("datatrove"):
        contenders["datatrove"] = _tokenizing(place, "corpus")
        short["datatrove"] = _tokenizing(place, SHORT)
    start = {name: min(taken, key=lambda one: one.wall) for name, taken in alternated(short, 2).items()}
    rows = rows_of("encode", alternated(contenders, options.rounds), mb, "datatrove", start)
    counted = {run: read_manifest(place / run / "encode") for run in kinds}
    total = {run: manifest.counts["total"] for run, manifest in counted.items() if manifest is not None}
    own, docs = total["json"]["tokens"], total["json"]["docs"]
    if "datatrove" not in contenders:
        print("  datatrove is left out: it is not installed")
    else:
        theirs = sum(path.stat().st_size for path in (place / "theirs-corpus").glob("*.ds")) // 2
        print(f"  tokens: ours {own - docs:,} with EOS alone, datatrove {theirs:,}"
              + ("" if own - docs == theirs else " (NOT equal)"))
        rows[-1] |= {"tokens": theirs, "our_tokens": own - docs}
    return rows


def shard_section(texts: list[str], mb: float, place: Path, options: argparse.Namespace) -> list[Row]:
    """The stage shard, by its own clock (the interpreter's start left out), with one process and with two."""
    _pieces(texts, place / "corpus")

    def stage(processes: int) -> Contender:
        def measure() -> Taken:
            taken = command(_stage("shard", place, "sharding", "corpus", "--force", f"launch.processes={processes}"))
            manifest = read_manifest(place / "sharding" / "shard")
            assert manifest is not None
            return Taken(manifest.wall_s, taken.cpu)
        return measure
    return rows_of("shard", alternated({"1 process": stage(1), "2 processes": stage(2)}, options.rounds), mb,
                   "1 process")


def _pieces(texts: list[str], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for number in range(PIECES):
        lines = [json.dumps({"text": text}) for text in texts[number::PIECES]]
        if lines:
            (folder / f"{number}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _stage(stage: str, place: Path, run: str, corpus: str, *settings: str) -> list[str]:
    config = place / f"{run}.yaml"
    source = {"kind": "files", "name": "text", "paths": [f"{place / corpus}/*.jsonl"]}
    config.write_text(json.dumps({"name": run, "runs_dir": str(place), "launch": {"processes": PROCESSES},
                                  "shard": {"shard_mb": 4, "sources": [source],
                                            "heldout_share": 0.5 if corpus == SHORT else 0.05}}))
    return [sys.executable, "-m", f"pipeline.{stage}", "--config", str(config), *settings]


def _make(place: Path, run: str, corpus: str, *settings: str) -> None:
    for stage in ("shard", "tokenizer"):
        command(_stage(stage, place, run, corpus, *settings))


def _encoding(place: Path, run: str, corpus: str, settings: Iterable[str], encoder: str) -> Contender:
    arguments = _stage("encode", place, run, corpus, *settings, "--force", f"encode.encoder={encoder}")
    return lambda: command(arguments)


def _tokenizing(place: Path, corpus: str) -> Contender:
    """datatrove's step with as many processes, each time into a new folder of logs: finished ones it would skip."""
    tokenizer = place / "ranks/tokenizer/hf/tokenizer.json"
    eos = read_json(tokenizer.with_name("tokenizer_config.json"))["eos_token"]

    def measure() -> Taken:
        with tempfile.TemporaryDirectory(dir=place) as logs:
            script = Path(logs) / "theirs.py"
            script.write_text(THEIRS.format(corpus=str(place / corpus), out=str(place / f"theirs-{corpus}"),
                                            tokenizer=str(tokenizer), eos=eos, processes=PROCESSES,
                                            logs=f"{logs}/logs"))
            return command([sys.executable, str(script)])
    return measure
