"""Stage 3, encode: each text shard becomes a token shard of the same name, BOS before and EOS after every document."""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: find the packages, and shadow no library with a file beside this one
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np

from pipeline.config.data import EncodeConfig
from pipeline.contract.entry import stage_main
from pipeline.contract.stage_work import Unit, Work
from pipeline.data.text_shards import read_shard, refuse_changed_shard, shard_records
from pipeline.data.token_shards import TokenShard, read_batch, write_shard
from pipeline.errors import UserError, listed
from pipeline.files import output_record
from pipeline.tokenization.base import Tokenizer, reads_back
from pipeline.tokenization.kinds import load_tokenizer, place, placed, token_dtype, vocabulary_record

PROVED_TEXTS = 16
"""Documents per shard whose tokens are decoded again and compared with the text: the first, the last, some between."""


def encode(work: Work) -> None:
    """The stage: one unit per text shard, then the counts of both sides compared."""
    shards, manifest = work.input("shard")
    tokenizer, _ = work.input("tokenizer")
    work.check(work.committed("tokenizer"))
    vocabulary = vocabulary_record(tokenizer)
    dtype = chosen_dtype(work.config.encode, vocabulary["size"])
    records = [record for split in ("train", "heldout") for record in shard_records(manifest, split)]
    work.say(f"{sum(record['text_bytes'] for record in records) / 1e6:.1f} MB in {len(records)} shards, "
             f"{vocabulary['kind']} vocabulary of {vocabulary['size']:,}, {dtype}")
    places = {"shards": place(shards, work.folder), "tokenizer": place(tokenizer, work.folder)}
    units = [Unit(_name(record).replace("/", "-"), {
        **places, "record": record, "sha256": vocabulary["sha256"], "dtype": dtype}) for record in records]
    outputs = [record["outputs"][0] for record in work.do_units("encode", units, encode_shard, "shards")]
    counts = counted(outputs)
    reconcile(counted(records), counts)
    total = counts["total"]
    work.say(f"{total['tokens']:,} tokens of {total['docs']:,} documents, "
             f"{total['text_bytes'] / max(1, total['tokens'] - 2 * total['docs']):.3f} bytes per token of text")
    work.commit(outputs, {**counts, "dtype": dtype, "vocab_size": vocabulary["size"],
                          "tokenizer_sha256": vocabulary["sha256"]}, verified=True)


def chosen_dtype(settings: EncodeConfig, vocab_size: int) -> str:
    """The type that tokens are stored in; UserError if the configured one cannot hold every id."""
    smallest = token_dtype(vocab_size)
    if settings.dtype == "uint16" and smallest != "uint16":
        raise UserError(f"encode.dtype uint16 holds ids up to 65535, but the vocabulary has {vocab_size}. "
                        f"Set encode.dtype to uint32 or auto.")
    return smallest if settings.dtype == "auto" else settings.dtype


def encode_shard(folder: Path, payload: dict[str, Any]) -> dict[str, Any]:
    """Unit of work: encode one text shard, read the result back, prove it."""
    source, path = payload["record"], folder / f"{_name(payload['record'])}.arrow"
    shards = placed(folder, payload["shards"])
    refuse_changed_shard(shards, source)
    tokenizer = _tokenizer(placed(folder, payload["tokenizer"]), payload["sha256"])
    tokens, text_bytes, keys, texts = [], [], [], {}
    proved = set(np.linspace(0, max(0, source["docs"] - 1), PROVED_TEXTS).astype(int).tolist())
    for number, document in enumerate(read_shard(shards, source)):
        ids = [tokenizer.bos_id, *tokenizer.encode(document.text), tokenizer.eos_id]
        tokens.append(np.array(ids, dtype=payload["dtype"]))
        text_bytes.append(len(document.text.encode()))
        keys.append(document.key)
        if number in proved:
            texts[number] = document.text
    content = write_shard(path, tokens, text_bytes, keys, dtype=payload["dtype"], metadata={
        "tokenizer_sha256": tokenizer.sha256, "vocab_size": str(tokenizer.size), "bos_id": str(tokenizer.bos_id),
        "eos_id": str(tokenizer.eos_id)})
    record = output_record(folder, path, split=source["split"], source=source["source"], **content,
                           input=source["path"], input_sha256=source["sha256"])
    prove(path, record, source, tokenizer, texts)
    return {"outputs": [record]}


