"""What simple compressors need for the same held-out bytes, so that a model's bits per byte mean something.

- `unigram`: each byte coded by its frequency in the training text, without any context. It alone was fitted on
  training text, as the model was.
- `gzip -9`: DEFLATE, which finds repetitions up to 32 KB back. Knows nothing before the first byte.
- `xz -9`: LZMA, which finds repetitions anywhere in the held-out text (up to 64 MB back). Knows nothing before the
  first byte either, but may look back over all held-out documents, which the model may not.

The documents of a source are joined in order, without anything between them; file headers count. The compressors are
given the first of them, up to `evaluate.compressed_mb`. All of it is computed once, by a process of its own beside the
ranks' work: it needs no torch, and no interpreter lock of a rank that is to keep its GPU busy. While it works no rank
waits for it in a collective: they meet every few seconds, and ask.
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
from drover.pipeline.evaluation.heldout import Wanted, byte_counts, read_texts, training_byte_counts

if TYPE_CHECKING:
    from drover.pipeline.parallel.ranks import Ranks

MEANING = {
    "unigram": "each byte coded by its frequency in the training text, no context",
    "gzip -9": "DEFLATE on the joined held-out documents, 32 KB window, no training text",
    "xz -9": "LZMA on the joined held-out documents, sees all of them, no training text",
}
ASKED_EVERY = 5.0
"""Seconds between two times that the ranks ask whether the process is done."""
OVERALL = ""
"""All sources together; no source has an empty name."""


def baselines(text: bytes, counts: np.ndarray, training_counts: np.ndarray) -> dict[str, float]:
    """Bits per byte of each baseline, headers and checksums included, and the entropy of the bytes: the least that any
    code without context could reach.

    text: what the compressors are given, not empty. counts: of the bytes of the whole text, of which that may be a
    beginning; (256,) int64 as training_counts, to which one is added for each byte value.
    """
    smoothed, shares = training_counts.astype(np.float64) + 1, counts[counts > 0] / counts.sum()
    # A dictionary, and with it memory, no larger than the text: it changes no byte but one of the header.
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": min(64 << 20, max(4096, len(text)))}]
    return {"unigram": float((counts * (np.log2(smoothed.sum()) - np.log2(smoothed))).sum() / counts.sum()),
            "gzip -9": 8 * len(gzip.compress(text, compresslevel=9, mtime=0)) / len(text),
            "xz -9": 8 * len(lzma.compress(text, filters=filters)) / len(text),
            "entropy": float(-(shares * np.log2(shares)).sum()), "compressed_bytes": len(text)}


def compare(folder: Path, manifest: Manifest, wanted: dict[str, Wanted], train_bytes: int,
            most: int) -> dict[str, dict[str, float]]:
    """The baselines of each source, and under OVERALL of all where there are several.

    Every text is compared with what its tokens were made of, and its bytes counted; compressors are given whole
    documents of a source until they have `most` bytes, and of all sources as many bytes of each.
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
    """What `compare` finds, begun at once on rank 0 and asked for when it is needed. A context manager: what is not
    done at its end is given up.

    Args:
        ranks: every rank makes one, and asks for the result at the same place.
        given: what `compare` takes; its sources on rank 0, nothing if nobody is going to ask.
    """

    def __init__(self, ranks: Ranks, *given: Any) -> None:
        self.ranks, self._future = ranks, Future[dict[str, dict[str, float]]]()
        self._executor = ProcessPoolExecutor(1, get_context("spawn"), _prepare, (os.getpid(),))
        if ranks.leads and given[2]:
            self._future = self._executor.submit(compare, *given)

    def __enter__(self) -> Baselines:
        return self

    def __exit__(self, *error: object) -> None:
        for process in (self._executor._processes or {}).values():
            process.terminate()
        self._executor.shutdown()

    def result(self) -> dict[str, dict[str, float]]:
        """See `compare`. Every rank asks, and gets it.

        Raises:
            UserError: on every rank, what went wrong with the texts.
        """
        while not self.ranks.same(self.ranks.leads and bool(wait([self._future], ASKED_EVERY).done)):
            pass
        found: dict[str, dict[str, float]] = self.ranks.by_leader(self._received)
        return found

    def _received(self) -> dict[str, dict[str, float]]:
        try:
            return self._future.result()
        except UserError:
            raise
        except BrokenProcessPool:
            raise UserError("The process that computes the compression baselines died, as it does when the kernel ends "
                            "it for want of memory (see dmesg): xz needs up to 0.7 GB. Lower evaluate.compressed_mb; "
                            "what else was measured is kept.") from None
        except Exception as error:
            raise UserError(f"The compression baselines could not be computed: {type(error).__name__}: {error}. What "
                            f"else was measured is kept; the same command goes on.") from error


def _prepare(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    end_with_parent(parent)
