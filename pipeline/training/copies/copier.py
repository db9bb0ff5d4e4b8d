"""Copying checkpoints while training goes on: a thread on every rank sends the files that its rank wrote.

Rank 0 says what is copied, and when all have told it that their part is there, puts the object that makes the copy
count. One copy is made at a time; of checkpoints that come meanwhile the newest waits, the others are left out, which
is said. A failure is said, logged, and tried again after a while, or with the next checkpoint. It never stops training.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pipeline.config.training import CheckpointConfig
from pipeline.copies.checkpoints import RECORDS, CopiedCheckpoints, prefix_of
from pipeline.copies.claim import BEAT_S, Lock
from pipeline.copies.transfer import send
from pipeline.errors import UserError
from pipeline.files import output_record
from pipeline.parallel.host_channel import HostChannel
from pipeline.parallel.ranks import Ranks
from pipeline.records.checkpoints import MARKER, checkpoint_name, read_marker
from pipeline.training.async_saver import Saved
from pipeline.training.copies.beside import whole_records

PATIENCE = timedelta(days=365)
"""A rank waits for the next checkpoint, and rank 0 for the slowest, as long as it takes."""
AGAIN_S = (10.0, 30.0, 120.0, 600.0)
"""After a failure the copy is tried again after so long, if no newer checkpoint came; then with the last of these."""


@dataclass(frozen=True)
class Job:
    """A checkpoint to be copied: its step, when it was complete, and its files' records once its turn has come."""

    step: int
    complete: float
    files: tuple[dict[str, Any], ...] = ()


