"""Token shards are verified in the background when they are first used: one rank hashes each and compares it with the
encode stage's manifest.

Training does not wait for this, but a checkpoint does: before it is written, all shards that were used before the last
checkpoint have been verified. So data from an unverified shard is in one checkpoint at most, and the one before it is
kept until then. If a shard is damaged, all ranks stop together, the checkpoints after its first use are quarantined,
and the next start continues from the one before. `tokens-compared.json` holds the step up to which all shards were
verified; the next start first verifies the shards used since then.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from drover.pipeline.contract.input_check import output
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
"""Seconds of rest for each second of work: it takes at most a quarter of a core and of one reader's disk bandwidth."""
PATIENCE_S = 600.0
"""How long a checkpoint waits while no shard is being read at all."""
LOOK_S = 5.0
"""Interval at which waiting ranks exchange their progress."""
SET_ASIDE = "set-aside-"
COMPARED = "tokens-compared.json"
"""In the stage's folder: the encode stage's digest, and the step up to which every used shard was verified, with the
number of samples used until then."""
DAMAGED = "token_shards_damaged"
"""The event: `first_step` is the first step that may have read damaged data; training continues after `step`."""
Sound = tuple[int, int]
"""A step up to which all used shards were verified, and the samples used until then."""


class TokenCheck(Hook):
    """This rank's part of the verification. Every method but `needs` is called on all ranks alike.

    Shards in an object store are not verified here: those that are fetched whole are verified when they arrive.

    Attributes:
        compares: whether shards are verified; if not, the loop does not use this hook.
        checked: shards that all ranks together have verified in this start, as of the last step.
    """

    def __init__(self, loop: Loop) -> None:
        self.loop, self.work, self.ranks, table = loop, loop.work, loop.ranks, loop.batches.table
        self.checked, self._over = 0, False
        self._marked = object()  # what to wait for at the last save; at first nothing, so that it counts as done
        folder, manifest = self.work.input("encode")
        self._of = manifest.digest
        self._saved = self._began = loop.progress.step, loop.progress.samples
        self._sound: Sound = self.ranks.by_leader(self._read)
        how = self.work.config.train.shard_checks
        if how is False:
            loop.say("token shards are not compared with the encode stage's manifest: train.shard_checks is false")
        self.compares = how is not False and loop.batches.opener is None
        if not self.compares:
            return
        validation = [row for row in range(len(table)) if how == "all" or table.kinds[table.kind[row]][0] != "train"]
        self._checks = ShardChecks(table, lambda row: output(folder, table.record(row), "encode"),
                                   loop.data.shard_rows, self.ranks.rank, self.ranks.world, validation, REST)
        if self._sound < self._began:  # an earlier start used shards and ended before they were verified
            self._checks.use(self._sound[0] + 1, self._began[0], [(self._sound[1], self._began[1])])
            self._marked = self._checks.look_again(self._began[0])
        self._note(self._sound)

    @property
    def sound_to(self) -> int:
        """The step up to which all used shards were verified."""
        return self._sound[0]

    def needs(self, step: int) -> bool:
        """Whether training may have to go back to this checkpoint."""
        return not self._over and step == self.sound_to

    def votes(self, loop: Loop) -> Sequence[float]:
        """Note the shards of the next step. Returns whether this rank found damage, and how many shards it verified."""
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
        """Wait until all shards that were used before the last checkpoint and before this start are verified. After a
        request to stop there may be no time for that: then the next start verifies them.

        Raises:
            UserError: a shard is damaged, or no shard can be read; the same on every rank.
        """
        if self._wait(self._marked, patient=loop.stop.stop is None):
            self._note(self._saved)
        else:
            loop.say("saving before all used token shards are compared; the next start compares them first")
        self._saved = loop.progress.step, loop.progress.samples
        self._marked = self._checks.look_again(self._saved[0])

    def on_finish(self, loop: Loop) -> None:
        """Wait for the remaining shards. UserError as for `on_save`."""
        self._wait(None, patient=True)
        self._over = True
        self._note(self._saved)

    def on_end(self, loop: Loop) -> None:
        """Stop verifying."""
        self._checks.close()

    def _wait(self, given: object, *, patient: bool) -> bool:
        """Whether all ranks have verified what `ShardChecks.look_again` gave. If `patient`, wait until they have."""
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
                raise UserError(f"No token shard could be compared with the encode stage's manifest for "
                                f"{PATIENCE_S:.0f} s, so no checkpoint is written. Check the disk of the run's encode "
                                f"stage, and run the same command again. train.shard_checks=false disables this check.")

    def _go_back(self, found: Sequence[Damage]) -> list[str]:
        """Quarantine the checkpoints that may contain damaged data, and their evaluations, by renaming them. Returns
        sentences for the error message. Called on rank 0."""
        steps = [one.step for one in found if one.step is not None]
        if not steps:
            return []
        aside, folder = list[str](), self.work.folder / CHECKPOINTS
        complete = [path for path in named_after_steps(folder) if (path / MARKER).is_file()]
        before = [step_of(path) for path in complete if step_of(path) < min(steps)]
        # Without an earlier one, the checkpoint that this start continued from is better than none.
        last = max(before, default=0 if min(steps) > self._began[0] else self._began[0])
        for path in reversed(named_after_steps(folder)):  # newest first: after a kill it would be continued from
            step = step_of(path)
            if step > last:
                renamed(path, f"{SET_ASIDE}{path.name}")
                aside.append(path.name)
                measured = evaluation_folder(self.work.run.folder, step)
                with suppress(OSError):  # mostly there is none
                    renamed(measured, f"{SET_ASIDE}{measured.name}")
        self.loop.recorder.event(DAMAGED, step=last, first_step=min(steps), set_aside=aside)
        told = [f"Checkpoints that may contain damage are quarantined as {folder}/{SET_ASIDE}*: {', '.join(aside)}. "
                f"Training will continue from step {last}."] if aside else []
        if last >= min(steps):
            told.append(f"The checkpoint of step {last} was saved before all token shards up to it were compared: only "
                        f"the steps up to {self.sound_to} are certainly free of damage. If that matters, start again "
                        f"with --force.")
        return told

    def _read(self) -> Sound:
        """Up to where all used shards were verified, as an earlier start recorded it."""
        try:
            record = read_sealed(self.work.folder / COMPARED)
            if record["encode"] != self._of:
                return self._began  # those shards are gone; the change was accepted as drift
            return min(self._began, (int(record["sound_to"]), int(record["samples"])))
        except (OSError, ValueError, KeyError, TypeError):
            return 0, 0

    def _note(self, sound: Sound) -> None:
        self._sound = sound
        if self.ranks.leads:
            write_sealed(self.work.folder / COMPARED, {"encode": self._of, "sound_to": sound[0], "samples": sound[1]})
