"""Stage 3, encode: tokenize each text shard into a token shard of the same name, and make token shards of files of
tokens (`encode.sources`). Documents are between BOS and EOS."""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: find the packages, and let no file of this folder shadow a library
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from drover.pipeline.contract.inputs import gathered
from drover.pipeline.contract.workers import Task
from drover.pipeline.core.console import counted
from drover.pipeline.core.errors import UnusableInputError, UserError, installed_version, listed
from drover.pipeline.core.files import Record, output_record, read_json
from drover.pipeline.data.counts import total
from drover.pipeline.data.documents import digest, validation_below
from drover.pipeline.data.streams import Input, Piece
from drover.pipeline.data.text_shards import SPLITS, TextRecord, read_texts, shard_name, shard_records, text_bytes
from drover.pipeline.data.token_files import read_tokens, split_documents
from drover.pipeline.data.token_shards import Ids, Integers, TokenShard, read_batch, write_shard
from drover.pipeline.tokenization.checking import admitted
from drover.pipeline.tokenization.files import place, placed, vocabulary_record
from drover.pipeline.tokenization.reporting import outliers, rare_counts, warnings
from drover.pipeline.tokenization.tokenizer import (
    NAME,
    EncoderError,
    FastEncoder,
    TokenBytes,
    Tokenizer,
    load_tokenizer,
    one_thread,
    reads_back,
)

if TYPE_CHECKING:
    from drover.pipeline.config.data import EncodeConfig
    from drover.pipeline.contract.stage_work import Work
    from drover.pipeline.data.sources import TokenUnit

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
TAKEN = ("ids", "separators", "docs", "sampled", "encoded_again")
"""Counts of a source of tokens: ids in its files; those that separate documents; the documents; ids that were decoded
and encoded again; and how many of these are the same."""
SAMPLED = 8
"""How many documents of a part of a file of tokens are decoded and encoded again, at most."""
BEGINNING = 200
"""How many ids of each of them, and how many characters of the example that is shown."""
LEAST_AGAIN = 0.5
"""If a smaller share of the sampled ids is the same again, a warning says so."""
Proved = dict[int, tuple[str, NDArray[np.uint32]]]
"""The documents of a shard to verify, by number: text, and ids without BOS and EOS."""


class EncodingTask(TypedDict):
    """What all tasks have: the tokenizer's folder, its vocabulary's hash, and the type of stored tokens."""

    tokenizer: str
    sha256: str
    dtype: str


class ShardToEncode(EncodingTask):
    """A text shard to encode: the place of the folder of shards, and its record."""

    shards: str
    record: TextRecord


class TokensToTake(EncodingTask):
    """A part of a file of tokens."""

    unit: TokenUnit


def encode(work: Work) -> None:
    """Do one task per text shard, each of which compares its counts with those of the text, and one per part of a file
    of tokens; and commit."""
    from drover.pipeline.data.sources import token_units

    shards, manifest = work.input("shard")
    tokenizer, made = work.input("tokenizer")
    work.check(work.committed("tokenizer"))
    vocabulary = vocabulary_record(tokenizer)
    dtype = chosen_dtype(work.config.encode, vocabulary["size"])
    validation = shard_records(manifest, "validation")
    records = [*shard_records(manifest, "train"), *validation]
    text = f"{text_bytes(records) / 1e6:.1f} MB in {counted(len(records), 'shard')}, " * bool(records)
    work.say(f"{text}{vocabulary['kind']} vocabulary of {vocabulary['size']:,}, {dtype}")
    fast = bool(records) and admitted(work, tokenizer, made, shards, validation)
    shared = {"tokenizer": place(tokenizer, work.folder), "sha256": vocabulary["sha256"], "dtype": dtype}
    folder = place(shards, work.folder)
    tasks = [Task(shard_name(record).replace("/", "-"), {"shards": folder, "record": record, **shared})
             for record in records]
    units = token_units(work.config.encode.sources, work.listing())
    tasks += [Task(f"tokens-{unit['name']}", {"unit": unit, **shared}) for unit in units]
    # The encoder is not part of a task's identity: all encoders make the same shards.
    every = work.run_pass("encode", tasks, partial(make_shards, fast=fast), "shards")
    done = every[:len(records)]
    taken = every[len(records):]
    outputs = [output for record in every for output in record["outputs"]]
    counts = totals(outputs)
    sums = counts["total"]
    work.say(f"{sums['tokens']:,} tokens of {counted(sums['docs'], 'document')}, "
             f"{sums['text_bytes'] / max(1, sums['tokens'] - 2 * sums['docs']):.3f} bytes per token of text")
    strange = outliers([record["outputs"][0] for record in done], read_json(tokenizer / "report.json"))
    for text in warnings(strange):
        work.say(text)
    counts |= {"rare_ids": {"outliers": strange},
               "dtype": dtype, "vocab_size": vocabulary["size"], "tokenizer_sha256": vocabulary["sha256"],
               "encoders": _encoders(work, fast, done), "taken": _taken(work, units, taken)}
    if (url := work.config.encode.copy_to) is not None:
        from drover.pipeline.data.remote_tokens import upload_shards

        work.say(f"{upload_shards(work.folder, outputs, url)} in {url}")
    work.commit(outputs, counts, verified=True, files=gathered([own for record in taken for own in record["inputs"]]))


