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
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from drover.pipeline.contract.input_check import committed
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import read_sealed, renamed, write_sealed
from drover.pipeline.data.sampling.packing import forget
from drover.pipeline.data.sampling.shard_checks import Damage, ShardChecks
from drover.pipeline.records.checkpoints import CHECKPOINTS, MARKER, named_after_steps, step_of
from drover.pipeline.records.pending_evaluations import evaluation_folder
from drover.pipeline.training.hooks import Hook

if TYPE_CHECKING:
    from drover.pipeline.training.engines.engine import StepResult
    from drover.pipeline.training.loop import Loop

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


class TokenCheck(Hook):
    """This rank's part of it. Every method but `needs` is called on all ranks alike.

    Shards that are read from an object store are not compared here: what is fetched whole is compared as it comes.

    Attributes:
        compares: whether there is anything to do; without, it is no hook of the loop.
        checked: shards that all ranks together have compared in this start, as far as this one knows.
    """

    def __init__(self, loop: Loop) -> None:
        self.loop, self.work, self.ranks, table = loop, loop.work, loop.ranks, loop.batches.table
        self.checked, self._over, self._marked = 0, False, 0
        folder, manifest = self.work.input("encode")
        self._of = manifest.digest
        self._saved = self._began = loop.progress.step, loop.progress.samples
        self._sound: Sound = self.ranks.by_leader(self._read)
        how = self.work.config.train.shard_checks
        if how is False:
            loop.say("token shards are not compared with what encode committed: train.shard_checks is false")
        self.compares = how is not False and loop.batches.opener is None
        if not self.compares:
            return
        heldout = [row for row in range(len(table)) if how == "all" or table.kinds[table.kind[row]][0] != "train"]
        self._checks = ShardChecks(table, lambda row: committed(folder, [table.record(row)], "encode")[0],
                                   loop.data.shard_rows, self.ranks.rank, self.ranks.world, heldout, REST)
        if self._sound < self._began:  # what a start before this one used, and ended before it was compared
            self._checks.use(self._sound[0] + 1, self._began[0], [(self._sound[1], self._began[1])])
            self._marked = self._checks.look_again(self._began[0])
        self._note(self._sound)

    @property
    def sound_to(self) -> int:
        """The step up to which all that training is made of has been compared."""
        return self._sound[0]

    def needs(self, step: int) -> bool:
        """Whether it may be what training has to go back to."""
        return not self._over and step == self.sound_to

    def votes(self, loop: Loop) -> Sequence[float]:
        """The next step uses its shards; whether this rank found damage, and how much it has compared."""
        step = loop.progress.step + 1
        self._checks.use(step, step, loop.guards.excluded.take(loop.progress.samples, loop.batch.sequences).ranges)
        return self._checks.damage is not None, self._checks.checked

    def on_votes(self, loop: Loop, sums: Sequence[float]) -> None:
        """UserError, the same on every rank, if a shard is damaged."""
        damaged, checked = sums
        self.checked = round(checked)
        if not damaged:
            return
        loop.watchdog.pause()
        found = [one for one in self.ranks.gather(self._checks.damage) if one is not None]
        loop.settle_damaged(self.sound_to)
        if self.ranks.leads:
            for packing in loop.data.packings:
                forget(packing)
        raise UserError("\n".join([*(one.text for one in found), *self.ranks.by_leader(lambda: self._go_back(found))]))

    def on_step(self, loop: Loop, result: StepResult, record: dict[str, Any]) -> None:
        """See Hook."""
        record["shards_checked"] = self.checked

    def on_save(self, loop: Loop) -> None:
        """See that all is compared that was used before the last checkpoint, and before this start. Training that was
        asked to stop may not have the time: then the next start sees to it.

        Raises:
            UserError: a shard is damaged, or none can be read; the same on every rank.
        """
        if self._wait(self._marked, patient=loop.stop.stop is None):
            self._note(self._saved)
        else:
            loop.say("saving before all shards that it is made of are compared; the next start compares them first")
        self._saved = loop.progress.step, loop.progress.samples
        self._marked = self._checks.look_again(self._saved[0])

    def on_finish(self, loop: Loop) -> None:
        """Wait for the rest. UserError as for `on_save`."""
        self._wait(None, patient=True)
        self._over = True
        self._note(self._saved)

    def on_end(self, loop: Loop) -> None:
        """Look no further."""
        self._checks.close()

    def _wait(self, given: int | None, *, patient: bool) -> bool:
        """Until all ranks have compared what was given up to then, or, not `patient`, only to see whether they have."""
        checks, moved, seen = self._checks, time.monotonic(), -1.0
        while True:
            done = checks.wait(given, LOOK_S if patient else 0.0)
            ready, read, *sums = self.ranks.sum(done, checks.seen, checks.damage is not None, checks.checked)
            self.on_votes(self.loop, sums)
            if not patient or round(ready) == self.ranks.world:
                return round(ready) == self.ranks.world
            if read > seen:
                moved, seen = time.monotonic(), read
            if self.ranks.same(time.monotonic() - moved > PATIENCE_S):  # the clock of one rank decides for all
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
        last = max(before, default=0 if min(steps) > self._began[0] else self._began[0])
        for path in reversed(named_after_steps(folder)):  # after a kill, the newest would be the one to go on from
            step = step_of(path)
            if step > last:
                renamed(path, f"{SET_ASIDE}{path.name}")
                aside.append(path.name)
                measured = evaluation_folder(self.work.run.folder, step)
                with suppress(OSError):  # most often there is none
                    renamed(measured, f"{SET_ASIDE}{measured.name}")
        self.loop.recorder.event(DAMAGED, step=last, first_step=min(steps), set_aside=aside)
        told = [f"Checkpoints that may be made of it are set aside as {folder}/{SET_ASIDE}*: {', '.join(aside)}. "
                f"Training will go on from step {last}."] if aside else []
        if last >= min(steps):
            told.append(f"The checkpoint of step {last} was saved before all shards that it is made of were compared: "
                        f"training is sound for certain up to step {self.sound_to} only. Should that matter, start "
                        f"again with --force.")
        return told

    def _read(self) -> Sound:
        """Up to where training is sound for certain."""
        try:
            record = read_sealed(self.work.folder / COMPARED)
            if record["encode"] != self._of:
                return self._began  # those shards are not there any more; the manifest's drift has what was accepted
            return min(self._began, (int(record["sound_to"]), int(record["samples"])))
        except (OSError, ValueError, KeyError, TypeError):
            return 0, 0

    def _note(self, sound: Sound) -> None:
        self._sound = sound
        if self.ranks.leads:
            write_sealed(self.work.folder / COMPARED, {"encode": self._of, "sound_to": sound[0], "samples": sound[1]})
