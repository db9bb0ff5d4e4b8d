"""All that a session of training has to do with copies in an object store; without `copy_to` it does nothing.

At a start: whose store is it, who copies there now, is there a newer checkpoint than here. Then a copy of each
checkpoint, in the background; at the end, the last one's.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

from pipeline.contract.manifest import differences
from pipeline.contract.stage_work import Work
from pipeline.contract.stages import STAGES
from pipeline.contract.start_record import STARTED, read_start
from pipeline.copies.checkpoints import CopiedCheckpoints
from pipeline.copies.claim import RUN, Lock, RunRecord
from pipeline.copies.transfer import DamagedCopyError
from pipeline.errors import UserError, listed
from pipeline.files import read_record, sha256_file, write_sealed
from pipeline.parallel.ranks import Ranks
from pipeline.records.checkpoints import (
    CHECKPOINTS,
    MARKER,
    TrainingProgress,
    checkpoint_name,
    complete_checkpoints,
    step_of,
)
from pipeline.stores.store import Store, preflight
from pipeline.training.async_saver import Saved
from pipeline.training.checkpoint import Checkpoints
from pipeline.training.copies.copier import Copier
from pipeline.training.copies.fetching import fetch_newest
from pipeline.training.data.token_check import SET_ASIDE

HERE = "copying.json"
"""In the train folder: which training this is (`id`, as the store has it too), and which folder (`here`, and
`folder` to tell a copy of it by)."""
SLACK = timedelta(minutes=5)
"""So much sooner than a collective gives up does rank 0 give up waiting for the last copy."""


class Copying:
    """The copies of one training run. Every method is called on all ranks alike, except where it says otherwise."""

    def __init__(self, work: Work, ranks: Ranks, checkpoints: Checkpoints, say: Callable[[str], None]) -> None:
        """Claim the store that `train.checkpoint.copy_to` names.

        Raises:
            UserError: it is another run's, another process copies there, or it cannot be used; the same on every rank.
        """
        self.work, self.ranks, self.checkpoints, self.say = work, ranks, checkpoints, say
        self.config = work.config.train.checkpoint
        self._copies: CopiedCheckpoints | None = None
        self._lock: Lock | None = None
        self._copier: Copier | None = None
        self._whole: list[int] = []
        self._damaged: list[int] = []
        self._ended: list[Saved] = []
        if self.config.copy_to is not None:
            self._copies = CopiedCheckpoints(Store(self.config.copy_to))
            try:
                self._whole, work.drift = ranks.by_leader(self._claim)
            except BaseException:
                self.close()
                raise

    def newest_valid(self) -> tuple[Path, TrainingProgress] | None:
        """The newest checkpoint, as `Checkpoints.newest_valid` says; one that is only in the store is fetched before.

        Where newer copies are damaged, training goes on from what is sound, and they are removed from the store: there
        they would count as the newest when old ones are.

        Raises:
            UserError: as there; or there is a newer one in the store, which cannot be fetched; or there are copies, and
                nothing sound to go on from.
            OSError: the disk is full, or does not work.
        """
        if self._copies is None:
            return self.checkpoints.newest_valid()
        begun = complete_checkpoints(self.work.folder)
        here = self.ranks.same(step_of(begun[-1]) if begun else -1)
        self._fetch(here)
        try:
            found = self.checkpoints.newest_valid()
        except UserError:  # all that are here are damaged
            if not self._whole:
                raise
            found = None
        if self._fetch(-1 if found is None else found[1].step):
            found = self.checkpoints.newest_valid()
        if self._damaged and found is None:
            raise UserError(f"Every copy of a checkpoint in {self.config.copy_to} that could be gone on from is "
                            f"damaged (see above). Put sound objects back; or take train.checkpoint.copy_to away, to "
                            f"start again without them.")
        if self._damaged:
            self.ranks.by_leader(self._remove_damaged)
        return found

    def _remove_damaged(self) -> None:
        """Remove the copies that were found to be damaged, now that there is something to go on from. For rank 0."""
        assert self._copies is not None
        for step in self._damaged:
            self._copies.remove(step)
        names = ", ".join(map(checkpoint_name, self._damaged))
        self.say(f"removed damaged copies from {self.config.copy_to}: {names}; training goes on without them")

    def begin(self, found: tuple[Path, TrainingProgress] | None) -> None:
        """Copy from now on, and the checkpoint that training goes on from if that has none."""
        if self._copies is None:
            return
        newest = self._whole[-1] if self._whole else -1
        self._copier = Copier(self._copies, self._lock, self.ranks, self.config, self.work.folder,
                              self.checkpoints.path, self.say, newest)
        if found is not None and found[1].step > newest:
            self.saved(found[1].step)

    def saved(self, step: int) -> None:
        """The checkpoint after `step` is complete."""
        if self._copier is not None and self.ranks.leads:
            self._copier.submit(step)

    def needs(self, step: int) -> bool:
        """Whether the checkpoint after `step` must not be removed. For rank 0."""
        return self._copier is not None and self._copier.needs(step)

    def ended(self) -> list[Saved]:
        """What has ended since this was last asked, for the log."""
        found, self._ended = self._ended, []
        return found + (self._copier.ended() if self._copier is not None else [])

    def withdraw(self, after: int) -> None:
        """Copies of checkpoints after `after` may be made of damaged tokens: nobody may go on from them."""
        if self._copier is not None and self.ranks.leads:
            for text in self._copier.withdraw(after):
                self.say(text)

    def finish(self, step: int) -> None:
        """Wait for the copy of the last checkpoint, then leave the store to others.

        Raises:
            UserError: there is none; the same on every rank.
        """
        patience = self.ranks.patience
        if self._copier is not None and (problem := self._wait(step, max(patience - SLACK, patience / 2))):
            raise UserError(f"The last checkpoint could not be copied to {self.config.copy_to}: {problem} Training is "
                            f"done, and its checkpoint {self.checkpoints.path(step)} is sound. Run the same command "
                            f"again, which copies it and finishes the stage; or with train.checkpoint.copy_to=null, to "
                            f"go on without the copy.")

    def leave(self, step: int, limit_s: float) -> None:
        """Wait for the copy of the checkpoint after `step` as long as there is time; what was not done is said."""
        if self._copier is not None and (problem := self._wait(step, timedelta(seconds=limit_s))):
            self.say(f"warning: {checkpoint_name(step)} is not copied to {self.config.copy_to}: {problem} It is in "
                     f"{self.checkpoints.folder}; the next start copies it, if it finds this folder")

    def _wait(self, step: int, limit: timedelta) -> str:
        """Wait for the copy of the checkpoint after `step`; why there is none, or "", on every rank."""
        def wait() -> str:
            assert self._copier is not None
            if self._copier.copied != step:
                self.say(f"waiting for the copy of {checkpoint_name(step)} to {self.config.copy_to}")
            problem = self._copier.finish(step, limit.total_seconds())
            self.close()
            return problem
        return str(self.ranks.by_leader(wait))

    def close(self) -> None:
        """Copy no more and leave the store to others, whatever came of it; does nothing the second time."""
        if self._copier is not None:
            self._copier.stop()
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def _fetch(self, here: int) -> bool:
        """Fetch the newest copy that is newer than step `here`, if there is one; whether there was."""
        assert self._copies is not None
        newer = [step for step in self._whole if step > here]
        step, damaged = fetch_newest(self._copies, self.checkpoints, self.ranks, newer, self.work.folder, self.say)
        self._damaged += damaged
        self._whole = [other for other in self._whole if other not in damaged]
        if step is not None:
            self._ended.append(Saved("checkpoint_fetched", {"step": step}))
        return step is not None

    def _claim(self) -> tuple[list[int], list[dict[str, Any]]]:
        """The steps of whole copies, and the drift of the training that they are of. For rank 0."""
        assert self._copies is not None
        store, folder = self._copies.store, self.work.folder
        preflight(store)
        record = RunRecord(store)
        known, own = read_record(folder / HERE, dict[str, Any]), _mark(folder)
        copied = known is not None and known.get("folder") != own
        try:
            self._refuse_other_run(record.content, known, copied)
        except UserError:
            if not complete_checkpoints(folder):
                (folder / STARTED).unlink(missing_ok=True)  # nothing was: other settings may be tried
            raise
        if known is None or copied:  # the folder that this one was copied from may be at work
            known = {"here": uuid4().hex}
        lock = Lock(store, known["here"], self.say)
        lock.take()
        self._lock = lock
        known["id"] = record.content["id"] if record.content else known.get("id") or uuid4().hex
        write_sealed(folder / HERE, {**known, "folder": own})
        drift = self._drift(record.content)
        content = {"name": self.work.config.name, "id": known["id"], "fingerprint": self.work.fingerprint,
                   "drift": drift}
        if record.content is None or any(record.content[key] != value for key, value in content.items()):
            record.write(**content)
        found = self._copies.found()
        if found.unfinished:
            self.say(f"removed what a start that ended had copied in part to {store.url}: "
                     f"{', '.join(map(checkpoint_name, found.unfinished))}")
            store.delete(path for paths in found.unfinished.values() for path in paths)
        return self._without_set_aside(found.whole), drift

    def _refuse_other_run(self, theirs: dict[str, Any] | None, known: dict[str, Any] | None, copied: bool) -> None:
        """UserError if the checkpoints in the store are not of the training in this folder, nor can be gone on with.

        What a `copied` folder says of itself is of the one that it was copied from, which may train on."""
        if theirs is None:
            self._refuse_unknown()
            return
        name, url = self.work.config.name, self.config.copy_to
        equal = known is not None and known.get("id") == theirs["id"]
        if equal and (theirs["name"] == name or not copied):
            return
        ways = ("Nothing there is overwritten. Give this run another train.checkpoint.copy_to, or move away what is "
                "there.")
        if theirs["name"] != name:
            moved = (f" {self.work.folder} seems to be a copy of that run's. If it is the run itself, moved here from "
                     f"another disk, give it its name again (name={theirs['name']}).") if equal else ""
            raise UserError(f"{url} holds the checkpoints of the run {theirs['name']}, not of {name}.{moved} {ways}")
        if self.work.afresh:
            raise UserError(f"{url} holds the checkpoints of an earlier training of {name}, which --force leaves "
                            f"behind. {ways} Without --force, training goes on from them.")
        if known is not None or complete_checkpoints(self.work.folder):
            raise UserError(f"{url} holds the checkpoints of another training of {name} than the one in "
                            f"{self.work.folder}: they began apart, so one must not replace the other. {ways}")
        if STAGES["train"].may_renew(theirs["fingerprint"], self.work.fingerprint):
            return  # other phases: whether one that has begun is among them shows with the checkpoint
        if changed := differences(theirs["fingerprint"], self.work.fingerprint):
            raise UserError(f"{url} holds the checkpoints of {name}, but trained with other inputs or settings than "
                            f"are asked for now. What differs, old -> new:\n{listed([str(one) for one in changed])}\n"
                            f"{ways}")

    def _refuse_unknown(self) -> None:
        """UserError if there are folders named as ours in a store that nobody has claimed: ours would be removed."""
        assert self._copies is not None
        found = self._copies.found()
        if lying := sorted([*found.whole, *found.unfinished]):
            raise UserError(f"{self.config.copy_to} holds folders named after steps ({checkpoint_name(lying[0])} ...), "
                            f"but no {RUN} that says whose they are. Nothing there is touched; give another "
                            f"train.checkpoint.copy_to, or move away what is there.")

    def _drift(self, theirs: dict[str, Any] | None) -> list[dict[str, Any]]:
        """What was accepted for this training, here and before its folder was lost; kept for the manifest."""
        mine = self.work.drift
        drift = [*(entry for entry in (theirs or {}).get("drift", []) if entry not in mine), *mine]
        if drift != mine:
            started = read_start(self.work.folder)
            assert started is not None, "the stage was begun"
            write_sealed(self.work.folder / STARTED, asdict(replace(started, drift=drift)))
        return drift

    def _without_set_aside(self, steps: list[int]) -> list[int]:
        """Copies that may be gone on from. One of a checkpoint that was set aside here, since it may be made of damaged
        tokens, is removed if it is still there."""
        assert self._copies is not None
        kept = []
        for step in steps:
            # One that was set aside more than once has a number at its end.
            aside = list((self.work.folder / CHECKPOINTS).glob(f"{SET_ASIDE}{checkpoint_name(step)}*/{MARKER}"))
            marker = self._marker_of(step) if aside else None
            if marker is not None and any(marker == sha256_file(path) for path in aside):
                self.say(f"removed the copy of {checkpoint_name(step)} in {self.config.copy_to}: that checkpoint was "
                         f"set aside here")
                self._copies.remove(step)
            else:
                kept.append(step)
        return kept

    def _marker_of(self, step: int) -> str:
        """The hash of a copied checkpoint's marker; "" where the copy is damaged, of which fetching it tells."""
        assert self._copies is not None
        try:
            return next((record["sha256"] for record in self._copies.read(step) if record["path"] == MARKER), "")
        except DamagedCopyError:
            return ""


def _mark(folder: Path) -> list[int]:
    """What a folder keeps when it is renamed, and a copy of it does not have. Of its disk not the number of the device,
    which another node may have given to another disk."""
    return [os.statvfs(folder).f_fsid, folder.stat().st_ino]