def _taken(work: Work, units: Sequence[TokenUnit], taken: Sequence[Record]) -> dict[str, Record]:
    """The manifest's record of each source of tokens: the sums of TAKEN, and the beginning of a document. Prints it,
    with a warning if the ids seem to be of another vocabulary; UserError if a source has no document."""
    result = dict[str, Record]()
    for source in work.config.encode.sources:
        own = [record for unit, record in zip(units, taken, strict=True) if unit["source"]["name"] == source.name]
        sums = {name: sum(record[name] for record in own) for name in TAKEN}
        if not sums["docs"]:
            raise UnusableInputError(f"The source {source.name} of encode.sources has no document. Correct its paths, "
                                     f"or leave it out.")
        example = next(record["example"] for record in own if record["docs"])
        result[source.name] = {**sums, "example": example}
        work.say(f"source {source.name}: {sums['ids']:,} ids in = {sums['ids'] - sums['separators']:,} of "
                 f"{sums['docs']:,} documents + {sums['separators']:,} separators; the first begins "
                 f"{example!r}")
        if sums["encoded_again"] < LEAST_AGAIN * sums["sampled"]:
            work.say(f"WARNING: source {source.name}: of {sums['sampled']:,} sampled ids, decoded and encoded again, "
                     f"{sums['encoded_again']:,} are the same. They are probably of another tokenizer than "
                     f"tokenizer.path, or of another type than `dtype`. Read the text above")
    return result


def _encoders(work: Work, fast: bool, done: Sequence[Record]) -> Record:
    """The manifest's record of the encoder. Prints a warning about shards in which the reference replaced the fast
    encoder."""
    fallbacks = [record for record in done if record["fallback"]]
    if fallbacks:
        first = fallbacks[0]
        work.say(f"WARNING: {NAME} gave {first['fallback']} in {first['outputs'][0]['path']}: the reference encoded "
                 f"{len(fallbacks)} of {len(done)} shards. These shards are right. In the other shards only the "
                 f"verified documents are known to be right. To be sure, set encode.encoder to reference and run with "
                 f"--force. Please report it")
    return {"encoder": NAME if fast else "reference", "version": installed_version(NAME) if fast else None,
            "fallback_shards": len(fallbacks)}


def chosen_dtype(settings: EncodeConfig, vocab_size: int) -> str:
    """The integer type of stored tokens; UserError if the configured one cannot hold every id."""
    from drover.pipeline.config.data import UINT16_IDS

    if settings.dtype == "auto":
        return "uint16" if vocab_size <= UINT16_IDS else "uint32"
    if settings.dtype == "uint16" and vocab_size > UINT16_IDS:
        raise UserError(f"encode.dtype uint16 holds ids up to 65535, but the vocabulary has {vocab_size}. "
                        f"Set encode.dtype to uint32 or auto.")
    return settings.dtype


def make_shards(folder: Path, payload: Any, fast: bool) -> Record:
    """Task: `take_tokens` or `encode_shard`."""
    return take_tokens(folder, payload) if "unit" in payload else encode_shard(folder, payload, fast)


