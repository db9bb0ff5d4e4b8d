"""Stage 3, encode: tokenize each text shard into a token shard of the same name. Documents are between BOS and EOS."""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: find the packages, and let no file of this folder shadow a library
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from drover.pipeline.contract.workers import Task
from drover.pipeline.core.errors import UserError, installed_version, listed
from drover.pipeline.core.files import Record, output_record, read_json
from drover.pipeline.data.text_shards import TextRecord, read_texts, shard_name, shard_records
from drover.pipeline.data.token_shards import TokenShard, read_batch, write_shard
from drover.pipeline.tokenization.checking import admitted
from drover.pipeline.tokenization.files import place, placed, vocabulary_record
from drover.pipeline.tokenization.reporting import RARE, outliers, rare_counts, warnings
from drover.pipeline.tokenization.tokenizer import (
    NAME,
    EncoderError,
    FastEncoder,
    Tokenizer,
    load_tokenizer,
    one_thread,
    reads_back,
)
from drover.pipeline.tokenization.training import text_bytes

if TYPE_CHECKING:
    from drover.pipeline.config.data import EncodeConfig
    from drover.pipeline.contract.stage_work import Work

PROVED_TEXTS = 16
"""How many documents per shard are verified: the first, the last and some between. The reference encoder encodes them
again, and their ids are decoded and compared with the text."""
PROVED_BYTES = 200_000
PROVED_SHARE = 64
"""Fewer documents are verified if they are very long: the shortest, up to PROVED_BYTES or 1 / PROVED_SHARE of the
shard's text."""
COMPARED = 1_000_000
"""Characters of a document whose ids are compared."""
COUNTED = ("docs", "text_bytes", "tokens")
BATCH_BYTES = 2_000_000
"""Bytes of text that are encoded at once."""
Proved = dict[int, tuple[str, NDArray[np.uint32]]]
"""The documents of a shard to verify, by number: text, and ids without BOS and EOS."""


class ShardToEncode(TypedDict):
    """A text shard to encode: the places of the folders of shards and tokenizer, its record, the vocabulary's hash."""

    shards: str
    tokenizer: str
    record: TextRecord
    sha256: str
    dtype: str


def encode(work: Work) -> None:
    """Do one task per text shard, each of which compares its counts with those of the text, and commit."""
    shards, manifest = work.input("shard")
    tokenizer, made = work.input("tokenizer")
    work.check(work.committed("tokenizer"))
    vocabulary = vocabulary_record(tokenizer)
    dtype = chosen_dtype(work.config.encode, vocabulary["size"])
    validation = shard_records(manifest, "validation")
    records = [*shard_records(manifest, "train"), *validation]
    work.say(f"{text_bytes(records) / 1e6:.1f} MB in {len(records)} shards, "
             f"{vocabulary['kind']} vocabulary of {vocabulary['size']:,}, {dtype}")
    fast = admitted(work, tokenizer, made, shards, validation)
    tasks = [Task(shard_name(record).replace("/", "-"), ShardToEncode(
        shards=place(shards, work.folder), tokenizer=place(tokenizer, work.folder), record=record,
        sha256=vocabulary["sha256"], dtype=dtype)) for record in records]
    # The encoder is not part of a task's identity: all encoders make the same shards.
    done = work.run_pass("encode", tasks, partial(encode_shard, fast=fast), "shards")
    outputs = [record["outputs"][0] for record in done]
    counts = counted(outputs)
    total = counts["total"]
    work.say(f"{total['tokens']:,} tokens of {total['docs']:,} documents, "
             f"{total['text_bytes'] / max(1, total['tokens'] - 2 * total['docs']):.3f} bytes per token of text")
    strange = outliers(outputs, read_json(tokenizer / "report.json"))
    for text in warnings(strange):
        work.say(text)
    counts |= {"rare_ids": {**{name: sum(output[name] for output in outputs) for name in RARE}, "outliers": strange},
               "dtype": dtype, "vocab_size": vocabulary["size"], "tokenizer_sha256": vocabulary["sha256"],
               "encoders": _encoders(work, fast, done)}
    if (url := work.config.encode.copy_to) is not None:
        from drover.pipeline.data.remote_tokens import upload_shards

        work.say(f"{upload_shards(work.folder, outputs, url)} in {url}")
    work.commit(outputs, counts, verified=True)


