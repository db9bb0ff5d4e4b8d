"""Upload checkpoints to an object store in the background (`train.checkpoint.copy_to`), and fetch them at a start.

Every rank uploads a share of the files. Rank 0 decides what is uploaded and puts copy.json last; a copy without it does
not count. One upload runs at a time. If several checkpoints arrive meanwhile, only the newest waits, and the others are
not uploaded. A failed upload is logged, and retried after a while or replaced by the next checkpoint. It never stops
training.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import shutil
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict
from uuid import uuid4

import torch.distributed as dist

from drover.pipeline.contract.manifest import STARTED, Fingerprint, change_start, differences
from drover.pipeline.contract.stage_work import Work
from drover.pipeline.contract.stages import STAGES
from drover.pipeline.core.background import BackgroundWorker
from drover.pipeline.core.console import Say
from drover.pipeline.core.errors import UserError, listed
from drover.pipeline.core.files import (
    Outputs,
    atomic_file,
    output_record,
    read_record,
    renamed,
    sha256_file,
    typed,
    write_sealed,
)
from drover.pipeline.parallel.host_channel import HostChannel
from drover.pipeline.records.checkpoints import (
    CHECKPOINTS,
    COPYING,
    MARKER,
    TrainingProgress,
    checkpoint_name,
    complete_checkpoints,
    read_marker,
)
from drover.pipeline.records.metrics import ROLLBACKS
from drover.pipeline.records.weight_files import FILE
from drover.pipeline.storage.mirror import COPY, OWNER, DamagedCopyError, Mirror, Owner, OwnerRecord, describe
from drover.pipeline.storage.store import Missing, Store, preflight
from drover.pipeline.training.checkpoints import Checkpoints, Event, in_turn, tried
from drover.pipeline.training.hooks import Hook

if TYPE_CHECKING:
    from drover.pipeline.training.loop import Loop

OF_STEPS = ("metrics.jsonl", "samples.jsonl")
LOGS = (*OF_STEPS, "events.jsonl")
"""Files that only grow: while one is being written, its complete lines are copied."""
OTHERS = (ROLLBACKS, FILE, "wandb.json", "mlflow.json")
"""The last two hold the run's IDs in W&B and MLflow."""
SET_ASIDE = "set-aside-"
"""Prefix with which a user renames the folder of a checkpoint from which training must not continue."""
RECORDS = "records/"
"""Folder below a step for the train folder's records that belong to the checkpoint."""
RETRY_S = (10.0, 30.0, 120.0, 600.0)
"""Seconds before a failed upload is retried, unless a newer checkpoint came; from then on the last of these."""
END_RETRY_S = 10.0
"""The same at the end of training, which waits for the last upload."""
SLACK = timedelta(minutes=5)
"""Rank 0 stops waiting for the last upload this long before a collective times out."""
PATIENCE = timedelta(days=365)
"""The longest time that ranks wait for the next upload, and rank 0 for the slowest rank."""


@dataclass(frozen=True)
class StoredCopies:
    """The content of the store: steps with a complete copy, and the paths of incomplete ones, by step."""

    complete: list[int]
    unfinished: dict[int, list[str]]


class CopiedCheckpoints:
    """Uploaded checkpoints in one object store: a mirror for each step, under one owner."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def of(self, step: int) -> Mirror:
        """The copy of the checkpoint after `step`."""
        return Mirror(Store(self.store.url_of(checkpoint_name(step))))

    def list(self) -> StoredCopies:
        """The content of the store, in the order of steps; UserError if it cannot be listed."""
        objects: dict[int, list[str]] = {}
        for entry in self.store.list():
            name, _, rest = entry.path.partition("/")
            number = name.removeprefix("step-")
            if rest and name.startswith("step-") and number.isdigit():
                objects.setdefault(int(number), []).append(entry.path)
        complete = sorted(step for step, paths in objects.items() if f"{checkpoint_name(step)}/{COPY}" in paths)
        return StoredCopies(complete, {step: paths for step, paths in sorted(objects.items()) if step not in complete})

    def hashes(self, step: int) -> set[str]:
        """Those of the copy's files; none if its list is damaged."""
        with suppress(DamagedCopyError):
            return {record["sha256"] for record in self.of(step).read()["files"]}
        return set()

    def remove(self, steps: Iterable[int]) -> None:
        """Remove copies, each one's copy.json first."""
        for step in steps:
            self.of(step).remove()

    def prune(self, keep: int, permanent_every: int | None) -> None:
        """Remove all but the newest `keep` copies and permanent ones."""
        self.remove(step for step in self.list().complete[:-keep] if permanent_every is None or step % permanent_every)


