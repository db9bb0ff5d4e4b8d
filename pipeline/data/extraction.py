"""Records that hold no plain text, HTML pages and PDF files, into documents with their text.

They go in batches to a process (`extractors.py`), which works on one batch while the next is read. If a page ends the
process, it is tried once more in a new one, so that no earlier page has a part in it. If it ends that one too, it is
rejected.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import orjson

from drover.pipeline.core.errors import UserError
from drover.pipeline.data import extractors
from drover.pipeline.data.documents import Document, Limit, Page, Rejection, to_json

Item = tuple[Document, bytes] | Rejection
"""A document and its JSON, or why there is none."""
SECONDS = 30.0
"""CPU time for one page."""
MEGABYTES = 2048
"""Memory for one page."""
BATCH_PAGES = 64
BATCH_BYTES = 1 << 20
CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


@dataclass(frozen=True)
class Waiting:
    """A document without its text, the page that holds it, and the rejection, without a reason, if there is none."""

    document: Document
    page: Page
    rejection: Rejection


class Extraction:
    """The process that takes text out of pages, started for the first of them.

    fields: where it is counted in how many documents each meta field is that is found in pages.
    seconds: CPU time for one page, if not SECONDS.

    Raises:
        UserError: the process was ended by something else than a page.
    """

    def __init__(self, extractor: str, limit: Limit, fields: Counter[str], seconds: float = 0.0
                 ) -> None:
        self._extractor = extractor
        self._seconds = seconds or SECONDS
        self._limit = limit
        self._fields = fields
        self._process: subprocess.Popen[bytes] | None = None
        self._sent = deque[Waiting]()
        self._is_new = True

    def __enter__(self) -> Extraction:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._connection.close()
            self._process.kill()
            self._process.wait()

    def documents(self, items: Iterator[Item | Waiting]) -> Iterator[Item]:
        """These items in their order, with the texts of those that wait for it."""
        before = list[Item | Waiting]()
        batch = list[Item | Waiting]()
        size = 0
        for item in items:
            if not batch and not before and not isinstance(item, Waiting):
                yield item
                continue
            own = len(item.page.data) if isinstance(item, Waiting) else 0
            if size + own > BATCH_BYTES or len(batch) == BATCH_PAGES:  # a large page comes alone: only it takes memory
                yield from self._exchanged(before, batch)
                before = batch
                batch = []
                size = 0
            batch.append(item)
            size += own
        yield from self._exchanged(before, batch)
        yield from self._exchanged(batch, [])

    def _exchanged(self, before: list[Item | Waiting], batch: list[Item | Waiting]) -> list[Item]:
        """The items of the batch before, when the next one is sent."""
        done = [self._document(item, self._answer()) if isinstance(item, Waiting) else item for item in before]
        self._sent += (item for item in batch if isinstance(item, Waiting))
        self._send()
        return done

    def _document(self, item: Waiting, answer: dict[str, Any]) -> Item:
        if (reason := answer.get("reason")) is None and not self._limit.allows(answer["text"]):
            reason = self._limit.reason
        if reason is not None:
            return replace(item.rejection, reason=reason)
        known = {name: value for name, value in item.document.meta.items() if value is not None}
        meta = {**item.document.meta, **answer["meta"], **known}
        self._fields.update(name for name, value in meta.items() if value is not None)
        document = replace(item.document, text=answer["text"], meta=meta)
        return document, to_json(document)

    def _send(self) -> None:
        if self._sent:
            if self._process is None:
                self._start()
            with suppress(ConnectionError):  # it has ended, which is seen where its answer is missing
                self._connection.send([(own.page.kind, own.page.data, own.page.charset, self._extractor)
                                       for own in self._sent])

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # -P: no file of the current folder, which may be data, takes the place of a module.
            self._process = subprocess.Popen([sys.executable, "-P", extractors.__file__, str(self._seconds),
                                              str(MEGABYTES)], stdin=theirs.fileno())
        self._connection = Connection(ours.detach())
        self._is_new = True

    def _answer(self) -> dict[str, Any]:
        """The answer about the first page that was sent; a `reason` if that page ends each process."""
        while True:
            try:
                answer: dict[str, Any] = orjson.loads(self._connection.recv_bytes())
            except (EOFError, ConnectionError):
                answer = {"reason": self._end()}
                if is_new := self._is_new:
                    self._sent.popleft()
                self._send()
                if not is_new:
                    continue
            else:
                self._is_new = False
                self._sent.popleft()
            return answer

    def _end(self) -> str:
        """Why the process has ended, if the page is the cause."""
        assert self._process is not None
        status = self._process.wait()
        self._connection.close()
        self._process = None
        memory = f"{MEGABYTES / 1024:g} GB of memory"
        if status == -signal.SIGPROF:
            return f"its text is not found within {self._seconds:g} s of CPU time"
        if status == extractors.OUT_OF_MEMORY:
            return f"to find its text takes more than {memory}"
        if -status in CRASHES:
            return f"the extractor crashes on it ({signal.Signals(-status).name}), or needs more than {memory}"
        raise UserError(f"The process that takes the text out of pages was ended (status {status}), as the "
                        f"kernel does when memory runs out (see dmesg). Set launch.processes lower and run the same "
                        f"command again; finished tasks are kept.")