def _encoders(work: Work, fast: bool, done: Sequence[Record]) -> Record:
    """The manifest's record of the encoder, and of how many shards each encoder has made. Prints a warning about shards
    in which the reference replaced the fast encoder."""
    fallbacks = [record for record in done if record["fallback"]]
    by_fast = sum(record["encoder"] == "fast" for record in done)
    if fallbacks:
        first = fallbacks[0]
        work.say(f"WARNING: {NAME} gave {first['fallback']} in {first['outputs'][0]['path']}: the reference encoded "
                 f"{len(fallbacks)} of {len(done)} shards. These shards are right. In the other shards only the "
                 f"verified documents are known to be right. To be sure, set encode.encoder to reference and run with "
                 f"--force. Please report it")
    return {"encoder": NAME if fast else "reference", "version": installed_version(NAME) if fast else None,
            "fast_shards": by_fast, "reference_shards": len(done) - by_fast, "fallback_shards": len(fallbacks)}


def chosen_dtype(settings: EncodeConfig, vocab_size: int) -> str:
    """The integer type of stored tokens; UserError if the configured one cannot hold every id."""
    from drover.pipeline.config.data import UINT16_IDS

    if settings.dtype == "auto":
        return "uint16" if vocab_size <= UINT16_IDS else "uint32"
    if settings.dtype == "uint16" and vocab_size > UINT16_IDS:
        raise UserError(f"encode.dtype uint16 holds ids up to 65535, but the vocabulary has {vocab_size}. "
                        f"Set encode.dtype to uint32 or auto.")
    return settings.dtype


def encode_shard(folder: Path, payload: ShardToEncode, fast: bool = False) -> Record:
    """Task: encode one text shard, read the result back and verify it.

    With `fast`, the fast encoder does it. If it gives other ids than the reference for the verified documents, the
    reference encodes the whole shard again, and `fallback` in the record has the reason.
    """
    source = payload["record"]
    path = folder / f"{shard_name(source)}.arrow"
    shards, vocabulary = placed(folder, payload["shards"]), placed(folder, payload["tokenizer"])
    reference = _tokenizer(vocabulary, payload["sha256"])
    problem = ""
    if fast:
        try:
            result = encoded(shards, source, _fast(reference, vocabulary), reference, payload["dtype"])
        except EncoderError as error:
            problem = str(error)
    if problem or not fast:
        try:
            result = encoded(shards, source, reference, reference, payload["dtype"])
        except EncoderError as error:
            raise UserError(f"{shards / source['path']}: the tokenizer's own batches give {error}. Please report "
                            f"it; it does not depend on encode.encoder.") from None
    content = write_shard(path, result.tokens, result.offsets, result.text_bytes, result.keys, metadata={
        "tokenizer_sha256": reference.sha256, "vocab_size": str(reference.size), "bos_id": str(reference.bos_id),
        "eos_id": str(reference.eos_id)})
    record = output_record(folder, path, split=source["split"], source=source["source"], **content,
                           **rare_counts(result.tokens, reference), input=source["path"],
                           input_sha256=source["sha256"])
    prove(path, record, source, reference, result.proved)
    return {"outputs": [record], "encoder": "reference" if problem or not fast else "fast", "fallback": problem}


@dataclass
class Encoded:
    """A shard's documents as ids.

    tokens: with BOS and EOS. offsets: where each document begins, and where the last one ends. proved: the documents to
    verify, by number.
    """

    tokens: NDArray[Any]
    offsets: NDArray[np.int64]
    text_bytes: list[int]
    keys: list[str]
    proved: Proved


