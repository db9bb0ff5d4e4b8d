"""What simple compressors need for the same held-out bytes, so that a model's bits per byte mean something.

- `unigram`: each byte coded by its frequency in the training text, without any context. It alone was fitted on
  training text, as the model was.
- `gzip -9`: DEFLATE, which finds repetitions up to 32 KB back. Knows nothing before the first byte.
- `xz -9`: LZMA, which finds repetitions anywhere in the held-out text (up to 64 MB back). Knows nothing before the
  first byte either, but may look back over all held-out documents, which the model may not.

The documents of a source are joined in order, without anything between them; file headers count. The compressors are
given the first of them, up to `evaluate.compressed_mb`.
"""

from __future__ import annotations

import gzip
import lzma
import math

import numpy as np

MEANING = {
    "unigram": "each byte coded by its frequency in the training text, no context",
    "gzip -9": "DEFLATE on the joined held-out documents, 32 KB window, no training text",
    "xz -9": "LZMA on the joined held-out documents, sees all of them, no training text",
}


def byte_counts(text: bytes) -> np.ndarray:
    """How often each byte value occurs: (256,) int64."""
    return np.bincount(np.frombuffer(text, np.uint8), minlength=256).astype(np.int64)


def unigram_bits(counts: np.ndarray, text_counts: np.ndarray) -> float:
    """Bits per byte of a text with `text_counts`, coded by the frequencies `counts` + 1 (add-one smoothing)."""
    smoothed = counts.astype(np.float64) + 1
    bits = np.log2(smoothed.sum()) - np.log2(smoothed)
    return float((text_counts * bits).sum() / text_counts.sum())


def entropy_bits(text_counts: np.ndarray) -> float:
    """Entropy of the text's own byte frequencies: the least that any code without context could reach."""
    shares = text_counts[text_counts > 0] / text_counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def gzip_bits(text: bytes) -> float:
    """Bits per byte of `gzip -9`, header and checksum included."""
    return 8 * len(gzip.compress(text, compresslevel=9, mtime=0)) / len(text)


def xz_bits(text: bytes) -> float:
    """Bits per byte of `xz -9`, header and checksum included. Its dictionary, and with it its memory, is no larger than
    the text, which changes no byte but one of the header."""
    size = min(64 << 20, max(4096, len(text)))
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": size}]
    return 8 * len(lzma.compress(text, filters=filters)) / len(text)


def baselines(text: bytes, counts: np.ndarray, training_counts: np.ndarray) -> dict[str, float]:
    """Bits per byte of each baseline, and the entropy of the bytes.

    text: what the compressors are given, not empty. counts: of the bytes of the whole text, of which that may be a
    beginning.
    """
    found = {"unigram": unigram_bits(training_counts, counts), "gzip -9": gzip_bits(text), "xz -9": xz_bits(text),
             "entropy": entropy_bits(counts)}
    assert all(math.isfinite(value) for value in found.values())
    return found
