"""The baselines beside a model's bits per byte, computed once, by a process of its own beside the ranks' work.

That process needs no torch, and no interpreter lock of a rank that is to keep its GPU busy. While it is at work no rank
waits for it in a collective: they meet every few seconds, and ask.
"""

from __future__ import annotations

import os
import signal
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from drover.pipeline.contract.manifest import Manifest
from drover.pipeline.contract.orphans import end_with_parent
from drover.pipeline.errors import UserError
from drover.pipeline.evaluation.baselines import baselines, byte_counts
from drover.pipeline.evaluation.heldout import TextWanted, read_texts, training_byte_counts

if TYPE_CHECKING:
    from drover.pipeline.parallel.ranks import Ranks

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
        self._process: SpawnProcess | None = None
        self._answer: Connection | None = None
        if ranks.leads and wanted:
            spawn = get_context("spawn")
            self._answer, theirs = spawn.Pipe(duplex=False)
            self._process = spawn.Process(target=_answer, args=(theirs, os.getpid(), *shard, wanted, train_bytes, most))
            self._process.start()
            theirs.close()  # so that its end is seen here

    def __enter__(self) -> Baselines:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.join()
        if self._answer is not None:
            self._answer.close()

    def result(self) -> dict[str, dict[str, float]]:
        """By source, and under OVERALL where there are several: see `compare`. Every rank asks, and gets it.

        Raises:
            UserError: on every rank, what went wrong with the texts.
        """
        while not self.ranks.same(self._answer is None or self._answer.poll(ASKED_EVERY)):
            pass
        outcome, problem = self.ranks.same(self._received())
        if problem is not None:
            raise UserError(problem)
        found: dict[str, dict[str, float]] = outcome
        return found

    def _received(self) -> tuple[dict[str, dict[str, float]] | None, str | None] | None:
        if self._answer is None:
            return None
        try:
            found: tuple[dict[str, dict[str, float]] | None, str | None] = self._answer.recv()
        except EOFError:
            return None, ("The process that computes the compression baselines died, as it does when the kernel ends "
                          "it for want of memory (see dmesg): xz needs up to 0.7 GB. Lower evaluate.compressed_mb; "
                          "what else was measured is kept.")
        return found


def _answer(answer: Connection, parent: int, *given: Any) -> None:
    """The process: send what `compare` finds, or what a user is to be told."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    end_with_parent(parent)
    try:
        answer.send((compare(*given), None))
    except UserError as error:
        answer.send((None, str(error)))
    except Exception as error:  # told by the parent, which would else think of a kill
        answer.send((None, f"The compression baselines could not be computed: {type(error).__name__}: {error}. What "
                           f"else was measured is kept; the same command goes on."))
        raise


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
