"""The thread that runs the model. What waits is begun as rows of its batch become free, and goes on together."""

from __future__ import annotations

import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

from model.generation.sampling import Sampling
from model.generation.writer import Piece, Writer
from model.llama import Llama
from tools.serving.asked import RefusedError


class Job:
    """The texts of one request.

    Args:
        prompts, samplings: of each text.
        deliver: called in the worker's thread with each piece, whose key is the text's number, or with an error, after
            which nothing comes.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling],
                 deliver: Callable[[Piece | RefusedError], None]) -> None:
        self.prompts, self.samplings, self.deliver = prompts, samplings, deliver
        self.cancelled = False


class Worker:
    """Runs jobs on one model until it is closed.

    Args:
        batch: most texts that are written at once.
        queue: most texts that wait for that.
    """

    def __init__(self, model: Llama, token_bytes: Callable[[int], bytes], *, batch: int, queue: int) -> None:
        self._model, self._token_bytes = model, token_bytes
        self.batch, self.queue = batch, queue
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Job, int]] = deque()
        self._running: dict[tuple[Job, int], float] = {}  # when each was begun
        self._closing = False
        self._seconds = 1.0  # that a text takes, of late
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Take a job in. Raises RefusedError where there is no place for it, now or ever."""
        count = len(job.prompts)
        if count > self.batch + self.queue:
            raise RefusedError(f"The request asks for {count} texts; this server takes {self.batch + self.queue} at "
                               f"once. Ask for fewer.", code="too_many_texts", param="n")
        with self._changed:
            if self._closing:
                raise RefusedError("The server is closing.", status=503, kind="server_error")
            taken = len(self._waiting) + len(self._running)
            if taken + count > self.batch + self.queue:
                wait = math.ceil(self._seconds * (taken + count - self.queue) / self.batch)
                raise RefusedError(f"{len(self._running)} texts are being written and {len(self._waiting)} wait; the "
                                   f"queue has no place for {count} more. Try again in a while.", status=429,
                                   kind="rate_limit_error", code="queue_full", retry_after_s=max(1, wait))
            self._waiting.extend((job, number) for number in range(count))
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Nobody waits for a job any more: its places are free at once, its rows after the pass that is running."""
        with self._changed:
            job.cancelled = True
            self._waiting = deque(entry for entry in self._waiting if entry[0] is not job)
            self._changed.notify()

    def counts(self) -> dict[str, int]:
        """How many texts are being written, and how many wait."""
        with self._changed:
            return {"running": len(self._running), "waiting": len(self._waiting)}

    def close(self) -> None:
        """End the thread; whoever still waits is told."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        writer = Writer(self._model, self._token_bytes)
        while self._prepared(writer):
            try:
                pieces = writer.step()
            except Exception as error:  # noqa: BLE001 - the server goes on; who asked is told, the console has the rest
                traceback.print_exc()
                self._tell_all(RefusedError(f"The model failed: {type(error).__name__}: {error}", status=500,
                                            kind="server_error"))
                writer = Writer(self._model, self._token_bytes)
                continue
            for piece in pieces:
                self._deliver(piece)
        with self._changed:
            left = {job for job, _ in (*self._waiting, *self._running)}
            self._waiting.clear()
            self._running.clear()
        for job in left:
            job.deliver(RefusedError("The server is closing.", status=503, kind="server_error"))

    def _prepared(self, writer: Writer) -> bool:
        """Wait for work; drop what was cancelled and begin what waits, as far as there is room. False at the end."""
        with self._changed:
            while not (self._closing or self._waiting or self._running):
                self._changed.wait()
            for key in [key for key in self._running if key[0].cancelled]:
                writer.drop(key)
                del self._running[key]
            while self._waiting and len(self._running) < self.batch:
                job, number = key = self._waiting.popleft()
                writer.begin(key, job.prompts[number], job.samplings[number])
                self._running[key] = time.monotonic()
            return not self._closing

    def _deliver(self, piece: Piece) -> None:
        key = cast(tuple[Job, int], piece.key)
        job, number = key
        if piece.end:
            with self._changed:
                self._seconds += 0.2 * (time.monotonic() - self._running.pop(key) - self._seconds)
        if job.cancelled:
            return
        if piece.end == "failed":
            self.cancel(job)
            job.deliver(RefusedError("The model's scores are NaN for this request.", status=500, kind="server_error"))
        else:
            job.deliver(replace(piece, key=number))

    def _tell_all(self, error: RefusedError) -> None:
        with self._changed:
            jobs = {job for job, _ in self._running}
            self._running.clear()
            self._waiting = deque(entry for entry in self._waiting if entry[0] not in jobs)
        for job in jobs:
            job.deliver(error)
