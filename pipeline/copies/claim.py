"""Whose an object store's prefix is: the run whose checkpoints lie there, and the one process that copies to it now.

Both are objects that are put on condition (if there is none, if it is still the one that was read), so that of two who
come at once one is refused. Whoever holds the lock renews it again and again; one that is not renewed for long is dead.
No clocks are compared: who finds a lock watches it for so long.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Literal, TypedDict
from uuid import uuid4

from drover.pipeline.contract.manifest import Drifts, Identity
from drover.pipeline.errors import UserError
from drover.pipeline.files import parsed_json, typed
from drover.pipeline.stores.store import Changed, Entry, Exists, Missing, Store

RUN = "run.json"
LOCK = "lock.json"
FORMAT = 1


class Claim(TypedDict):
    """What is always there of run.json."""

    format: Literal[1]
    name: str
    id: str
    fingerprint: Identity
    drift: Drifts
BEAT_S = 15.0
"""How often the lock is renewed."""
DEAD_S = 75.0
"""A lock that is not renewed for so long is nobody's any more."""


class RunRecord:
    """The object that says whose checkpoints lie in a store.

    Attributes:
        content: name, id, fingerprint, drift and time; None where there is none.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.content: dict[str, Any] | None = None
        self._etag: str | None = None
        entry = store.head(RUN)
        if entry is None:
            return
        try:
            content = typed(parsed_json(store.read(RUN)), Claim)
        except ValueError as error:
            raise UserError(f"{store.url}/{RUN} is not what Drover puts there ({error}). Give another address to copy "
                            f"checkpoints to, or move away what is there.") from None
        self.content, self._etag = content, entry.etag

    def write(self, **content: Any) -> None:
        """Put it, if nobody else has since this was made; UserError if so."""
        content = {"format": FORMAT, **content, "at": _now()}
        data = (json.dumps(content, indent=1) + "\n").encode()
        try:
            self._etag = put_if(self.store, RUN, data, self._etag).etag
        except (Exists, Changed):
            raise UserError(f"Another run has begun to copy checkpoints to {self.store.url} at the same moment. Give "
                            f"each run an address of its own (train.checkpoint.copy_to).") from None
        self.content = content


class Lock:
    """The right to copy to a store, held by one process and renewed by a thread of it.

    Args:
        here: of the folder that is copied from, and of no copy of that folder. Another process of the same folder is
            not there any more: the stage's own lock (pipeline/contract/locks.py) lets no two work in it.

    Attributes:
        lost: what became of it, in words, if this process was thought dead; "" while it is held.
    """

    def __init__(self, store: Store, here: str, say: Callable[[str], None], *, beat_s: float = BEAT_S,
                 dead_s: float = DEAD_S) -> None:
        self.store, self.here, self.say, self.beat_s, self.dead_s = store, here, say, beat_s, dead_s
        self.lost = ""
        self._token, self._beats, self._etag = uuid4().hex, 0, ""
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self) -> None:
        """Take it; waits while somebody who holds it gives no sign of life.

        Raises:
            UserError: somebody else is copying there.
        """
        until, seen, said = 0.0, None, False
        while True:
            asked = time.monotonic()
            found = self._read()
            answered = time.monotonic()
            until += answered - asked  # while the store does not answer, nobody can give a sign of life
            if found is None:
                etag, holder = None, None
            else:
                etag, holder = found
            if holder is None or holder.get("here") == self.here or (seen == etag and answered > until):
                if self._put(etag):
                    break
                continue  # somebody was quicker
            if seen is not None and seen != etag:
                raise UserError(f"{self.store.url} is in use: {describe(holder)} copies checkpoints there. Wait for "
                                f"it or end it, or give this run another train.checkpoint.copy_to.")
            if not said:
                self.say(f"{self.store.url} is locked by {describe(holder)}; waiting up to {self.dead_s:.0f} s for a "
                         f"sign of life")
                until = answered + self.dead_s
            seen, said = etag, True
            time.sleep(min(1.0, self.beat_s / 2))
        if said:
            self.say(f"took over {self.store.url}: there was none")
        self._thread = threading.Thread(target=self._renew, daemon=True, name="copy-lock")
        self._thread.start()

    def release(self) -> None:
        """Give it up; what fails then does no harm but a wait for the next who wants it."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(self.beat_s)
        if self._etag and not self.lost:
            try:
                if (found := self._read()) is not None and found[1].get("token") == self._token:
                    self.store.delete([LOCK])
            except UserError as error:
                self.say(f"the lock at {self.store.url} could not be removed ({error}); another process will wait "
                         f"{self.dead_s:.0f} s before it takes over")

    def held(self) -> bool:
        """Whether it is still ours, by what lies in the store now; where not, `lost` says so from then on.

        Raises:
            UserError: the store does not answer.
        """
        return self._judge(self._read())

    def _judge(self, found: tuple[str, dict[str, Any]] | None) -> bool:
        if found is None:
            self.lost = self.lost or f"The lock at {self.store.url} was removed"
        elif found[1].get("token") != self._token:
            self.lost = self.lost or f"{describe(found[1])} took over {self.store.url}"
        return not self.lost

    def _renew(self) -> None:
        while not self._over.wait(self.beat_s):
            try:
                if self._put(self._etag):
                    continue
                found = self._read()
                if not self._judge(found):
                    return
                assert found is not None
                self._etag = found[0]  # ours after all: the answer to an earlier beat was lost
            except UserError:
                continue  # the store may be back for the next beat; what is copied meanwhile fails by itself

    def _put(self, etag: str | None) -> bool:
        """Put the lock if it is still the one with `etag` (None: none); whether it is ours now."""
        self._beats += 1
        data = json.dumps({"host": platform.node(), "process": os.getpid(), "job": os.environ.get("SLURM_JOB_ID", ""),
                           "here": self.here, "token": self._token, "beat": self._beats, "at": _now()}).encode()
        try:
            self._etag = put_if(self.store, LOCK, data, etag).etag
        except (Exists, Changed):
            return False
        return True

    def _read(self) -> tuple[str, dict[str, Any]] | None:
        """ETag and content of the lock; None if there is none."""
        entry = self.store.head(LOCK)
        if entry is None:
            return None
        try:
            return entry.etag, typed(parsed_json(self.store.read(LOCK)), dict[str, Any])
        except Missing:
            return None
        except ValueError:
            return entry.etag, {}


def put_if(store: Store, path: str, data: bytes, etag: str | None) -> Entry:
    """Put an object if there is none (`etag` None), or if the one with `etag` is still there; its entry.

    Where the answer is lost on its way, what is there tells what came of it: the store's client may ask again, and be
    refused because of what it has put itself.

    Raises:
        Exists, Changed: there is another.
        UserError: the store does not answer.
    """
    try:
        return store.put(path, data, only_new=True) if etag is None else store.put(path, data, replaces=etag)
    except UserError:
        entry = store.head(path)
        with suppress(Missing):
            if entry is not None and store.read(path) == data:
                return entry
        raise


def describe(holder: dict[str, Any]) -> str:
    """Who holds a lock, in words."""
    job = f", Slurm job {holder['job']}" if holder.get("job") else ""
    heard = holder.get("at", "an unknown time")
    return f"process {holder.get('process', '?')} on {holder.get('host', '?')}{job} (last heard of at {heard})"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