def take_tokens(folder: Path, payload: TokensToTake) -> Record:
    """Task: the documents of a part of a file of tokens as a token shard of each split, read back and verified.

    Returns with the `outputs` TAKEN, an `example` of the text, and the `inputs` (see `Input.record`).

    Raises:
        UserError: an id is outside the vocabulary, or the file is damaged or not what it was.
    """
    unit = payload["unit"]
    source = unit["source"]
    piece = Piece(**unit["piece"])
    tokenizer, text = _table(placed(folder, payload["tokenizer"]), payload["sha256"])
    kind = np.min_scalar_type(max(256, tokenizer.size - 1)).name  # uint16 or uint32
    separators = [tokenizer.bos_id, tokenizer.eos_id, *source["separators"]]
    below = validation_below(unit["validation_share"])
    parts: dict[str, list[Encoded]] = {split: [] for split in SPLITS}
    sums = Counter(dict.fromkeys(TAKEN, 0))
    example = ""
    try:
        inputs = [Input(own) for own in (piece, *(Piece(**other) for other in unit["beside"]))]
        for block in read_tokens(Path(piece.path), piece.start, piece.stop, source["dtype"].replace("auto", kind),
                                 source["column"], separators):
            ids, lengths = split_documents(block, separators)
            if len(beyond := ids[(ids < 0) | (ids >= tokenizer.used)]):
                raise UserError(f"{piece.path} has the id {beyond[0]}, but the vocabulary of tokenizer.path has "
                                f"{tokenizer.used:,} ids. The file was made with another tokenizer, or its ids are not "
                                f"{ids.dtype.name}: correct tokenizer.path, or the source's `dtype`.")
            sums.update(ids=len(block[0]), separators=len(block[0]) - len(ids), docs=len(lengths))
            documents = np.split(ids.astype(kind), np.cumsum(lengths))[:-1]
            if documents:
                example = example or _sampled(documents, tokenizer, sums)
            chosen: dict[str, list[tuple[bytes, Ids]]] = {split: [] for split in SPLITS}
            for document in documents:
                key = digest(document.data)
                is_validation = int.from_bytes(key[:8], "big") < below
                chosen["validation" if is_validation else unit["split"]].append((key, document))
            for split, own in chosen.items():
                if own:
                    ids = np.concatenate([document for _, document in own])
                    offsets = ends_of([len(document) for _, document in own])
                    parts[split].append(Encoded.of_documents(
                        ids.astype(payload["dtype"]), offsets, text.sizes(ids, offsets[:-1]).tolist(),
                        [key.hex() for key, _ in own], tokenizer))
        records = [own.record() for own in inputs if piece.start == 0 or own is inputs[0]]
    except OSError as error:
        raise UserError(f"{piece.path} cannot be read: {error}. Put it back or make it readable, and run the stage "
                        f"again.") from None
    outputs = [_write(folder, f"{split}/{unit['name']}", Encoded.of(own), tokenizer, split=split,
                      source=source["name"], input=f"{piece.name}@{piece.start}")
               for split, own in parts.items() if own]
    assert sums["ids"] == sums["separators"] + sum(own["tokens"] - 2 * own["docs"] for own in outputs), unit
    return {"outputs": outputs, "inputs": records, "example": example, **sums}