class Copier:
    """This rank's part of the copying. Made on all ranks alike; all else is called on rank 0 only.

    Args:
        lock: rank 0's right to copy there; None elsewhere.
        folder: the train stage's.
        path: from a step to the checkpoint's folder.

    Attributes:
        copied: the newest step whose copy is whole; -1 before there is one.
    """

    def __init__(self, copies: CopiedCheckpoints, lock: Lock | None, ranks: Ranks, config: CheckpointConfig,
                 folder: Path, path: Callable[[int], Path], say: Callable[[str], None], copied: int) -> None:
        self.copies, self.lock, self.ranks, self.config = copies, lock, ranks, config
        self.folder, self.path, self.say, self.copied = folder, path, say, copied
        self._channel = HostChannel(dataclasses.replace(ranks, patience=PATIENCE))
        self._changed = threading.Condition()  # never held while the store is asked: the loop looks here
        self._deciding = threading.Lock()  # held while a copy becomes whole, or is taken back
        self._waiting: Job | None = None
        self._running: Job | None = None
        self._left_out: list[int] = []
        self._failures = 0
        self._problem = ""
        self._ending = self._stopped = False
        self._ended: list[Saved] = []
        self._thread = threading.Thread(target=self._lead if ranks.leads else self._follow, daemon=True, name="copier")
        self._thread.start()

    def submit(self, step: int) -> None:
        """The checkpoint after `step` is complete: it is to be copied. Nothing is read here, where a failure would be
        the save's."""
        with self._changed:
            if self._waiting is not None:
                self._left_out.append(self._waiting.step)
            self._waiting, self._failures = Job(step, time.monotonic()), 0
            self._changed.notify_all()

    def needs(self, step: int) -> bool:
        """Whether the checkpoint after `step` is being copied or waits for it: it must not be removed."""
        with self._changed:
            return any(job is not None and job.step == step for job in (self._waiting, self._running))

    def ended(self) -> list[Saved]:
        """What has ended since this was last asked, for the log."""
        with self._changed:
            found, self._ended = self._ended, []
        return found

    def finish(self, step: int, limit_s: float) -> str:
        """Let the copy of the last checkpoint end, for so long; why there is none, or "" if there is."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._busy(), limit_s)
            if self.copied == step:
                return ""
            lost = self._lost()
            return lost or self._problem or f"it was not done after {limit_s:g} s."

    def stop(self) -> None:
        """Copy no more: what is being sent does not become a copy, and nothing is waited for."""
        with self._changed:
            self._stopped, self._ending, self._waiting = True, True, None
            self._changed.notify_all()

    def withdraw(self, after: int) -> list[str]:
        """Copy no more, and remove the copies of checkpoints after `after`: they may be made of damaged tokens. What
        there is to say."""
        with self._changed:
            self._stopped, self._waiting = True, None
            self._changed.notify_all()
        with self._deciding:
            try:
                if self.lock is not None and not self.lock.held():
                    return [self._lost()]
                gone = [step for step in self.copies.found().whole if step > after]
                for step in gone:
                    self.copies.remove(step)
            except UserError as error:
                return [f"Their copies in {self.copies.store.url} could not be removed ({error}); the next start does "
                        f"it, if it finds this folder."]
        return [f"Their copies in {self.copies.store.url} are removed: "
                f"{', '.join(map(checkpoint_name, gone))}."] if gone else []

    def _busy(self) -> bool:
        """Whether a copy is made or will be, in a run that ends: there a copy is tried `attempts` times."""
        given_up = self._failures >= self.config.attempts or self._stopped or self._lost()
        return self._running is not None or (self._waiting is not None and not given_up)

    def _lost(self) -> str:
        if self.lock is None or not self.lock.lost:
            return ""
        return f"{self.lock.lost}, and this run copies nothing there any more."

    def _refuse_lost(self) -> None:
        """UserError if the store is somebody else's by now. What others may see is changed only after this: a process
        that stood still for long hears of it here first."""
        if self.lock is not None and not self.lock.held():
            raise UserError(self._lost())

    def _refuse_stopped(self) -> None:
        """UserError if nothing is to be copied any more."""
        if self._stopped:
            raise UserError(self._lost() or "copying was stopped.")
        self._refuse_lost()

    def _lead(self) -> None:
        try:
            while (job := self._next()) is not None:
                self._copy(job)
            self._channel.same(None)
        except dist.DistError:  # all are about to end
            self._problem = "another rank is gone."
        except Exception as error:  # noqa: BLE001 - said, and told to who waits; training goes on
            self._problem = f"{type(error).__name__}: {error}."
            self.say(f"warning: copying to {self.copies.store.url} has ended, and no further checkpoint is copied "
                     f"({self._problem}) Training goes on; the next start copies the newest")
        finally:  # however it ended: who waits for a copy must not wait for this thread
            with self._changed:
                self._stopped, self._running = True, None
                self._changed.notify_all()

    def _copy(self, job: Job) -> None:
        """Copy one checkpoint. Every rank goes through both messages, whatever fails; where it must not begin, there
        are no files to send."""
        began, files = time.monotonic(), list[dict[str, Any]]()
        problem = self._tried(lambda: files.extend(self._begun(job)))
        told = self._channel.same(dataclasses.replace(job, files=tuple(files)))
        sent = self._channel.joined(self._sent(told), _first)
        self._note(job, problem or sent or self._tried(lambda: self._complete(told)), time.monotonic() - began)

    def _begun(self, job: Job) -> list[dict[str, Any]]:
        """The files to be sent, once the store has no copy of this step that counts: one whose objects are put again,
        one by one, would be neither the old nor the new."""
        files: list[dict[str, Any]] = read_marker(self.path(job.step))["files"]
        with self._deciding:
            self._refuse_stopped()
            if self.copied == job.step:
                self.copied = -1
            self.copies.reopen(job.step)
        return files

    def _follow(self) -> None:
        try:
            while (job := self._channel.same(None)) is not None:
                self._channel.joined(self._sent(job), _first)
        except dist.DistError:  # rank 0 has ended
            return

    def _next(self) -> Job | None:
        """The checkpoint to be copied next, once there is one; None when no other will be."""
        with self._changed:
            while True:
                due = self._due_in()
                if due is not None and due <= 0:
                    self._running, self._waiting = self._waiting, None
                    return self._running
                if self._ending and not self._busy():
                    return None
                self._changed.wait(None if due is None else min(due, BEAT_S))  # nobody tells of a lock that is lost

    def _due_in(self) -> float | None:
        """Seconds until the checkpoint that waits is to be copied; None where none is."""
        if self._waiting is None or self._stopped or self._lost():
            return None
        if self._ending and self._failures >= self.config.attempts:
            return None
        return 0.0 if not self._failures else self._again - time.monotonic()

    def _sent(self, job: Job) -> str:
        """Send this rank's part; why it failed, or ""."""
        mine = job.files[self.ranks.rank::self.ranks.world]
        return self._tried(lambda: send(self.copies.store, self.path(job.step), prefix_of(job.step), mine))

    def _complete(self, job: Job) -> None:
        """All ranks' parts are there: the marker, what goes on with it, and the word that makes it count."""
        store, prefix, folder = self.copies.store, prefix_of(job.step), self.path(job.step)
        self._refuse_lost()  # sending took long
        marker = output_record(folder, folder / MARKER)
        send(store, folder, prefix, [marker])
        beside = whole_records(self.folder, job.step)
        self._refuse_lost()
        for record, data in beside:
            store.put(f"{prefix}{RECORDS}{record['path']}", data)
        files = [*job.files, marker, *({**record, "path": f"{RECORDS}{record['path']}"} for record, _ in beside)]
        with self._deciding:
            self._refuse_stopped()
            self.copies.finish(job.step, files)
        self._bytes = sum(record["bytes"] for record in files)

    def _note(self, job: Job, problem: str, seconds: float) -> None:
        """What came of a copy, for the log and for who waits; old copies go."""
        url, name = self.copies.store.url, checkpoint_name(job.step)
        if problem:
            with self._changed:
                again = AGAIN_S[min(self._failures, len(AGAIN_S) - 1)]
                self._problem, self._failures, self._again = problem, self._failures + 1, time.monotonic() + again
                if self._waiting is None:
                    self._waiting = job
                else:  # a newer one came: it is copied at once
                    self._left_out.append(job.step)
                    self._failures = 0
                self._running = None
                self._ended.append(Saved("checkpoint_copy_failed", {"step": job.step, "error": problem,
                                                                    "seconds": round(seconds, 3)}))
                self._changed.notify_all()
                final = self._stopped
            if final:
                return
            self.say(f"warning: {name} could not be copied to {url}: {problem} Training goes on; it is tried again in "
                     f"{again:.0f} s, or with the next checkpoint")
            return
        pruned = self._tried(self._prune)
        if pruned:
            self.say(f"warning: old copies in {url} could not be removed ({pruned}); tried again after the next copy")
        with self._changed:
            left_out, self._left_out = self._left_out, []
            self.copied, self._running, self._problem, self._failures = job.step, None, "", 0
            self._ended.append(Saved("checkpoint_copied", {
                "step": job.step, "bytes": self._bytes, "seconds": round(seconds, 3),
                "behind_s": round(time.monotonic() - job.complete, 3), **({"left_out": left_out} if left_out else {})}))
            self._changed.notify_all()
        if left_out:
            self.say(f"{name} is copied to {url}; {', '.join(map(checkpoint_name, left_out))} had no time to be")

    def _prune(self) -> None:
        self._refuse_lost()
        self.copies.prune(self.config.keep, self.config.permanent_every)

    @staticmethod
    def _tried(action: Callable[[], Any]) -> str:
        """Why `action` failed, in words that other ranks can be told; "" if it did not."""
        try:
            action()
        except dist.DistError:
            raise
        except UserError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - said and logged; training goes on
            return f"{type(error).__name__}: {error}."
        return ""


def _first(problems: Sequence[str]) -> str:
    return next((problem for problem in problems if problem), "")
