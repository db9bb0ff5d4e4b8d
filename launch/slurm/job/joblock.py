"""One job at a time for a stage: `launch/<stage>.lock` names the job that has it, with a heartbeat.

Slurm's singleton keeps jobs of one name apart, and the stage locks its folder; this one also holds where file locks do
not reach (other nodes) and where a node that Slurm gave up still runs.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from launch.slurm.chain import guarded
from pipeline.errors import UserError
from pipeline.files import read_record, write_json

BEAT_S = 30.0
SILENT_S = 300.0
"""A heartbeat older than this is a dead job's, where Slurm does not say."""
HOLDING = ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
"""States of a job that may have processes."""
CHAIN_S = 180.0
"""How long a job waits for one of its own chain that is about to end: links start as soon as the last one is ending."""
LOOK_S = 3.0


@dataclass(frozen=True)
class Holder:
    """The start of a job that has a stage. at: its last heartbeat, in seconds since 1970; chain: its submission."""

    job: str
    restart: int
    host: str
    at: float
    chain: str = ""

    def alive(self, state: str | None) -> str:
        """Why this job must be thought to run; empty if it need not. state: as of `JobLock.state_of`."""
        silent = time.time() - self.at
        if state is None:
            return f"Slurm does not answer; last heard of {silent:.0f} s ago" if silent < SILENT_S else ""
        return f"Slurm says {state}" if state in HOLDING else ""


class JobLock:
    """The lock of a stage of the run in `run_folder`, for the job `job` in its start number `restart`.

    state_of: the state of a job in the queue, "" if it is not there, None if Slurm does not answer.
    """

    def __init__(self, run_folder: Path, stage: str, job: str, restart: int,
                 state_of: Callable[[str], str | None], chain: str = "") -> None:
        self.path, self.stage, self.state_of = run_folder / "launch" / f"{stage}.lock", stage, state_of
        self.own = Holder(job, restart, platform.node(), 0.0, chain)
        self._next = 0.0

    def acquire(self, say: Callable[[str], None] = lambda text: None, ends: Callable[[], bool] = lambda: False) -> None:
        """Take the lock; UserError while another job has it. One of the same chain that is ending is waited for, unless
        `ends`."""
        until, told = time.monotonic() + CHAIN_S, False
        while True:
            with self._guarded():
                held = self.holder()
                state = self.state_of(held.job) if held is not None and held.job != self.own.job else ""
                if held is None or not (why := held.alive(state)):
                    return self._write()
            ending = held.chain == self.own.chain != "" and state != "RUNNING"
            if not ending or time.monotonic() > until or ends():
                raise UserError(f"The job {held.job} on {held.host} works on {self.stage} of {self.path.parent.parent} "
                                f"({why}), so this one does nothing. Wait for it, or `scancel {held.job}`.")
            if not told:
                say(f"waits for the end of this chain's job {held.job} ({why})")
            told = True
            time.sleep(LOOK_S)

    def beat(self, *, at_once: bool = False) -> bool:
        """Say now and then that this job lives; False once another start has taken the stage over."""
        if not at_once and time.monotonic() < self._next:
            return True
        self._next = time.monotonic() + BEAT_S
        with suppress(OSError), self._guarded():  # a full disk, say: while the job runs nobody takes the stage over
            if not self._is_free():
                return False
            self._write()
        return True

    def release(self) -> None:
        """Give the lock up, if it is still ours."""
        with suppress(OSError), self._guarded():
            if self._is_free():
                self.path.unlink(missing_ok=True)

    def holder(self) -> Holder | None:
        """Who has the lock; None for nobody, or a torn record."""
        try:
            return read_record(self.path, Holder)
        except UserError:
            return None

    def _is_free(self) -> bool:
        """Whether no other start holds the lock."""
        held = self.holder()
        return held is None or (held.job, held.restart) == (self.own.job, self.own.restart)

    def _write(self) -> None:
        self._next = time.monotonic() + BEAT_S
        write_json(self.path, asdict(replace(self.own, at=time.time())))

    def _guarded(self) -> AbstractContextManager[None]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return guarded(self.path.with_suffix(".guard"))
