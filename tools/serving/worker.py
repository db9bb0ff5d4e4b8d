"""The model behind the server: it generates the texts of all requests in one batch; further texts wait in a queue."""

from __future__ import annotations

import asyncio
import math
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from drover.model.generation.sampling import Sampling
from drover.model.generation.writer import Piece, Writer
from drover.model.llama import Llama
from drover.pipeline.core.files import Record


class RefusedError(Exception):
    """An error that answers a request. status, headers: of HTTP. kind, code, param: OpenAI's `type`, `code` and
    `param`."""

    def __init__(self, message: str, status: int = 400, kind: str = "invalid_request_error", code: str | None = None,
                 param: str | None = None, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.code, self.param, self.headers = status, kind, code, param, headers

    def body(self) -> Record:
        """The error in OpenAI's form."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


class Job:
    """The texts of one request: prompts and sampling settings. pieces: new pieces of the texts, with the text's number
    as key; an error is the last."""

    def __init__(self, texts: Sequence[tuple[list[int], Sampling]]) -> None:
        self.texts, self.cancelled = texts, False
        self.pieces: asyncio.Queue[Piece | RefusedError] = asyncio.Queue()


class Worker:
    """Generates texts while `run` runs. Its methods are called in the event loop; only forward passes run in a thread.

    Args:
        batch: largest number of texts that are generated at once.
        queue: largest number of texts that wait.
    """

    def __init__(self, model: Llama, token_bytes: Callable[[int], bytes], *, batch: int, queue: int) -> None:
        self._writer = lambda: Writer(model, token_bytes)
        self.batch, self.queue = batch, queue
        self.waiting: deque[tuple[Job, int]] = deque()
        self.running: dict[tuple[Job, int], float] = {}  # start time of each
        self._work = asyncio.Event()
        self._seconds = 1.0  # per text: a moving average

    def submit(self, job: Job) -> None:
        """Put a job into the queue. Raises RefusedError if there is no room for it, now or ever."""
        count, places, taken = len(job.texts), self.batch + self.queue, len(self.waiting) + len(self.running)
        if count > places:
            raise RefusedError(f"The request asks for {count} texts; this server takes {places} at once. Ask for "
                               f"fewer.", code="too_many_texts", param="n")
        if taken + count > places:
            wait = math.ceil(self._seconds * (taken + count - self.queue) / self.batch)
            raise RefusedError(f"{len(self.running)} texts are being generated and {len(self.waiting)} wait; the queue "
                               f"has no room for {count} more. Try again later.", status=429,
                               kind="rate_limit_error", code="queue_full", headers={"Retry-After": str(max(1, wait))})
        self.waiting.extend((job, number) for number in range(count))
        self._work.set()

    def cancel(self, job: Job) -> None:
        """Stop a job. Its places in the queue are free at once, its rows of the batch after the current pass."""
        job.cancelled = True
        self.waiting = deque(entry for entry in self.waiting if entry[0] is not job)
        self._work.set()

    async def run(self) -> None:
        """Generate what is submitted until this is cancelled. Jobs that still wait get an error then."""
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
                    except Exception as error:  # noqa: BLE001 - the server continues; the trace is on the console
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
        """Remove cancelled texts and start waiting ones, as far as there is room."""
        for key in [key for key in self.running if key[0].cancelled]:
            writer.drop(key)
            del self.running[key]
        while self.waiting and len(self.running) < self.batch:
            job, number = key = self.waiting.popleft()
            writer.begin(key, *job.texts[number])
            self.running[key] = time.monotonic()

    def _deliver(self, piece: Piece) -> None:
        job, number = piece.key
        if piece.end:
            self._seconds += 0.2 * (time.monotonic() - self.running.pop(piece.key) - self._seconds)
        if piece.end == "failed":
            self.cancel(job)
            job.pieces.put_nowait(RefusedError("The model's logits are NaN for this request.", status=500,
                                               kind="server_error"))
        else:
            job.pieces.put_nowait(replace(piece, key=number))

    def _fail(self, jobs: set[Job], message: str, status: int) -> None:
        for job in jobs:
            self.cancel(job)
            job.pieces.put_nowait(RefusedError(message, status=status, kind="server_error"))
        self.running = {key: began for key, began in self.running.items() if key[0] not in jobs}
