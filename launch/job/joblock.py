"""One job at a time for a stage: `launch/<stage>.lock` names the job that has it. Its changes of time are heartbeats.

Slurm's singleton separates jobs of one name, and the stage locks its folder. This lock also works where file locks do
not reach (other nodes), and where a node that Slurm has given up still runs. If Slurm does not answer, a job counts as
dead once its heartbeat has not changed for SILENT_S.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from drover.launch.processes import Say
from drover.launch.slurm.scheduler import WITH_NODES, Scheduler
from drover.pipeline.contract.locks import HEARTBEAT_S, SILENT_S, Heartbeats
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import read_record, write_json

HOLDING = (*WITH_NODES, "COMPLETING", "STAGE_OUT")
"""States of jobs that may have processes."""
CHAIN_S = 180.0
"""Seconds that a job waits for a job of its own chain to end: a link starts while the one before it is ending."""
RETRY_S = 3.0


@dataclass(frozen=True)
class Holder:
    """The start of a job that holds the lock. chain: its submission."""

    job: str
    restart: int
    host: str
    chain: str = ""


class JobLock:
    """The lock of a stage of the run in `run_folder`, for the job `job` in its start number `restart`."""

    def __init__(self, run_folder: Path, stage: str, job: str, restart: int, scheduler: Scheduler, chain: str = ""
                 ) -> None:
        self.run_folder = run_folder
        self.stage = stage
        self.scheduler = scheduler
        self.path = run_folder / "launch" / f"{stage}.lock"
        self.own = Holder(job, restart, platform.node(), chain)
        self._next_renewal = 0.0

    def acquire(self, say: Say, requests: Sequence[int] = ()) -> None:
        """Take the lock: at once from an earlier start of this job, from another job once it is dead.

        requests: signals that asked this job to end, in order of arrival.

        Raises:
            UserError: another job is alive and is not about to end as one of the same chain; or this one received a
                request to end.
        """
        until = time.monotonic() + CHAIN_S
        heartbeats = Heartbeats()
        waits = False
        while (held := self.holder()) is not None and held.job != self.own.job:
            known = self.scheduler.jobs([held.job])
            silent_s = heartbeats.silent_s(held.job, self._changed_at())
            if known:
                alive = known[held.job].state in HOLDING
                dead = not alive
            else:
                alive = waits and silent_s == 0
                dead = silent_s >= SILENT_S
            if dead:
                break
            ending = held.chain == self.own.chain != "" and time.monotonic() < until
            if requests or (alive and not ending):
                raise UserError(f"The job {held.job} on {held.host} works on {self.stage} of {self.run_folder}, so "
                                f"this one does nothing. Wait for it, or `scancel {held.job}`.")
            if not waits:
                say(f"waits for the end of the job {held.job} on {held.host}, which works on {self.stage}")
            waits = True
            time.sleep(RETRY_S)
        self._write()

    def renew(self, *, at_once: bool = False) -> bool:
        """Give a heartbeat if one is due; False once another start has taken the stage over."""
        if not at_once and time.monotonic() < self._next_renewal:
            return True
        self._next_renewal = time.monotonic() + HEARTBEAT_S  # also after a failure
        with suppress(OSError):  # such as a full disk: Slurm still knows that this job runs
            held = self.holder()
            if held is None:
                self._write()
            elif held != self.own:
                return False
            else:
                os.utime(self.path)
        return True

    def release(self) -> None:
        """Release the lock if this start still holds it."""
        with suppress(OSError):
            if self.holder() == self.own:
                self.path.unlink()

    def holder(self) -> Holder | None:
        """The holder of the lock; None if there is none, or if its record is truncated."""
        try:
            return read_record(self.path, Holder)
        except UserError:
            return None

    def _changed_at(self) -> int:
        """When the record last changed (in ns, by the file system's clock); 0 if it is gone."""
        try:
            return self.path.stat().st_mtime_ns
        except OSError:
            return 0

    def _write(self) -> None:
        write_json(self.path, asdict(self.own))
        self._next_renewal = time.monotonic() + HEARTBEAT_S
