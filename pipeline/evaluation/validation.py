"""Validation text: the loss on each source's documents, and simple compressors on the same text as baselines.

Baselines that have seen training text, as the model has:

- `unigram`: each byte coded by its frequency in the training text, without any context.
- `gzip -9 after training text`: DEFLATE, which finds repetitions up to 32 KB back; at first in the last 32 KB of the
  training text.
- `xz -9 after training text`: LZMA, which finds repetitions up to 64 MB back; at first in as much training text.

Those that have seen nothing before the first byte: `gzip -9` and `xz -9`. All but unigram use all earlier validation
documents, which the model does not.

The documents of a source are concatenated in order. After training text only the bytes that they add to it count, and
the sources follow one another; else file headers count too. The compressors get the first documents, up to
`evaluate.compressed_mb`, and as much training text. A thread of rank 0 computes all of them once, while the ranks
measure; the compressors do not hold the interpreter lock.
"""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from drover.pipeline.contract.stage_work import Work
from drover.pipeline.core.console import Watch
from drover.pipeline.core.errors import UserError
from drover.pipeline.data.remote_tokens import shards_of
from drover.pipeline.data.text_shards import SPLITS
from drover.pipeline.data.token_shards import Chosen, ChosenDocuments, Shards, choose
from drover.pipeline.evaluation.results import AFTER, DIGITS, DOCUMENTS, OVERALL
from drover.pipeline.tokenization.texts import ShardTexts, shard_texts

if TYPE_CHECKING:
    from drover.pipeline.evaluation.open_model import OpenedModel
    from drover.pipeline.parallel.ranks import Ranks

TRAINING_BYTES = 1_000_000_000
"""Bytes of training text on which the unigram baseline is fitted, spread evenly over the shards."""
DEFLATE_WINDOW = 32 << 10
LZMA_WINDOW = 64 << 20
Compared = dict[str, dict[str, float]]
"""The result of `baselines` of each source, by its name."""


def chosen_documents(work: Work) -> dict[str, Chosen]:
    """By source, the validation documents to measure."""
    chosen = {source: choose(shards, work.config.evaluate.validation_tokens)
              for source, shards in shards_of(work, "validation").items()}
    if not any(map(len, chosen.values())):
        raise UserError("There is no validation text to measure. Raise shard.validation_share "
                        f"(now {work.config.shard.validation_share}), or add documents.")
    return {source: documents for source, documents in chosen.items() if len(documents)}


def measure_validation(work: Work, ranks: Ranks, opened: OpenedModel, length: int, watch: Watch) -> dict[str, Any]:
    """The loss on each source's validation text, and how much text was measured; under DOCUMENTS, a record for each
    document. Every rank reads the documents of its own batches. length: tokens per window."""
    from drover.pipeline.evaluation.bits_per_byte import ValidationBatches, ValidationText, measure

    chosen = ranks.by_leader(lambda: chosen_documents(work))
    shards = shards_of(work, "validation")
    texts = {source: ValidationText(ChosenDocuments(shards[source], documents), int(documents.text_bytes.sum()),
                                    documents.lengths.tolist()) for source, documents in chosen.items()}
    batches = ValidationBatches(texts, batch=work.config.evaluate.batch, length=length, rank=ranks.rank,
                                world=ranks.world)
    measured = measure(lambda tokens, labels, documents, positions: opened.model(
        tokens, labels, documents=documents, positions=positions, reduction="none"), batches, ranks.device,
        together=opened.placed.together, watch=watch, by_document=True)
    return {"sources": {source: {
        "nats": measured[source].nats, "targets": measured[source].targets, "bytes": measured[source].text_bytes,
        "documents": len(documents), "tokens": int(documents.lengths.sum()), "of_documents": documents.of_documents,
        "of_tokens": documents.of_tokens} for source, documents in chosen.items()},
        "without_validation_text": [source for source in work.config.source_names if source not in chosen],
        "window": length,
        DOCUMENTS: [{"source": source, "key": shards[source][number].document_key(place), "bytes": size,
                     "nats": round(nats, DIGITS)}
                    for source, documents in chosen.items() for number, place, size, nats in zip(
                        documents.shards.tolist(), documents.places.tolist(), documents.text_bytes.tolist(),
                        measured[source].documents, strict=True)]}


def validation_texts(texts: Mapping[str, ShardTexts], shards: Shards, chosen: Chosen) -> Iterator[bytes]:
    """The text of each chosen document of a source, one in memory at a time. texts: by the name of the shard.

    Raises:
        UserError: the token shards were not made of these text shards, so bits per byte would be wrong.
    """
    for number in np.unique(chosen.shards):
        shard = shards[number]
        places = chosen.places[chosen.shards == number].tolist()
        own = texts[shard.path.stem].read(set(places))
        for place, (key, text) in zip(places, own, strict=True):  # both in order
            if key != shard.document_key(place):
                raise UserError(f"The token shard {shard.path} was made of another text than the text shard of its "
                                f"name has there ({key}). Run the stage encode again with --force.")
            yield text.encode()


def byte_counts(text: bytes) -> np.ndarray:
    """How often each byte value occurs: (256,) int64."""
    return np.bincount(np.frombuffer(text, np.uint8), minlength=256).astype(np.int64)


