"""The baselines beside a model's bits per byte, computed once, by a process of its own beside the ranks' work.

That process needs no torch, and no interpreter lock of a rank that is to keep its GPU busy. While it is at work no rank
waits for it in a collective: they meet every few seconds, and ask.
"""

from __future__ import annotations

import os
import signal
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.contract.manifest import Manifest
from pipeline.contract.orphans import end_with_parent
from pipeline.errors import UserError
from pipeline.evaluation.baselines import baselines, byte_counts
from pipeline.evaluation.heldout import TextWanted, read_texts, training_byte_counts

if TYPE_CHECKING:
    from pipeline.parallel.ranks import Ranks

ASKED_EVERY = 5.0
"""Seconds between two times that the ranks ask whether it is done."""
OVERALL = ""
"""All sources together; no source has an empty name."""


class Baselines:
    """The baselines of each source's text, and of all: begun at once on rank 0, asked for when they are needed. A
    context manager: what is not done at its end is given up.

    Args:
        ranks: every rank makes one, and asks for the result at the same place.
        shard: folder and manifest of the texts.
        wanted: by source, on rank 0; nothing if nobody is going to ask.
        train_bytes: of training text that the unigram baseline is fitted on.
        most: bytes that compressors are given of each source, and of all together.
    """

    def __init__(self, ranks: Ranks, shard: tuple[Path, Manifest], wanted: dict[str, TextWanted], train_bytes: int,
                 most: int) -> None:
        self.ranks = ranks
        self._pool: ProcessPoolExecutor | None = None
        self._future: Future[dict[str, dict[str, float]]] | None = None
        if ranks.leads and wanted:
            self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_start,
                                             initargs=(os.getpid(),))
            self._future = self._pool.submit(compare, *shard, wanted, train_bytes, most)

    def __enter__(self) -> Baselines:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if self._pool is not None:
            if self._future is not None and not self._future.done():
                for process in list((getattr(self._pool, "_processes", None) or {}).values()):
                    process.terminate()
            self._pool.shutdown(wait=True, cancel_futures=True)

    def result(self) -> dict[str, dict[str, float]]:
        """By source, and under OVERALL where there are several: see `compare`. Every rank asks, and gets it.

        Raises:
            UserError: on every rank, what went wrong with the texts.
        """
        while not self.ranks.same(self._done()):
            pass
        outcome, problem = self.ranks.same(self._outcome())
        if problem is not None:
            raise UserError(problem)
        found: dict[str, dict[str, float]] = outcome
        return found

    def _done(self) -> bool | None:
        """Whether it is, after ASKED_EVERY seconds at most; None where it is not rank 0 that is asked."""
        if self._future is None:
            return None
        try:
            self._future.exception(timeout=ASKED_EVERY)
        except TimeoutError:
            return False
        return True

    def _outcome(self) -> tuple[dict[str, dict[str, float]] | None, str | None] | None:
        if self._future is None:
            return None
        try:
            return self._future.result(), None
        except UserError as error:
            return None, str(error)
        except BrokenProcessPool:
            return None, ("The process that computes the compression baselines was killed, as the kernel does when "
                          "memory runs out (see dmesg): xz needs up to 0.7 GB. Lower evaluate.compressed_mb; what else "
                          "was measured is kept.")


def _start(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    end_with_parent(parent)


def compare(folder: Path, manifest: Manifest, wanted: dict[str, TextWanted], train_bytes: int,
            most: int) -> dict[str, dict[str, float]]:
    """The baselines of each source, and of all where there are several.

    Every text is compared with what its tokens were made of, and its bytes counted; compressors are given whole
    documents of a source until they have `most` bytes, and of all sources as many bytes of each.

    Returns by name what `baselines` does, and `compressed_bytes`, what the compressors were given.
    """
    counts = training_byte_counts(folder, manifest, train_bytes)
    together = most if sum(text.size for text in wanted.values()) <= most else most / len(wanted)
    found, everything, everywhere = {}, bytearray(), np.zeros(256, np.int64)
    for source, text in wanted.items():
        given, of_all, own = bytearray(), 0, np.zeros(256, np.int64)
        for document in read_texts(folder, manifest, source, text):
            own += byte_counts(document)
            if len(given) < most:
                given += document
            if of_all < together:
                everything += document
                of_all += len(document)
        found[source] = _entry(bytes(given), own, counts)
        everywhere += own
    if len(wanted) > 1:
        found[OVERALL] = _entry(bytes(everything), everywhere, counts)
    return found


def _entry(given: bytes, counts: np.ndarray, training: np.ndarray) -> dict[str, Any]:
    return {**baselines(given, counts, training), "compressed_bytes": len(given)}