class CopiedTraining(TypedDict):
    """id: of the training, as in the store."""

    id: str


class Uploads(Hook):
    """The uploads of one training's checkpoints. Called on all ranks alike, unless a method says otherwise.

    Attributes:
        uploaded: on rank 0, the newest step with a complete copy; -1 before there is one.
    """

    def __init__(self, work: Work, checkpoints: Checkpoints, url: str, event: Event) -> None:
        """Claim the store.

        Raises:
            UserError: the store belongs to another run, or cannot be used; the same on every rank.
        """
        self.work = work
        self.checkpoints = checkpoints
        self.ranks = ranks = checkpoints.ranks
        self.say = checkpoints.say
        self.event = event
        self.config = work.config.train.checkpoint
        self.url = url
        self._copies = CopiedCheckpoints(Store(url))
        self._stopped = False
        self._problem = ""
        self._channel = HostChannel(dataclasses.replace(ranks, patience=PATIENCE))
        self._copied, work.accepted = ranks.by_leader(self._claim)
        self.uploaded = max(self._copied, default=-1)
        self._worker = BackgroundWorker("uploads", self._upload if ranks.is_rank_zero else self._follow,
                                        newest_only=True)

    def newest_valid(self) -> tuple[Path, TrainingProgress] | None:
        """The newest checkpoint, as `Checkpoints.newest_valid` finds it. A newer one in the store is fetched.

        If a copy is damaged, the next older one is used, and the damaged one is removed, since it would count as the
        newest.

        Raises:
            UserError: as in `Checkpoints.newest_valid`; or a copy cannot be fetched, or all are damaged.
            OSError: the disk is full, or does not work.
        """
        try:
            result = self.checkpoints.newest_valid()
        except UserError:  # all local ones are damaged
            if not self._copied:
                raise
            result = None
        damaged = list[int]()
        for step in reversed([step for step in self._copied if result is None or step > result[1].step]):
            problem = self._fetch(step)
            if problem is None:
                self.event("checkpoint_fetched", step=step)
                result = self.checkpoints.newest_valid()
                break
            if not isinstance(problem, DamagedCopyError):
                raise problem
            self.say(f"the copy of {checkpoint_name(step)} is damaged ({problem}); going back to the one before it")
            damaged.append(step)
        if damaged and result is None:
            raise UserError(f"Every copy of a checkpoint in {self.url} is damaged (see above). Restore valid objects; "
                            f"or set train.checkpoint.copy_to=null, to start again without them.")
        if damaged:
            self.ranks.by_leader(lambda: self._remove(damaged, "Damaged copies in"))
            self.uploaded = max((step for step in self._copied if step not in damaged), default=-1)
        return result

    def on_start(self, loop: Loop) -> None:
        """Start uploading: first the checkpoint that training continues from, if it has no copy."""
        if not self.ranks.is_rank_zero:
            self._worker.put(0)
        elif loop.has_checkpoint and loop.progress.step > self.uploaded:
            self.on_saved(loop.progress.step)

    def on_saved(self, step: int) -> None:
        """See Hook. It reads no files, since an error here would fail the save."""
        if not self.ranks.is_rank_zero:
            return
        self._worker.put(step)
        if self._worker.error is not None:
            self.say(f"warning: {checkpoint_name(step)} is not copied to {self.url}, since copying has ended "
                     f"({self._worker.error}). Training continues; the next start copies the newest")

    def needs(self, step: int) -> bool:
        """Whether it is being uploaded or waits for its upload."""
        return step in self._worker.pending()

    def on_finish(self, loop: Loop) -> None:
        """Wait for the upload of the last checkpoint, then release the store.

        Raises:
            UserError: the upload failed; the same on every rank.
        """
        patience = self.ranks.patience
        step = loop.progress.step
        if problem := self._wait(step, max(patience - SLACK, patience / 2)):
            raise UserError(f"The last checkpoint could not be copied to {self.url}: {problem} Training is "
                            f"done, and its checkpoint {self.checkpoints.path(step)} is valid. Run the same command "
                            f"again: it copies the checkpoint and finishes the stage. Or add "
                            f"train.checkpoint.copy_to=null, to continue without the copy.")

    def on_stop(self, loop: Loop) -> None:
        """Wait for the upload of the last checkpoint as long as there is time; log if it was not completed."""
        if problem := self._wait(loop.progress.step, timedelta(seconds=loop.config.launch.signal_s)):
            self.say(f"warning: {checkpoint_name(loop.progress.step)} is not copied to {self.url}: {problem} It is in "
                     f"{self.checkpoints.folder}; the next start copies it, if this folder still exists")

    def close(self) -> None:
        """Stop uploading without waiting. An upload in progress does not become a copy. Idempotent."""
        self._stopped = True
        self._worker.close(0.0, drop=True)

    def _wait(self, step: int, limit: timedelta) -> str:
        """Wait for the upload of the checkpoint after `step`. Returns why it failed, or "", on every rank."""
        def wait() -> str:
            worker = self._worker
            if self.uploaded != step:
                self.say(f"waiting for the copy of {checkpoint_name(step)} to {self.url}")
            if worker.close(limit.total_seconds()) and worker.error is None:
                with suppress(dist.DistError):
                    self._channel.same(None)  # the other ranks' threads end
            broken = f"{worker.error}." if worker.error else ""
            late = f"it was not complete after {limit.total_seconds():g} s."
            problem = "" if self.uploaded == step else broken or self._problem or late
            self.close()
            return problem
        return str(self.ranks.by_leader(wait))

    def _claim(self) -> tuple[list[int], list[str]]:
        """Claim the store. Returns the steps in it and the accepted changes of their training. Called on rank 0."""
        store = self._copies.store
        folder = self.work.folder
        accepted = self.work.accepted
        preflight(store)
        self._owner = Owner(store)
        theirs, mine = self._owner.content, read_record(folder / COPYING, CopiedTraining)
        if problem := self._conflict(theirs, mine):
            if not complete_checkpoints(folder):
                (folder / STARTED).unlink(missing_ok=True)  # nothing has started: the user may try other settings
            raise UserError(problem)
        identity = theirs["id"] if theirs else mine["id"] if mine is not None else uuid4().hex
        if theirs is not None:
            if mine is None:
                self.say(f"takes over {store.url} from {describe(theirs)}, which will notice and stop copying there")
            earlier = [change for change in theirs.get("accepted", []) if change not in accepted]
            if earlier:  # before the folder was lost; the manifest must list it
                accepted = [*earlier, *accepted]
                change_start(folder, accepted=accepted)
        write_sealed(folder / COPYING, {"id": identity})
        self._owner.claim(name=self.work.config.name, id=identity, fingerprint=self.work.fingerprint,
                          accepted=accepted)
        result = self._copies.list()
        if result.unfinished:
            self.say(f"removed incomplete copies of an earlier start in {store.url}: "
                     f"{', '.join(map(checkpoint_name, result.unfinished))}")
            store.delete(path for paths in result.unfinished.values() for path in paths)
        # Markers decide which copies are of checkpoints that a user has renamed, since a step may have been repeated.
        aside_markers = {sha256_file(path) for path in (folder / CHECKPOINTS).glob(f"{SET_ASIDE}*/{MARKER}")}
        aside = [step for step in result.complete if aside_markers and aside_markers & self._copies.hashes(step)]
        self._remove(aside, "Copies of checkpoints that were renamed, in")
        return [step for step in result.complete if step not in aside], accepted

    def _conflict(self, theirs: OwnerRecord | None, mine: CopiedTraining | None) -> str:
        """Why the training in this folder must not use the store; "" if it may. theirs: the owner's record."""
        name = self.work.config.name
        same = theirs is not None and mine is not None and mine["id"] == theirs.get("id")
        if theirs is None:
            result = self._copies.list()
            if not (result.complete or result.unfinished):
                return ""
            problem = f"folders named after steps, but no {OWNER} that names their run"
        elif "id" not in theirs:
            problem = f"other files of the run {theirs['name']}, no checkpoints"
        elif theirs["name"] != name:
            problem = (f"the checkpoints of the run {theirs['name']}, not of {name}. If {self.work.folder} is that "
                       f"run, and not a copy of it, use its name again (name={theirs['name']})")
        elif same:
            return ""
        elif self.work.from_scratch:
            problem = f"those of an earlier training of {name}; without --force, training continues from them"
        elif mine is not None or complete_checkpoints(self.work.folder):
            problem = (f"those of another training of {name} than the one in {self.work.folder}: they were started "
                       f"separately, so one must not replace the other")
        else:
            before = typed(theirs["fingerprint"], Fingerprint)
            changed = differences(before, self.work.fingerprint)
            # Whether other phases have started is checked with the checkpoint (`changed_future`).
            if not changed or STAGES["train"].may_renew(before, self.work.fingerprint):
                return ""
            problem = (f"those of {name}, but trained with other inputs or settings than are configured now. "
                       f"Differences, old -> new:\n{listed(list(map(str, changed)))}\n")
        return (f"{self.url} holds {problem}. Drover overwrites nothing there. Set another train.checkpoint.copy_to "
                f"for this run, or move what is there away.")

    def _remove(self, steps: Sequence[int], which: str) -> None:
        """Remove copies from which no training may continue. Called on rank 0."""
        self._copies.remove(steps)
        if steps:
            self.say(f"{which} {self.url} are removed: {', '.join(map(checkpoint_name, steps))}.")

    def _fetch(self, step: int) -> Exception | None:
        """Fetch a checkpoint; every rank takes a share of the files. Returns the error, the same on every rank."""
        final = self.checkpoints.path(step)
        copy = self._copies.of(step)
        ranks = self.ranks
        temporary = final.with_name(f"{final.name}.tmp")

        def ready() -> Outputs:
            files = _listed(copy, step)
            self.checkpoints.make_room(temporary)
            self.say(f"fetching {final.name} from {self.url} ({sum(record['bytes'] for record in files) / 1e6:,.1f} MB "
                     f"in {len(files)} files)")
            return files

        def publish(_: int) -> None:
            records = temporary / RECORDS
            if records.is_dir():
                take_records(records, self.work.folder, self.say)
                shutil.rmtree(records)
            self.checkpoints.place(temporary, step)

        problem = in_turn(self._channel, ready, lambda files: copy.fetch(temporary, files[ranks.rank::ranks.world]),
                          sum, publish, temporary)
        if ranks.is_rank_zero:
            shutil.rmtree(temporary, ignore_errors=True)
        return problem

    def _refuse_stopped(self) -> None:
        """UserError if copying was stopped, or another process has taken over the store. Called before each change of
        the store. Only rank 0 checks the owner; the other ranks learn of it after their share."""
        if self._stopped:
            raise UserError("copying was stopped.")
        if self.ranks.is_rank_zero:
            self._owner.refuse_lost()

    def _follow(self, _: int) -> None:
        """Upload this rank's shares on rank 0's request, until it ends. Called on the other ranks."""
        while (step := self._channel.same(None)) is not None:
            self._attempt(step)

    def _upload(self, step: int) -> None:
        """Upload a checkpoint, with retries until a newer one replaces it. Called on rank 0."""
        url = self.url
        name = checkpoint_name(step)
        for failures in itertools.count(1):
            began = time.monotonic()
            problem = self._attempt(self._channel.same(step))
            seconds = round(time.monotonic() - began, 3)
            if problem is None:
                self._problem = ""
                break
            self._problem = f"{str(problem).rstrip('.')}."
            self.event("checkpoint_copy_failed", step=step, error=self._problem, seconds=seconds)
            if self._stopped:
                return
            wait_s = RETRY_S[min(failures, len(RETRY_S)) - 1]
            self.say(f"warning: {name} could not be copied to {url}: {self._problem} Training continues; retrying "
                     f"in {wait_s:.0f} s, or with the next checkpoint")
            if self._worker.waiting(wait_s) or (self._worker.closing and failures >= self.config.attempts):
                return
            if self._worker.closing:
                time.sleep(min(wait_s, END_RETRY_S))
        if problem := tried(self._prune):
            self.say(f"warning: old copies in {url} could not be removed ({problem}); retrying after the next copy")
        self.event("checkpoint_copied", step=step, bytes=self._bytes, seconds=seconds)
        self.uploaded = step

    def _attempt(self, step: int) -> Exception | None:
        """Upload a checkpoint once, each rank its share of the files. Returns the error."""
        copy = self._copies.of(step)
        folder = self.checkpoints.path(step)
        ranks = self.ranks
        files: Outputs = []

        def opened() -> Outputs:
            """The files to upload. First makes sure that the store has no complete copy of this step: while its objects
            are replaced one by one, it would be a mixture of both."""
            files.extend(read_marker(folder).files)
            self._refuse_stopped()
            if self.uploaded == step:
                self.uploaded = -1
            copy.reopen()
            return files

        def complete(_: int) -> None:
            """After all ranks' files: upload the marker, the records of the train folder, and copy.json."""
            self._refuse_stopped()  # uploading took long
            marker = output_record(folder, folder / MARKER)
            copy.send(folder, [marker])
            files.append(marker)
            for name, data in train_records(self.work.folder, step).items():
                self._refuse_stopped()
                copy.store.put(f"{RECORDS}{name}", data)
                files.append({"path": f"{RECORDS}{name}", "bytes": len(data),
                              "sha256": hashlib.sha256(data).hexdigest()})
            self._refuse_stopped()
            copy.finish(str(step), files)
            self._bytes = sum(record["bytes"] for record in files)

        return in_turn(self._channel, opened, lambda files: copy.send(folder, files[ranks.rank::ranks.world],
                                                                      self._refuse_stopped), sum, complete, "")

    def _prune(self) -> None:
        self._owner.refuse_lost()
        self._copies.prune(self.config.keep, self.config.permanent_every)


