"""Bits per byte of simple compressors on the same validation text, as a baseline for the model.

Those that have seen training text, as the model has:

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
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import numpy as np

from drover.pipeline.contract.stage_work import Work
from drover.pipeline.data.remote_tokens import shards_of
from drover.pipeline.evaluation.validation import (
    byte_counts,
    chosen_documents,
    training_bytes,
    training_text,
    validation_texts,
)

TRAINING_BYTES = 1_000_000_000
"""Bytes of training text on which the unigram baseline is fitted, spread evenly over the shards."""
AFTER = " after training text"
MEANING = {
    "unigram": "each byte coded by its frequency in the training text, no context",
    f"gzip -9{AFTER}": "DEFLATE on the concatenated validation documents after the last 32 KB of training text, its "
                       "window: the bits that the documents add",
    f"xz -9{AFTER}": "LZMA on the concatenated validation documents, one source after another, after training text of "
                     "up to 64 MB, its window: the bits that the documents add",
    "gzip -9": "DEFLATE on the concatenated validation documents, 32 KB window, no training text",
    "xz -9": "LZMA on the concatenated validation documents, sees all of them, no training text",
}
ALONE = ("gzip -9", "xz -9")
"""The baselines that have seen no training text, which the model has."""
DEFLATE_WINDOW = 32 << 10
LZMA_WINDOW = 64 << 20
Compared = dict[str, dict[str, float]]
"""The result of `baselines` of each source, by its name."""
OVERALL = ""
"""All sources together; no source has an empty name."""


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
    folder, manifest = work.input("shard")
    most = int(work.config.evaluate.compressed_mb * 1e6)
    shards = shards_of(work, "validation")
    chosen = chosen_documents(work)
    counts, training = training_text(folder, manifest, TRAINING_BYTES, min(most, LZMA_WINDOW))
    size = sum(int(documents.text_bytes.sum()) for documents in chosen.values())
    of_source = most if size <= most else most / len(chosen)
    compared = Compared()
    texts = dict[str, bytes]()
    everywhere = np.zeros(256, np.int64)
    for source, documents in chosen.items():
        text = bytearray()
        own = np.zeros(256, np.int64)
        for document in validation_texts(folder, manifest, source, shards[source], documents):
            own += byte_counts(document)
            if len(text) < of_source:
                text += document
        texts[source] = bytes(text)
        compared[source] = baselines(texts[source], own, counts)
        everywhere += own
    if len(chosen) > 1:
        compared[OVERALL] = baselines(b"".join(texts.values()), everywhere, counts)
    after = after_training(training, texts)
    of_training = training_bytes(manifest)
    return {source: {**values, **after[source], "training_bytes": len(training), "of_training_bytes": of_training}
            for source, values in compared.items()}
