"""One job at a time for a stage: `launch/<stage>.lock` names the job that has it, with a heartbeat.

Slurm's singleton separates jobs of one name, and the stage locks its folder. This lock also works where file locks do
not reach (other nodes), and where a node that Slurm has given up still runs. If Slurm does not answer, a job counts as
dead once its heartbeat has not changed for SILENT_S.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from drover.launch.processes import Say
from drover.launch.slurm.scheduler import WITH_NODES, Scheduler
from drover.pipeline.contract.claims import BEAT_S, SILENT_S, Heartbeats
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import lock_file, read_record, write_json

HOLDING = (*WITH_NODES, "COMPLETING", "STAGE_OUT")
"""States of jobs that may have processes."""
CHAIN_S = 180.0
"""Seconds that a job waits for a job of its own chain to end: a link starts while the one before it is ending."""
LOOK_S = 3.0


@dataclass(frozen=True)
class Holder:
    """The start of a job that holds the lock. beat: number of its heartbeats. chain: its submission."""

    job: str
    restart: int
    host: str
    chain: str = ""
    beat: int = 0


class JobLock:
    """The lock of a stage of the run in `run_folder`, for the job `job` in its start number `restart`."""

    def __init__(self, run_folder: Path, stage: str, job: str, restart: int, scheduler: Scheduler, chain: str = ""
                 ) -> None:
        self.path, self.stage, self.scheduler = run_folder / "launch" / f"{stage}.lock", stage, scheduler
        self._guard = self.path.with_suffix(".guard")
        self.own = Holder(job, restart, platform.node(), chain)
        self._next = 0.0

    def acquire(self, say: Say, asked: Sequence[int] = ()) -> None:
        """Take the lock: at once from an earlier start of this job, from another job once it is dead.

        asked: signals that asked this job to end, in order of arrival.

        Raises:
            UserError: another job is alive and is not about to end as one of the same chain; or this one received a
                request to end.
        """
        began, first, others = time.monotonic(), True, Heartbeats()
        while True:
            with self._guarded():
                held = self.holder()
                if held is None or held.job == self.own.job:
                    return self._write()
                known = self.scheduler.jobs([held.job])
                silent_s = others.silent_s(held.job, held)
                alive = known[held.job].state in HOLDING if known else not first and silent_s == 0
                if not alive and (known or silent_s >= SILENT_S):
                    return self._write()
            ending = held.chain == self.own.chain != "" and time.monotonic() - began < CHAIN_S
            if asked or (alive and not ending):
                run = self.path.parent.parent
                raise UserError(f"The job {held.job} on {held.host} works on {self.stage} of {run}, so this one does "
                                f"nothing. Wait for it, or `scancel {held.job}`.")
            if first:
                say(f"waits for the end of the job {held.job} on {held.host}, which works on {self.stage}")
            first = False
            time.sleep(LOOK_S)

    def beat(self, *, at_once: bool = False) -> bool:
        """Write a heartbeat if one is due; False once another start has taken the stage over."""
        if not at_once and time.monotonic() < self._next:
            return True
        self._next = time.monotonic() + BEAT_S  # also after a failure
        with suppress(OSError), self._guarded():  # such as a full disk: Slurm still knows that this job runs
            if not self._is_free():
                return False
            self._write()
        return True

    def release(self) -> None:
        """Release the lock if this start still holds it."""
        with suppress(OSError), self._guarded():
            if self._is_free():
                self.path.unlink(missing_ok=True)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Lock the record's own file, if the file system has locks, so that reading and writing cannot be interleaved.
        """
        self._guard.parent.mkdir(parents=True, exist_ok=True)
        with open(self._guard, "a") as guard:
            lock_file(guard.fileno(), wait=True)
            yield

    def holder(self) -> Holder | None:
        """The holder of the lock; None if there is none, or if its record is truncated."""
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
        self.own = replace(self.own, beat=self.own.beat + 1)
        write_json(self.path, asdict(self.own))
