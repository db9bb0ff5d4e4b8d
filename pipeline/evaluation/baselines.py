"""Bits per byte of simple compressors on the same validation text, as a baseline for the model.

- `unigram`: each byte coded by its frequency in the training text, without any context. It is the only baseline that
  is fitted on training text, as the model is.
- `gzip -9`: DEFLATE, which finds repetitions up to 32 KB back. It has seen nothing before the first byte.
- `xz -9`: LZMA, which finds repetitions anywhere in the validation text (up to 64 MB back). It has seen nothing before
  the first byte either, but it uses all earlier validation documents, which the model does not.

The documents of a source are concatenated in order; file headers count. The compressors get the first of them, up to
`evaluate.compressed_mb`. One separate process computes all baselines once, in the background: it needs no torch, and
does not take the interpreter lock of a rank that keeps a GPU busy. No rank waits for it in a long collective: the ranks
check every few seconds whether it is done.
"""

from __future__ import annotations

import gzip
import lzma
import os
import signal
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from drover.pipeline.contract.manifest import Manifest
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.orphans import end_with_parent
from drover.pipeline.evaluation.validation import Wanted, byte_counts, read_texts, training_byte_counts

if TYPE_CHECKING:
    from drover.pipeline.parallel.ranks import Ranks

MEANING = {
    "unigram": "each byte coded by its frequency in the training text, no context",
    "gzip -9": "DEFLATE on the concatenated validation documents, 32 KB window, no training text",
    "xz -9": "LZMA on the concatenated validation documents, sees all of them, no training text",
}
ASKED_EVERY = 5.0
"""Seconds between two checks of the ranks whether the process is done."""
Compared = dict[str, dict[str, float]]
"""The result of `baselines` of each source, by its name."""
OVERALL = ""
"""All sources together; no source has an empty name."""


def baselines(text: bytes, counts: np.ndarray, training_counts: np.ndarray) -> dict[str, float]:
    """Bits per byte of each baseline, including headers and checksums, and the entropy of the bytes, which is the lower
    bound of any code without context.

    Args:
        text: the compressors' input, not empty; it may be only the beginning of the text.
        counts: byte counts of the whole text, (256,) int64.
        training_counts: byte counts of the training text, (256,) int64. One is added for each byte value.
    """
    smoothed, shares = training_counts.astype(np.float64) + 1, counts[counts > 0] / counts.sum()
    # A dictionary, and with it memory, no larger than the text: it changes no byte but one of the header.
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": min(64 << 20, max(4096, len(text)))}]
    return {"unigram": float((counts * (np.log2(smoothed.sum()) - np.log2(smoothed))).sum() / counts.sum()),
            "gzip -9": 8 * len(gzip.compress(text, compresslevel=9, mtime=0)) / len(text),
            "xz -9": 8 * len(lzma.compress(text, filters=filters)) / len(text),
            "entropy": float(-(shares * np.log2(shares)).sum()), "compressed_bytes": len(text)}


def compare(folder: Path, manifest: Manifest, wanted: dict[str, Wanted], train_bytes: int, most: int) -> Compared:
    """The baselines of each source and, if there are several, of all together under OVERALL.

    Every text is checked against its tokens' record. The compressors get whole documents of a source up to `most`
    bytes; for OVERALL the same amount of each source.
    """
    counts = training_byte_counts(folder, manifest, train_bytes)
    whole = sum(size for documents in wanted.values() for _, size, _ in documents.values())
    together = most if whole <= most else most / len(wanted)
    found, everything, everywhere = {}, bytearray(), np.zeros(256, np.int64)
    for source, documents in wanted.items():
        given, of_all, own = bytearray(), 0, np.zeros(256, np.int64)
        for document in read_texts(folder, manifest, source, documents):
            own += byte_counts(document)
            if len(given) < most:
                given += document
            if of_all < together:
                everything += document
                of_all += len(document)
        found[source] = baselines(bytes(given), own, counts)
        everywhere += own
    if len(wanted) > 1:
        found[OVERALL] = baselines(bytes(everything), everywhere, counts)
    return found


class Baselines:
    """Runs `compare` in the background on rank 0, until the result is needed. A context manager, which aborts the
    computation at its end.

    Args:
        ranks: every rank makes one, and calls `result` at the same place.
        given: the arguments of `compare`; the sources on rank 0, empty if the result will not be needed.
    """

    def __init__(self, ranks: Ranks, *given: Any) -> None:
        self.ranks, self._future = ranks, Future[Compared]()
        self._executor = ProcessPoolExecutor(1, get_context("spawn"), _prepare, (os.getpid(),))
        if ranks.leads and given[2]:
            self._future = self._executor.submit(compare, *given)

    def __enter__(self) -> Baselines:
        return self

    def __exit__(self, *error: object) -> None:
        for process in (self._executor._processes or {}).values():
            process.terminate()
        self._executor.shutdown()

    def result(self) -> Compared:
        """The result of `compare`, on every rank. Every rank calls it.

        Raises:
            UserError: a text is not as recorded, or the process failed; the same on every rank.
        """
        while not self.ranks.same(self.ranks.leads and bool(wait([self._future], ASKED_EVERY).done)):
            pass
        return self.ranks.by_leader(self._received)

    def _received(self) -> Compared:
        try:
            return self._future.result()
        except UserError:
            raise
        except BrokenProcessPool:
            raise UserError("The process that computes the compression baselines died. Probably the kernel killed it "
                            "because memory ran out (see dmesg): xz needs up to 0.7 GB. Lower "
                            "evaluate.compressed_mb; all other results are kept.") from None
        except Exception as error:
            raise UserError(f"The compression baselines could not be computed: {type(error).__name__}: {error}. All "
                            f"other results are kept; run the same command again.") from error


def _prepare(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    end_with_parent(parent)
