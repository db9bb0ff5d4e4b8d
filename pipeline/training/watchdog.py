"""End a rank that makes no progress for too long, and first write down where it was.

It waits a while before it ends, so that the other ranks write too: once one rank has ended, the launcher ends all.
"""

from __future__ import annotations

import faulthandler
import math
import os
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from drover.pipeline.config.training import FIRST
from drover.pipeline.config.tree import Config
from drover.pipeline.contract.stage_work import Work
from drover.pipeline.core.console import duration
from drover.pipeline.core.files import renamed
from drover.pipeline.parallel.ranks import PATIENCE
from drover.pipeline.records.hangs import HUNG_STATUS, IN_FULL, HungRank, hang_folder, write_record
from drover.pipeline.training.rank_agreement import node_name

SLACK = timedelta(minutes=10)
"""A collective's timeout is this much longer than the watchdog's: the watchdog reports more about a hang."""
SLOWEST = 10
"""Silence as long as this many median steps is not a hang yet."""
STEP_S, COMPILED_STEP_S = 100.0, 300.0
"""The longest silence within a step, unless 10 median steps are longer. Within a step every rank has its batch, so none
waits for a disk or a store. With compiled blocks a rank may have to compile for a new shape while all others wait."""
TOGETHER_S = 20.0
"""Time limit for writing, since the file system may be the cause of the hang, and time for the other ranks to write
too: the launcher ends them all once one has ended."""


def longest_wait(config: Config) -> timedelta:
    """The timeout of collectives: as configured, or longer than the watchdog's longest limit, which is that of a first
    step."""
    minutes = config.parallel.timeout_minutes
    hang = config.train.guards.hang_minutes
    if minutes is not None:
        return timedelta(minutes=minutes)
    return max(PATIENCE, timedelta(minutes=FIRST * hang) + SLACK) if hang is not None else PATIENCE


class Watchdog:
    """Watches this rank's main thread from another one.

    It counts its own waits instead of the time, so that a suspended process does not count as hung.

    Args:
        folder: for the records (`hangs.hang_folder`).
        limit_s: the longest silence in seconds; None: nothing is watched.
        ranks: the number of ranks.

    Attributes:
        step_s: STEP_S or COMPILED_STEP_S.
    """

    def __init__(self, folder: Path, rank: int, limit_s: float | None, ranks: int = 1) -> None:
        self.folder = folder
        self.rank = rank
        self.step = 0
        self._ranks = ranks
        self._limit_s = math.inf if limit_s is None else limit_s
        self._steps: deque[float] = deque(maxlen=101)
        self._over = threading.Event()
        self.step_s = STEP_S
        self._silent = 0.0
        self.pulse()
        self._seen = self._allowed

    @classmethod
    def of(cls, work: Work) -> Watchdog:
        """The configured watchdog of this rank."""
        minutes = work.config.train.guards.hang_minutes
        rank = int(os.environ.get("RANK", "0"))
        return cls(hang_folder(work.folder), rank, None if minutes is None else 60 * minutes,
                   int(os.environ.get("WORLD_SIZE", "1")))

    def __enter__(self) -> Watchdog:
        if self.rank == 0 and self.folder.is_dir():  # outside Slurm all starts use the same folder
            renamed(self.folder, f"{self.folder.name}.earlier")
        if self._limit_s < math.inf:
            threading.Thread(target=self._watch, daemon=True, name="watchdog").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _allow(self, seconds: float) -> None:
        """Note progress; from now on allow this many seconds of silence. It makes a new list each time, so that the
        thread notices the change."""
        self._allowed = [max(seconds, SLOWEST * statistics.median(self._steps or [0.0]))]

    def pulse(self, *, first: bool = False) -> None:
        """Note progress; ends a pause. first: the next work is done for the first time, so it may have to compile."""
        self._first = FIRST if first or not self._steps else 1
        self._allow(self._first * self._limit_s)

    def step_begins(self) -> None:
        """All ranks have their batch: until the next pulse they only compute and communicate."""
        self._allow(self._first * self._limit_s if self._first > 1 else min(self._limit_s, self.step_s))

    def finished(self, step: int, seconds: float) -> None:
        """Step number `step` is done and took `seconds`."""
        self.step = step
        self._steps.append(seconds)
        self.pulse()

    def pause(self) -> None:
        """Allow any time until the next pulse, for work without a limit or with its own."""
        self._allow(math.inf)

    @contextmanager
    def paused(self, meet: Callable[[], None]) -> Iterator[None]:
        """Allow any time for the work within. Afterwards `meet` waits for all ranks, up to their process group's
        timeout: otherwise a fast rank that waits for a slow one in its next step would count as hung."""
        self.pause()
        yield
        meet()
        self.pulse()

    def hangs_for(self, interval: float) -> float | None:
        """Seconds of silence, if they are a hang. Must be called every `interval` seconds."""
        allowed = self._allowed
        self._silent, self._seen = self._silent + interval if allowed is self._seen else 0.0, allowed
        return self._silent if self._silent > allowed[0] else None

    def _watch(self) -> None:
        interval = min(1.0, self._limit_s / 10)
        while not self._over.wait(interval):
            silent = self.hangs_for(interval)
            if silent is not None and not self._over.is_set():
                self._end(silent)

    def _end(self, silent: float) -> None:
        writing = threading.Thread(target=self._write, args=(silent,), daemon=True)
        writing.start()
        if self._ranks > 1:
            time.sleep(TOGETHER_S)
        writing.join(TOGETHER_S)
        os._exit(HUNG_STATUS)

    def _write(self, silent: float) -> None:
        print(f"\ntrain hangs on rank {self.rank} ({node_name()}): no progress for {duration(silent)} after "
              f"step {self.step}. Its stack is in {self.folder}; it ends now (status {HUNG_STATUS}).",
              file=sys.stderr, flush=True)
        write_record(self.folder, HungRank(self.rank, node_name(), self.step, round(silent, 3), round(time.time(), 3),
                                           main_stack()))
        if self.rank >= IN_FULL:
            return
        with open(self.folder / f"rank{self.rank}.stacks", "w", encoding="utf-8") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        for kind, content in flight_records().items():
            (self.folder / f"rank{self.rank}.flight.{kind}").write_bytes(content)


def main_stack() -> tuple[str, ...]:
    """The main thread's stack: `file:line function`, innermost last."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    # Not traceback's summaries: they read files, which may be what hangs.
    calls = [f"{frame.f_code.co_filename}:{line} {frame.f_code.co_name}" for frame, line in traceback.walk_stack(frame)]
    return tuple(calls[::-1])


def flight_records() -> dict[str, bytes]:
    """torch's flight recordings of the last collectives, by file ending; {} if it has none."""
    backend = getattr(sys.modules.get("torch._C"), "_distributed_c10d", None)
    result = {}
    for kind, name in (("pickle", "_dump_nccl_trace"), ("json", "_dump_fr_trace_json")):
        content = getattr(backend, name)() if hasattr(backend, name) else b""
        if content:
            result[kind] = content.encode() if isinstance(content, str) else content
    return result
