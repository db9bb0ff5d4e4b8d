"""End a rank that shows no sign of life for too long, and write down first where it was.

It waits a while before it ends, so that the other ranks write too: the first to end takes the others along.
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

from drover.pipeline.config.guarding import FIRST
from drover.pipeline.config.tree import Config
from drover.pipeline.contract.stage_work import Work
from drover.pipeline.core.console import duration
from drover.pipeline.core.files import renamed
from drover.pipeline.parallel.ranks import PATIENCE
from drover.pipeline.records.hangs import HUNG_STATUS, IN_FULL, HungRank, hang_folder, write_record
from drover.pipeline.training.rank_agreement import node_name

SLACK = timedelta(minutes=10)
"""So much longer than the watchdog a collective waits: the watchdog knows more of what hangs."""
SLOWEST = 10
"""So many median steps without a sign of life are no hang yet."""
STEP_S, COMPILED_STEP_S = 100.0, 300.0
"""The longest silence within a step, unless 10 median steps are longer: every rank has its batch by then, so none waits
for a disk or a store. Where blocks are compiled, a rank may meet a shape for which it has no graph, and all others wait
for it."""
TOGETHER_S = 20.0
"""For writing, since the file system may be what hangs, and for the other ranks to write too: a launcher ends them all
once one has ended."""


def longest_wait(config: Config) -> timedelta:
    """How long a rank waits for others in a collective: as configured, or longer than the watchdog waits for a sign of
    life, for which a first step has the most time."""
    minutes, hang = config.parallel.timeout_minutes, config.train.guards.hang_minutes
    if minutes is not None:
        return timedelta(minutes=minutes)
    return max(PATIENCE, timedelta(minutes=FIRST * hang) + SLACK) if hang is not None else PATIENCE


class Watchdog:
    """Watches this rank's main thread from another one.

    Time is counted by how often this thread has waited: a process that was suspended as a whole has not been hanging.

    Args:
        folder: where to write (`hangs.hang_folder`).
        limit_s: seconds of silence; None: nothing is watched.
        ranks: how many there are.

    Attributes:
        step_s: STEP_S or COMPILED_STEP_S.
    """

    def __init__(self, folder: Path, rank: int, limit_s: float | None, ranks: int = 1) -> None:
        self.folder, self.rank, self.step, self._ranks = folder, rank, 0, ranks
        self._limit_s = math.inf if limit_s is None else limit_s
        self._steps: deque[float] = deque(maxlen=101)
        self._over, self.step_s, self._silent = threading.Event(), STEP_S, 0.0
        self.pulse()
        self._seen = self._allowed

    @classmethod
    def of(cls, work: Work) -> Watchdog:
        """As configured, for this rank of the stage."""
        minutes, rank = work.config.train.guards.hang_minutes, int(os.environ.get("RANK", "0"))
        return cls(hang_folder(work.folder), rank, None if minutes is None else 60 * minutes,
                   int(os.environ.get("WORLD_SIZE", "1")))

    def __enter__(self) -> Watchdog:
        if self.rank == 0 and self.folder.is_dir():  # outside of Slurm all starts have one name
            renamed(self.folder, f"{self.folder.name}.earlier")
        if self._limit_s < math.inf:
            threading.Thread(target=self._watch, daemon=True, name="watchdog").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _allow(self, seconds: float) -> None:
        """A sign of life; so many seconds of silence from now on are no hang. A new object each time, which the thread
        tells from the one before."""
        self._allowed = [max(seconds, SLOWEST * statistics.median(self._steps or [0.0]))]

    def pulse(self, *, first: bool = False) -> None:
        """A sign of life; ends a pause. first: what comes now is done for the first time, so it may have to compile."""
        self._first = FIRST if first or not self._steps else 1
        self._allow(self._first * self._limit_s)

    def step_begins(self) -> None:
        """All ranks have their batch: until the next pulse they only compute and exchange."""
        self._allow(self._first * self._limit_s if self._first > 1 else min(self._limit_s, self.step_s))

    def finished(self, step: int, seconds: float) -> None:
        """Step number `step` is done, in so many seconds."""
        self.step = step
        self._steps.append(seconds)
        self.pulse()

    def pause(self) -> None:
        """What comes now may take as long as it takes, or has a limit of its own; until the next pulse."""
        self._allow(math.inf)

    @contextmanager
    def paused(self, meet: Callable[[], None]) -> Iterator[None]:
        """What is done within may take as long as it takes. `meet` then waits for all ranks, for as long as their
        process group lets it: a quick one that waited for a slow one in its next step would be taken to hang."""
        self.pause()
        yield
        meet()
        self.pulse()

    def hangs_for(self, interval: float) -> float | None:
        """Seconds of silence, where they are a hang; to be asked every `interval` seconds."""
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
        print(f"\ntrain hangs on rank {self.rank} ({node_name()}): no sign of life for {duration(silent)} after "
              f"step {self.step}. Where it was is in {self.folder}; it ends now (status {HUNG_STATUS}).",
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
    """Where the main thread is: `file:line function`, innermost last."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    # Not traceback's summaries: they look at files, which may be what hangs.
    calls = [f"{frame.f_code.co_filename}:{line} {frame.f_code.co_name}" for frame, line in traceback.walk_stack(frame)]
    return tuple(calls[::-1])


def flight_records() -> dict[str, bytes]:
    """What torch's flight recorder has of the last collectives, by file ending; {} where it has none."""
    backend = getattr(sys.modules.get("torch._C"), "_distributed_c10d", None)
    found = {}
    for kind, name in (("pickle", "_dump_nccl_trace"), ("json", "_dump_fr_trace_json")):
        content = getattr(backend, name)() if hasattr(backend, name) else b""
        if content:
            found[kind] = content.encode() if isinstance(content, str) else content
    return found
