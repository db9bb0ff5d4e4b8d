"""Token shards are hashed beside training when they are first used, each by one rank, and compared with what encode
committed.

Training does not wait for it, but a checkpoint does: before it is written, all shards that were used before the last
one have been compared. So what is read from a shard before it was compared is in one checkpoint at most, and the one
before it is kept until then. Where a shard is damaged, all ranks stop together, the checkpoints after its first use are
set aside, and the next start goes on from the one before. Up to which step training is sound for certain is kept in
`tokens-compared.json`: the next start compares what was used since then first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from drover.pipeline.contract.input_check import committed
from drover.pipeline.contract.stage_work import Work
from drover.pipeline.data.exclusion import Range
from drover.pipeline.data.sampling.loader import TrainingData
from drover.pipeline.data.sampling.packing import forget
from drover.pipeline.data.sampling.shard_checks import Damage, ShardChecks
from drover.pipeline.data.shard_table import ShardTable
from drover.pipeline.errors import UserError
from drover.pipeline.files import read_sealed, renamed, write_sealed
from drover.pipeline.records.checkpoints import CHECKPOINTS, MARKER, TrainingProgress, named_after_steps, step_of
from drover.pipeline.records.pending_evaluations import evaluation_folder

if TYPE_CHECKING:
    from drover.pipeline.parallel.ranks import Ranks

REST = 3.0
"""Seconds of rest for each of work: a quarter of a core at most, and of what a disk gives to one reader."""
PATIENCE_S = 600.0
"""How long a checkpoint waits for a shard while nothing at all is read."""
LOOK_S = 5.0
"""So often ranks that wait tell each other how far they are."""
SET_ASIDE = "set-aside-"
COMPARED = "tokens-compared.json"
"""In the stage's folder: of which encode the shards are, and the step up to which every shard that was read had been
compared, with the number of samples used until then."""
DAMAGED = "token_shards_damaged"
"""The event: `first_step` was the first that may have read damage, and after `step` training goes on."""
Sound = tuple[int, int]
"""A step and the samples used until then."""


class TokenCheck:
    """This rank's part of it. Every method but `needs` is called on all ranks alike.

    table: the encode stage's shards. began: where this start of training goes on. event: logs one by its name. stored:
    they are read from an object store: what is fetched whole is compared as it comes, and nothing here.

    Attributes:
        checked: shards that all ranks together have compared in this start, as far as this one knows.
    """

    def __init__(self, work: Work, table: ShardTable, data: TrainingData, ranks: Ranks, began: TrainingProgress,
                 say: Callable[[str], None], event: Callable[..., None], *, stored: bool = False) -> None:
        self.work, self.ranks, self.began, self.say, self._event = work, ranks, began.step, say, event
        self.checked = 0
        folder, manifest = work.input("encode")
        self._of, self._over, self._packings = manifest.digest, False, data.packings
        self._saved = began.step, began.samples
        self._sound: Sound = ranks.same(self._read(self._saved) if ranks.leads else None)
        self._checks, how = None, work.config.train.shard_checks
        if how is False:
            say("token shards are not compared with what encode committed: train.shard_checks is false")
            return
        if stored:
            return
        heldout = [row for row in range(len(table)) if how == "all" or table.kinds[table.kind[row]][0] != "train"]
        self._checks = ShardChecks(table, lambda row: committed(folder, [table.record(row)], "encode")[0],
                                   data.shard_rows, ranks.rank, ranks.world, heldout, REST)
        self._marked = 0
        if self._sound < self._saved:  # what a start before this one used, and ended before it was compared
            self._checks.use(self._sound[0] + 1, began.step, [(self._sound[1], began.samples)])
            self._marked = self._checks.look_again(began.step)
        if ranks.leads:
            self._note()

    @property
    def sound_to(self) -> int:
        """The step up to which all that training is made of has been compared."""
        return self._sound[0]

    def needs(self, step: int) -> bool:
        """Whether the checkpoint after `step` may be what training has to go back to."""
        return self._checks is not None and not self._over and step == self._sound[0]

    def use(self, step: int, samples: Sequence[Range]) -> None:
        """Step number `step` reads these samples."""
        if self._checks is not None:
            self._checks.use(step, step, samples)

    def votes(self) -> tuple[float, float]:
        """What this rank adds to the sum that all make: whether it found damage, and how much it has compared."""
        return (0.0, 0.0) if self._checks is None else (float(self._checks.damage is not None), self._checks.checked)

    def judge(self, damaged: float, checked: float, settle: Callable[[], None]) -> None:
        """By the sums of `votes`; `settle` lets a save in flight end.

        Raises:
            UserError: a shard is damaged; the same on every rank.
        """
        self.checked = round(checked)
        if damaged and self._checks is not None:
            found = [one for one in self.ranks.gather(self._checks.damage) if one is not None]
            settle()
            if self.ranks.leads:
                for packing in self._packings:
                    forget(packing)
            raise UserError("\n".join([*(one.text for one in found), *self.ranks.same(
                self._go_back(found) if self.ranks.leads else None)]))

    def before_save(self, progress: TrainingProgress, settle: Callable[[], None], *, leaving: bool) -> None:
        """See that all is compared that was used before the last checkpoint, and before this start.

        leaving: training has been asked to stop, and may not have the time: then the next start sees to it.

        Raises:
            UserError: a shard is damaged, or none can be read; the same on every rank.
        """
        if self._checks is None:
            return
        if self._wait(self._marked, settle, patient=not leaving):
            self._sound = self._saved
            if self.ranks.leads:
                self._note()
        else:
            self.say("saving before all shards that it is made of are compared; the next start compares them first")
        self._saved = progress.step, progress.samples
        self._marked = self._checks.look_again(progress.step)

    def finish(self, settle: Callable[[], None]) -> int:
        """Wait for the rest; how many shards were compared. UserError as for `before_save`."""
        if self._checks is not None:
            self._wait(None, settle, patient=True)
            self._over, self._sound = True, self._saved
            if self.ranks.leads:
                self._note()
        return self.checked

    def close(self) -> None:
        """Look no further."""
        if self._checks is not None:
            self._checks.close()

    def _wait(self, given: int | None, settle: Callable[[], None], *, patient: bool) -> bool:
        """Until all ranks have compared what was given up to then, or, not `patient`, only to see whether they have."""
        assert self._checks is not None
        moved, seen = time.monotonic(), -1.0
        while True:
            done = self._checks.wait(given, LOOK_S if patient else 0.0)
            ready, read, damaged, checked = self.ranks.sum(done, self._checks.seen, *self.votes())
            self.judge(damaged, checked, settle)
            if not patient or round(ready) == self.ranks.world:
                return round(ready) == self.ranks.world
            if read > seen:
                moved, seen = time.monotonic(), read
            # The clock of one rank decides for all.
            if self.ranks.same(time.monotonic() - moved > PATIENCE_S if self.ranks.leads else None):
                raise UserError(f"No token shard could be compared with what encode committed for {PATIENCE_S:.0f} s, "
                                f"so no checkpoint is written. Look at the disk that the run's encode stage is on; the "
                                f"same command then goes on. train.shard_checks=false does without.")

    def _go_back(self, found: Sequence[Damage]) -> list[str]:
        """Give the checkpoints that may be made of damaged shards, and what was measured of them, names under which
        nobody takes them; what there is to say of them. For one rank."""
        steps = [one.step for one in found if one.step is not None]
        if not steps:
            return []
        aside, folder = list[str](), self.work.folder / CHECKPOINTS
        complete = [path for path in named_after_steps(folder) if (path / MARKER).is_file()]
        before = [step_of(path) for path in complete if step_of(path) < min(steps)]
        # Without one before it, the one that this start went on from is better than none.
        last = max(before, default=0 if min(steps) > self.began or not self.began else self.began)
        for path in named_after_steps(folder):
            step = step_of(path)
            if step > last:
                renamed(path, f"{SET_ASIDE}{path.name}")
                aside.append(path.name)
                measured = evaluation_folder(self.work.run.folder, step)
                with suppress(OSError):  # most often there is none
                    renamed(measured, f"{SET_ASIDE}{measured.name}")
        self._event(DAMAGED, step=last, first_step=min(steps), set_aside=aside)
        told = [f"Checkpoints that may be made of it are set aside as {folder}/{SET_ASIDE}*: {', '.join(aside)}. "
                f"Training will go on from step {last}."] if aside else []
        if last >= min(steps):
            told.append(f"The checkpoint of step {last} was saved before all shards that it is made of were compared: "
                        f"training is sound for certain up to step {self._sound[0]} only. Should that matter, start "
                        f"again with --force.")
        return told

    def _read(self, began: Sound) -> Sound:
        """Up to where training is sound for certain."""
        try:
            record = read_sealed(self.work.folder / COMPARED)
            if record["encode"] != self._of:
                return began  # those shards are not there any more; what was accepted then is in the manifest's drift
            return min(began, (int(record["sound_to"]), int(record["samples"])))
        except (OSError, ValueError, KeyError, TypeError):
            return 0, 0

    def _note(self) -> None:
        write_sealed(self.work.folder / COMPARED, {"encode": self._of, "sound_to": self._sound[0],
                                                   "samples": self._sound[1]})