def _sampled(documents: Sequence[Ids], tokenizer: Tokenizer, sums: Counter[str]) -> str:
    """Decode the beginnings of some documents and encode them again, which `sums` counts. The first one's text."""
    for document in documents[::1 + len(documents) // SAMPLED]:
        own = document[:BEGINNING]
        again = np.array(tokenizer.encode(tokenizer.decode(own))[:len(own)])
        sums.update(sampled=len(own), encoded_again=int(np.logical_and.accumulate(own[:len(again)] == again).sum()))
    return tokenizer.decode(documents[0][:BEGINNING])[:BEGINNING]


def encode_shard(folder: Path, payload: ShardToEncode, fast: bool = False) -> Record:
    """Task: encode one text shard, read the result back and verify it.

    With `fast`, the fast encoder does it. If it gives other ids than the reference for the verified documents, the
    reference encodes the whole shard again, and `fallback` in the record has the reason.
    """
    source = payload["record"]
    shards, vocabulary = placed(folder, payload["shards"]), placed(folder, payload["tokenizer"])
    reference = _tokenizer(vocabulary, payload["sha256"])
    try:
        result = encoded(shards, source, _fast(reference, vocabulary) if fast else reference, reference,
                         payload["dtype"])
    except EncoderError as error:
        if fast:
            return {**encode_shard(folder, payload), "fallback": str(error)}
        raise UserError(f"{shards / source['path']}: the tokenizer's own batches give {error}. Please report "
                        f"it; it does not depend on encode.encoder.") from None
    record = _write(folder, shard_name(source), result, reference, source, split=source["split"],
                    source=source["source"], input=source["path"], input_sha256=source["sha256"])
    return {"outputs": [record], "fallback": ""}


def _write(folder: Path, name: str, result: Encoded, tokenizer: Tokenizer, made_of: TextRecord | None = None,
           **origin: str) -> Record:
    """Write a token shard, read it back and verify it. Returns its output record, with the fields of `origin`."""
    path = folder / f"{name}.arrow"
    content = write_shard(path, result.tokens, ends_of(result.lengths), result.text_bytes, result.keys, metadata={
        "tokenizer_sha256": tokenizer.sha256, "vocab_size": str(tokenizer.size), "bos_id": str(tokenizer.bos_id),
        "eos_id": str(tokenizer.eos_id)})
    record = output_record(folder, path, **origin, **content, **rare_counts(result.tokens, tokenizer))
    prove(path, record, made_of, tokenizer, result.proved)
    return record


@dataclass
class Encoded:
    """A shard's documents as ids.

    tokens: with BOS and EOS. lengths: of each document. proved: the documents to verify, by number.
    """

    tokens: Ids
    lengths: Integers
    text_bytes: list[int]
    keys: list[str]
    proved: Proved = field(default_factory=dict)

    @classmethod
    def of_documents(cls, ids: Ids, offsets: Integers, text_bytes: list[int], keys: list[str],
                     tokenizer: Tokenizer) -> Encoded:
        """Put BOS and EOS around documents. offsets: where each begins among the ids, and where the last one ends."""
        places = np.column_stack([offsets[:-1], offsets[1:]]).ravel()
        edges = np.array([tokenizer.bos_id, tokenizer.eos_id], ids.dtype)
        return cls(np.insert(ids, places, np.tile(edges, len(keys))), np.diff(offsets) + 2, text_bytes, keys)

    @classmethod
    def of(cls, parts: Sequence[Encoded]) -> Encoded:
        """The documents of all parts."""
        return cls(np.concatenate([part.tokens for part in parts]), np.concatenate([part.lengths for part in parts]),
                   [size for part in parts for size in part.text_bytes], [key for part in parts for key in part.keys])


def ends_of(lengths: Sequence[int] | Integers) -> Integers:
    """Where documents of these lengths begin, one after another, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(lengths)])


def encoded(shards: Path, source: TextRecord, encoder: Tokenizer, reference: Tokenizer,
            dtype: str) -> Encoded:
    """The documents of a text shard. EncoderError if the encoder fails, or gives other ids than the reference for one
    of those to verify.

    Of a very long document the beginning is compared, since the reference takes more than a hundred bytes of memory for
    each character.
    """
    chosen = np.linspace(0, max(0, source["docs"] - 1), PROVED_TEXTS).astype(int).tolist()
    parts = list[Encoded]()
    done = 0
    proved = Proved()
    for batch in read_texts(shards, source, BATCH_BYTES):
        ids, offsets = encoder.encode_flat(batch.texts)
        for number in chosen:
            if 0 <= (at := number - done) < len(batch.texts):
                proved[number] = batch.texts[at], ids[offsets[at]:offsets[at + 1]].copy()
        keys = [key.partition("-")[0] for key in batch.keys]  # equal texts, if kept, have equal keys
        parts.append(Encoded.of_documents(ids.astype(dtype), offsets, batch.lengths, keys, reference))
        done += len(batch.texts)
    result = Encoded.of(parts)
    left = max(PROVED_BYTES, source["text_bytes"] // PROVED_SHARE)
    for number in sorted(proved, key=result.text_bytes.__getitem__)[1:]:
        left -= result.text_bytes[number]
        if left < 0:
            del proved[number]
    for number, (text, own) in proved.items():
        beginning = text[:COMPARED]
        if len(text) > COMPARED:
            own, _ = encoder.encode_flat([beginning])
        if not np.array_equal(own, reference.encode_flat([beginning])[0]):
            raise EncoderError(f"other ids for the document {number} ({result.keys[number]})")
    result.proved = proved
    return result


def prove(path: Path, record: Record, source: TextRecord | None, tokenizer: Tokenizer, proved: Proved) -> None:
    """Read a written shard as training will, and with Arrow; UserError if it is not the right encoding of the text.

    Args:
        record: its output record.
        source: the text shard's record, if it was made of one.
        proved: documents whose tokens are decoded and compared with their text.
    """
    shard = TokenShard(path, record)
    tokens = shard.tokens(0, shard.token_count)
    batch = read_batch(path)
    offsets = shard.read_offsets()
    problems = list[str]()
    if source and (shard.documents, record["text_bytes"]) != (source["docs"], source["text_bytes"]):
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
        raise UserError(f"{path} is not a right encoding of {record['input']}, so it is not committed:\n"
                        f"{listed(problems)}\nRun the stage again. If it happens again, please report it, unless the "
                        f"disk or memory is failing.")


def totals(records: Iterable[Record]) -> Record:
    """Documents, text bytes and tokens of token shards: for each split and source, and in total."""
    result: Record = {"total": dict.fromkeys(COUNTED, 0), "splits": {}}
    for record in records:
        own = {name: record[name] for name in COUNTED}
        result = total([result, {"total": own, "splits": {record["split"]: {record["source"]: own}}}])
    return result


@lru_cache(maxsize=1)
def _tokenizer(folder: Path, sha256: str) -> Tokenizer:
    one_thread()
    tokenizer = load_tokenizer(folder)
    assert tokenizer.sha256 == sha256, f"{folder} was replaced while it was locked"
    return tokenizer


@lru_cache(maxsize=1)
def _table(folder: Path, sha256: str) -> tuple[Tokenizer, TokenBytes]:
    tokenizer = _tokenizer(folder, sha256)
    return tokenizer, TokenBytes(tokenizer)


_fast = lru_cache(maxsize=1)(FastEncoder)


if __name__ == "__main__":
    from drover.pipeline.contract.entry import stage_main  # here: whoever imports this file needs none of it

    sys.exit(stage_main("encode", encode))