def training_text(shards: Sequence[ShardTexts], counted: int, given: int) -> tuple[np.ndarray, bytes]:
    """The byte counts of the training text, (256,) int64, and text of it for compressors.

    The counts are of the first documents of each shard, up to an equal share of `counted` bytes. The text has at most
    `given` bytes: all if it is so little, else the beginning of each shard, by its size.
    """
    share, part = counted / max(1, len(shards)), given / max(1, given, bytes_of(shards))
    counts = np.zeros(256, np.int64)
    text = bytearray()
    for shard in shards:
        taken = 0
        end = len(text) + int(part * shard.text_bytes)
        for _, document in shard.read(None):
            encoded = document.encode()
            if taken < share:
                counts += byte_counts(encoded)
                taken += len(encoded)
            text += encoded[:end - len(text)]
            if taken >= share and len(text) >= end:
                break
    return counts, bytes(text)


def bytes_of(shards: Sequence[ShardTexts]) -> int:
    """UTF-8 bytes of the text of shards."""
    return sum(shard.text_bytes for shard in shards)


def baselines(text: bytes, counts: np.ndarray, training_counts: np.ndarray) -> dict[str, float]:
    """Bits per byte of the baselines that know at most the counts of training text, including headers and checksums,
    and the entropy of the bytes, which is the lower bound of any code without context.

    Args:
        text: the compressors' input, not empty; it may be only the beginning of the text.
        counts: byte counts of the whole text, (256,) int64.
        training_counts: byte counts of the training text, (256,) int64. One is added for each byte value.
    """
    smoothed = training_counts.astype(np.float64) + 1
    shares = counts[counts > 0] / counts.sum()
    return {"unigram": float((counts * (np.log2(smoothed.sum()) - np.log2(smoothed))).sum() / counts.sum()),
            "gzip -9": 8 * len(gzip.compress(text, compresslevel=9, mtime=0)) / len(text),
            "xz -9": 8 * len(lzma.compress(text, filters=_lzma(len(text)))) / len(text),
            "entropy": float(-(shares * np.log2(shares)).sum()), "compressed_bytes": len(text)}


def after_training(training: bytes, texts: Mapping[str, bytes]) -> dict[str, dict[str, float]]:
    """By source, and under OVERALL, bits per byte of the compressors that have read training text. xz gets all texts
    in one stream, so it also knows the texts of the sources before."""
    added = {f"gzip -9{AFTER}": [_deflated(text, training[-DEFLATE_WINDOW:]) for text in texts.values()],
             f"xz -9{AFTER}": sizes_in_stream([training, *texts.values()])[1:]}
    size = sum(map(len, texts.values()))
    return {**{source: {name: 8 * sizes[place] / len(text) for name, sizes in added.items()}
               for place, (source, text) in enumerate(texts.items())},
            OVERALL: {name: 8 * sum(sizes) / size for name, sizes in added.items()}}


def sizes_in_stream(texts: Sequence[bytes]) -> list[int]:
    """The bytes of each text in `xz -9` of all of them in a row: to a few bytes the compressed size up to its end
    less that up to its beginning. One compression of much training text is enough for that: the compressed bytes of a
    text are those that have to be decompressed before it is there."""
    joined = b"".join(texts)
    filters = _lzma(len(joined))
    packed = lzma.compress(joined, lzma.FORMAT_RAW, filters=filters)
    decoder = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=filters)
    ends = list(accumulate(map(len, texts)))
    begins = [0]
    made = 0
    for end in range(1, len(packed) + 1):
        made += len(decoder.decompress(packed[end - 1:end]))
        while len(begins) < len(texts) and made >= ends[len(begins) - 1]:
            begins.append(end)
    return [end - start for start, end in pairwise([*begins, len(packed)])]


def _lzma(size: int) -> list[dict[str, int]]:
    # A dictionary, and with it memory, no larger than the text: it changes no byte but one of the header.
    return [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": min(LZMA_WINDOW, max(4096, size))}]


def _deflated(text: bytes, before: bytes) -> int:
    """The size of a text as gzip -9 has it after another one, without header and checksum."""
    deflate = zlib.compressobj(9, wbits=-zlib.MAX_WBITS, zdict=before)
    return len(deflate.compress(text)) + len(deflate.flush())


def compare(work: Work) -> Compared:
    """The baselines of each source and, if there are several, of all together under OVERALL.

    Every text is checked against its tokens' record. The compressors get whole documents, up to
    `evaluate.compressed_mb` of all sources together, the same amount of each, and as much training text, evenly from
    all of it.
    """
    train, validation = (shard_texts(work.run, split) for split in SPLITS)
    most = int(work.config.evaluate.compressed_mb * 1e6)
    shards = shards_of(work, "validation")
    chosen = chosen_documents(work)
    training_counts, training = training_text(train, TRAINING_BYTES, min(most, LZMA_WINDOW))
    size = sum(int(documents.text_bytes.sum()) for documents in chosen.values())
    of_source = most if size <= most else most / len(chosen)
    texts = dict[str, bytes]()
    counts = dict[str, np.ndarray]()
    for source, documents in chosen.items():
        text = bytearray()
        counts[source] = np.zeros(256, np.int64)
        for document in validation_texts(
                {shard.name: shard for shard in validation if shard.source == source}, shards[source], documents):
            counts[source] += byte_counts(document)
            if len(text) < of_source:
                text += document
        texts[source] = bytes(text)
    after = after_training(training, texts)
    if len(chosen) > 1:
        texts[OVERALL] = b"".join(texts.values())
        counts[OVERALL] = sum(counts.values(), np.zeros(256, np.int64))
    sizes = {"training_bytes": len(training), "of_training_bytes": bytes_of(train)}
    return {source: {**baselines(text, counts[source], training_counts), **after[source], **sizes}
            for source, text in texts.items()}
