"""The model behind the server: it writes the texts of all requests together, as many at once as its batch has rows."""

from __future__ import annotations

import asyncio
import math
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from drover.model.generation.sampling import Sampling
from drover.model.generation.writer import Piece, Writer
from drover.model.llama import Llama


class RefusedError(Exception):
    """A request that is answered with an error. status: of HTTP. kind, code, param: OpenAI's `type`, `code` and
    `param`. retry_after_s: when it may be worth trying again."""

    def __init__(self, message: str, status: int = 400, kind: str = "invalid_request_error", code: str | None = None,
                 param: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.code, self.param, self.retry_after_s = status, kind, code, param, retry_after_s

    def body(self) -> dict[str, Any]:
        """The error in OpenAI's form."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


class Job:
    """The texts of one request: prompts, and how they are continued. pieces: what is new of them, with the text's
    number as key; an error is the last."""

    def __init__(self, texts: Sequence[tuple[list[int], Sampling]]) -> None:
        self.texts, self.cancelled = texts, False
        self.pieces: asyncio.Queue[Piece | RefusedError] = asyncio.Queue()


class Worker:
    """Writes texts while `run` runs. All its methods are called in the event loop; only forward passes run in a thread.

    Args:
        batch: most texts that are written at once.
        queue: most texts that wait for that.
    """

    def __init__(self, model: Llama, token_bytes: Callable[[int], bytes], *, batch: int, queue: int) -> None:
        self._writer = lambda: Writer(model, token_bytes)
        self.batch, self.queue = batch, queue
        self.waiting: deque[tuple[Job, int]] = deque()
        self.running: dict[tuple[Job, int], float] = {}  # when each was begun
        self._work = asyncio.Event()
        self._seconds = 1.0  # that a text takes, of late

    def submit(self, job: Job) -> None:
        """Take a job in. Raises RefusedError where there is no place for it, now or ever."""
        count, places, taken = len(job.texts), self.batch + self.queue, len(self.waiting) + len(self.running)
        if count > places:
            raise RefusedError(f"The request asks for {count} texts; this server takes {places} at once. Ask for "
                               f"fewer.", code="too_many_texts", param="n")
        if taken + count > places:
            wait = math.ceil(self._seconds * (taken + count - self.queue) / self.batch)
            raise RefusedError(f"{len(self.running)} texts are being written and {len(self.waiting)} wait; the queue "
                               f"has no place for {count} more. Try again in a while.", status=429,
                               kind="rate_limit_error", code="queue_full", retry_after_s=max(1, wait))
        self.waiting.extend((job, number) for number in range(count))
        self._work.set()

    def cancel(self, job: Job) -> None:
        """Write a job no further: its places are free at once, its rows after the pass that is running."""
        job.cancelled = True
        self.waiting = deque(entry for entry in self.waiting if entry[0] is not job)
        self._work.set()

    async def run(self) -> None:
        """Write what is submitted until this is cancelled; whoever still waits is told then."""
        writer = self._writer()
        with ThreadPoolExecutor(1, "model") as thread:
            try:
                while True:
                    self._prepare(writer)
                    if not self.running:
                        self._work.clear()
                        await self._work.wait()
                        continue
                    try:
                        pieces = await asyncio.get_running_loop().run_in_executor(thread, writer.step)
                    except Exception as error:  # noqa: BLE001 - the server goes on; the console has the rest
                        traceback.print_exc()
                        self._fail({job for job, _ in self.running}, f"The model failed: {type(error).__name__}: "
                                   f"{error}", status=500)
                        writer = self._writer()
                        continue
                    for piece in pieces:
                        self._deliver(piece)
            finally:
                self._fail({job for job, _ in (*self.running, *self.waiting)}, "The server is closing.", status=503)

    def _prepare(self, writer: Writer) -> None:
        """Drop what was cancelled and begin what waits, as far as there is room."""
        for key in [key for key in self.running if key[0].cancelled]:
            writer.drop(key)
            del self.running[key]
        while self.waiting and len(self.running) < self.batch:
            job, number = key = self.waiting.popleft()
            writer.begin(key, *job.texts[number])
            self.running[key] = time.monotonic()

    def _deliver(self, piece: Piece) -> None:
        assert isinstance(piece.key, tuple)
        job, number = piece.key
        if piece.end:
            self._seconds += 0.2 * (time.monotonic() - self.running.pop(piece.key) - self._seconds)
        if piece.end == "failed":
            self.cancel(job)
            job.pieces.put_nowait(RefusedError("The model's scores are NaN for this request.", status=500,
                                               kind="server_error"))
        else:
            job.pieces.put_nowait(replace(piece, key=number))

    def _fail(self, jobs: set[Job], message: str, status: int) -> None:
        for job in jobs:
            self.cancel(job)
            job.pieces.put_nowait(RefusedError(message, status=status, kind="server_error"))
        self.running = {key: began for key, began in self.running.items() if key[0] not in jobs}