def _listed(copy: Mirror, step: int) -> Outputs:
    """The files of a listed copy; DamagedCopyError if its copy.json is missing, damaged or of another step."""
    try:
        result = copy.read()
    except Missing as error:
        raise DamagedCopyError(str(error)) from None
    if result["of"] != str(step):
        raise DamagedCopyError(f"{copy.store.url} holds the checkpoint of step {result['of']}")
    return list(result["files"])


def train_records(folder: Path, step: int) -> dict[str, bytes]:
    """The existing files of the train folder that belong to the checkpoint after `step`, by name. A run whose folder
    was lost gets them back, so its log has no gap.

    Of metrics and samples only lines of earlier steps are taken. A start from the checkpoint first writes the lines of
    its own step (`Loop._start`), and whether they were written before the upload is a matter of chance.
    """
    result = {}
    for name in (*LOGS, *OTHERS):
        with suppress(FileNotFoundError):
            lines = (folder / name).read_bytes().splitlines(keepends=True)
            if name in LOGS and lines and not lines[-1].endswith(b"\n"):
                lines.pop()
            while name in OF_STEPS and lines and json.loads(lines[-1])["step"] >= step:
                lines.pop()
            result[name] = b"".join(lines)
    return result


def take_records(fetched: Path, folder: Path, say: Say) -> None:
    """Put fetched files into the train folder. A local file that continues the fetched one stays. One with other
    content is renamed, and this is logged."""
    for path in sorted(fetched.iterdir()):
        data = path.read_bytes()
        mine = folder / path.name
        if mine.is_file():
            local = mine.read_bytes()
            if _continues(path.name, data, local):
                continue
            if local and not _continues(path.name, local, data):
                aside = renamed(mine, f"{mine.name}.replaced")
                say(f"{mine.name} does not belong to the fetched checkpoint; renamed to {aside.name}")
        with atomic_file(mine) as file:
            file.write(data)


def _continues(name: str, before: bytes, after: bytes) -> bool:
    """Whether `after`, a file's content, equals `before` or has grown from it."""
    if name == ROLLBACKS:  # a list that grows; excluded samples must never be used again
        with suppress(ValueError, KeyError, TypeError):
            old, new = json.loads(before)["rollbacks"], json.loads(after)["rollbacks"]
            return bool(new[:len(old)] == old)
    return after.startswith(before) if name in LOGS else after == before