def encoded(shards: Path, source: TextRecord, encoder: Tokenizer, reference: Tokenizer,
            dtype: str) -> Encoded:
    """The documents of a text shard. EncoderError if the encoder fails, or gives other ids than the reference for one
    of those to verify.

    Of a very long document the beginning is compared, since the reference takes more than a hundred bytes of memory for
    each character.
    """
    chosen = np.linspace(0, max(0, source["docs"] - 1), PROVED_TEXTS).astype(int).tolist()
    edges = np.array([reference.bos_id, reference.eos_id], dtype)
    tokens = list[NDArray[Any]]()
    lengths = [np.zeros(1, np.int64)]
    sizes = list[int]()
    keys = list[str]()
    proved = Proved()
    for batch in read_texts(shards, source, BATCH_BYTES):
        ids, offsets = encoder.encode_flat(batch.texts)
        for number in chosen:
            if 0 <= (at := number - len(keys)) < len(batch.texts):
                proved[number] = batch.texts[at], ids[offsets[at]:offsets[at + 1]].copy()
        ends = np.column_stack([offsets[:-1], offsets[1:]]).ravel()
        tokens.append(np.insert(ids.astype(dtype), ends, np.tile(edges, len(batch.texts))))
        lengths.append(np.diff(offsets) + 2)
        sizes += batch.lengths
        keys += [key.partition("-")[0] for key in batch.keys]  # equal texts, where they are kept, have equal keys
    left = max(PROVED_BYTES, source["text_bytes"] // PROVED_SHARE)
    for number in sorted(proved, key=sizes.__getitem__)[1:]:
        left -= sizes[number]
        if left < 0:
            del proved[number]
    for number, (text, own) in proved.items():
        beginning = text[:COMPARED]
        if len(text) > COMPARED:
            own, _ = encoder.encode_flat([beginning])
        if not np.array_equal(own, reference.encode_flat([beginning])[0]):
            raise EncoderError(f"other ids for the document {number} ({keys[number]})")
    return Encoded(np.concatenate(tokens), np.cumsum(np.concatenate(lengths)), sizes, keys, proved)


def prove(path: Path, record: Record, source: TextRecord, tokenizer: Tokenizer, proved: Proved) -> None:
    """Read a written shard as training will, and with Arrow; UserError if it is not the right encoding of the text.

    Args:
        record: its output record.
        source: the text shard's record.
        proved: documents whose tokens are decoded and compared with their text.
    """
    shard = TokenShard(path, record)
    tokens = shard.tokens(0, shard.token_count)
    batch = read_batch(path)
    offsets = shard.read_offsets()
    problems = list[str]()
    if (shard.documents, record["text_bytes"]) != (source["docs"], source["text_bytes"]):
        problems.append(f"{shard.documents} documents of {record['text_bytes']} bytes of text, but the text shard has "
                        f"{source['docs']} of {source['text_bytes']}")
    if not np.array_equal(np.from_dlpack(batch.column("tokens").values), tokens):  # `to_numpy` would import pandas
        problems.append("Arrow reads other tokens than are at the recorded place in the file")
    if len(tokens) and tokens.max() >= tokenizer.size:
        problems.append(f"the id {tokens.max()} is outside the vocabulary of {tokenizer.size}")
    edges = (tokens == tokenizer.bos_id) | (tokens == tokenizer.eos_id)  # may be one token
    if not ((tokens[offsets[:-1]] == tokenizer.bos_id).all() and (tokens[offsets[1:] - 1] == tokenizer.eos_id).all()
            and np.count_nonzero(edges) == 2 * shard.documents):
        problems.append("BOS and EOS are not around each document, or are inside of one")
    problems = problems or [
        f"document {number} ({shard.document_key(number)}) does not decode to its text"
        for number, (text, _) in proved.items()
        if not reads_back(text, tokenizer.decode(shard.document_tokens(number)[1:-1]))]
    if problems:
        raise UserError(f"{path} is not a right encoding of {source['path']}, so it is not committed:\n"
                        f"{listed(problems)}\nRun the stage again. If it happens again, please report it, unless the "
                        f"disk or memory is failing.")


def counted(records: Iterable[Record]) -> Record:
    """Documents, text bytes and tokens of token shards: for each split and source, and in total."""
    counts: Record = {"total": dict.fromkeys(COUNTED, 0), "splits": {}}
    for record in records:
        own = counts["splits"].setdefault(record["split"], {}).setdefault(record["source"], dict.fromkeys(COUNTED, 0))
        for sums in (own, counts["total"]):
            for name in COUNTED:
                sums[name] += record[name]
    return counts


@lru_cache(maxsize=1)
def _tokenizer(folder: Path, sha256: str) -> Tokenizer:
    one_thread()
    tokenizer = load_tokenizer(folder)
    if tokenizer.sha256 != sha256:
        raise UserError(f"The vocabulary in {folder} was replaced while encode was running. Run encode again.")
    return tokenizer


_fast = lru_cache(maxsize=1)(FastEncoder)


if __name__ == "__main__":
    from drover.pipeline.contract.entry import stage_main  # here: whoever imports this file needs none of it

    sys.exit(stage_main("encode", encode))