def prove(path: Path, record: dict[str, Any], source: dict[str, Any], tokenizer: Tokenizer,
          texts: dict[int, str]) -> None:
    """Read a written shard as training will, and as Arrow does; UserError if it is not what was meant.

    Args:
        record: its output record.
        source: the text shard's record.
        texts: some of the documents' texts, by their number in the shard.
    """
    shard, batch = TokenShard(path, record), read_batch(path)
    tokens, offsets, problems = shard.tokens(0, shard.token_count), shard.read_offsets(), []
    starts, ends = offsets[:-1], offsets[1:] - 1
    if (shard.documents, record["text_bytes"]) != (source["docs"], source["text_bytes"]):
        problems.append(f"{shard.documents} documents of {record['text_bytes']} bytes of text, but the text shard has "
                        f"{source['docs']} of {source['text_bytes']}")
    if not np.array_equal(batch.column("tokens").values.to_numpy(), tokens):
        problems.append("Arrow reads other tokens than are at the recorded place in the file")
    if len(tokens) and tokens.max() >= tokenizer.size:
        problems.append(f"the id {tokens.max()} is outside the vocabulary of {tokenizer.size}")
    if not ((tokens[starts] == tokenizer.bos_id).all() and (tokens[ends] == tokenizer.eos_id).all()):
        problems.append("a document does not begin with BOS or does not end with EOS")
    edges = int(np.isin(tokens, [tokenizer.bos_id, tokenizer.eos_id]).sum())
    if edges != 2 * shard.documents:
        problems.append(f"{edges} BOS and EOS for {shard.documents} documents: some stand inside of documents")
    problems += [] if problems else [
        f"document {number} ({shard.document_key(number)}) does not decode to its text"
        for number, text in texts.items()
        if not reads_back(text, tokenizer.decode(shard.document_tokens(number)[1:-1].tolist()))]
    if problems:
        raise UserError(f"{path} is not a right encoding of {source['path']}, so it is not committed:\n"
                        f"{listed(problems)}\nIf it happens again, please report it; a failing disk or memory is the "
                        f"other possible cause.")


def counted(records: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Documents, text bytes and (of token shards) tokens: for each split and source, and in all."""
    splits: dict[str, dict[str, dict[str, int]]] = {}
    total: dict[str, int] = {}
    for record in records:
        own = splits.setdefault(record["split"], {}).setdefault(record["source"], {})
        for name in ("docs", "text_bytes", "tokens"):
            if name in record:
                own[name] = own.get(name, 0) + record[name]
                total[name] = total.get(name, 0) + record[name]
    return {"total": total, "splits": splits}


def reconcile(texts: dict[str, Any], tokens: dict[str, Any]) -> None:
    """UserError unless the token shards hold the documents and bytes of the text shards, source by source."""
    problems = [f"{split} {source}: {own[name]} {name} in the text shards, "
                f"{tokens['splits'].get(split, {}).get(source, {}).get(name, 0)} in the token shards"
                for split, sources in texts["splits"].items() for source, own in sources.items()
                for name in ("docs", "text_bytes")
                if tokens["splits"].get(split, {}).get(source, {}).get(name) != own[name]]
    if problems:
        raise UserError(f"The token shards do not hold what the text shards hold:\n{listed(problems)}\n"
                        f"Run encode with --force; if that does not help, run shard with --force.")


@lru_cache(maxsize=1)
def _tokenizer(folder: Path, sha256: str) -> Tokenizer:
    tokenizer = load_tokenizer(folder)
    if tokenizer.sha256 != sha256:
        raise UserError(f"The vocabulary in {folder} was replaced while encode was running. Run encode again.")
    return tokenizer


def _name(record: dict[str, Any]) -> str:
    return Path(record["path"]).with_suffix("").as_posix()


if __name__ == "__main__":
    sys.exit(stage_main("encode", encode))
