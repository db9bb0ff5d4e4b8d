"""Token shards are hashed beside training, each once over all ranks, and compared with what encode committed.

Training does not wait for it, so some steps may be done, and saved, before damage is found. Then all ranks stop
together, checkpoints of this start are set aside, and the one that it went on from, kept until everything was compared,
is what the next start goes on from. Where that one was saved by a start that ended before it had compared everything,
this is said: up to which step training is sound for certain is kept in `tokens-compared.json`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pipeline.contract.input_check import InputCheck, committed
from pipeline.contract.stage_work import Work
from pipeline.data.shard_table import ShardTable
from pipeline.errors import UserError
from pipeline.files import read_json, write_json
from pipeline.parallel.ranks import Ranks
from pipeline.records.checkpoints import CHECKPOINTS, named_after_steps, step_of
from pipeline.records.pending_evaluations import evaluation_folder

REST = 3.0
"""Seconds of rest for each of work: a quarter of a core at most, and of what a disk gives to one reader."""
PATIENCE_S = 600.0
"""How long the end of training waits for what is not compared yet."""
SET_ASIDE = "set-aside-"
COMPARED = "tokens-compared.json"
"""In the stage's folder: of which encode the shards are, and the step from which on training was done before all of
them were compared; null once they were."""


class TokenCheck:
    """This rank's part of it. Every method but `needs` is called on all ranks alike.

    table: the encode stage's shards. began: the step that this start of training went on from.
    """

    def __init__(self, work: Work, table: ShardTable, ranks: Ranks, began: int, say: Callable[[str], None]) -> None:
        self.work, self.ranks, self.began, self.say = work, ranks, began, say
        folder, manifest = work.input("encode")
        self._of = manifest.digest
        self.files, self.complete = len(table), False
        if ranks.leads:
            self._note(self._unsure_from())
        # Training text first: it is what weights are made of.
        mine = table.by_split("train")[ranks.rank::ranks.world]
        self._check = InputCheck(committed(folder, [table.record(row) for row in mine], "encode"), REST)

    def needs(self, step: int) -> bool:
        """Whether the checkpoint after `step` may be what training has to go back to."""
        return step == self.began and not self.complete

    def votes(self) -> tuple[float, float]:
        """What this rank adds to the sum that all make: whether it found damage, and whether it has found none."""
        return float(bool(self._check.problem)), float(self._check.sound)

    def judge(self, damaged: float, sound: float, settle: Callable[[], None]) -> None:
        """By the sums of `votes`; `settle` lets a save in flight end.

        Raises:
            UserError: a shard is damaged; the same on every rank.
        """
        if damaged:
            problems = [problem for problem in self.ranks.gather(self._check.problem) if problem]
            settle()
            raise UserError("\n".join([*problems, *self.ranks.same(self._go_back() if self.ranks.leads else None)]))
        if not self.complete and round(sound) == self.ranks.world:
            self.complete = True
            if self.ranks.leads:
                self._note(None)

    def finish(self, settle: Callable[[], None]) -> int:
        """Wait for the rest, for a while; how many shards were compared. UserError as for `judge`."""
        self._check.wait(PATIENCE_S)
        damaged, sound, checked = self.ranks.sum(*self.votes(), self._check.checked)
        self.judge(damaged, sound, settle)
        if round(checked) < self.files:
            self.say(f"warning: {round(checked):,} of {self.files:,} token shards were compared with what encode "
                     f"committed; the others not, since training ended before")
        return round(checked)

    def close(self) -> None:
        """Look no further."""
        self._check.close()

    def _go_back(self) -> list[str]:
        """Give the checkpoints of this start, and what was measured of them, names under which nobody takes them; what
        there is to say of them. For one rank."""
        aside, folder = [], self.work.folder / CHECKPOINTS
        for path in named_after_steps(folder):
            step = step_of(path)
            if step > self.began:
                _rename(path)
                aside.append(path.name)
                with suppress(OSError):  # most often there is none
                    _rename(evaluation_folder(self.work.run.folder, step))
        told = [f"Checkpoints that may be made of it are set aside as {folder}/{SET_ASIDE}*: {', '.join(aside)}. "
                f"Training will go on from step {self.began}."] if aside else []
        if (unsure := self._unsure_from()) < self.began:
            told.append(f"The checkpoint of step {self.began} was saved by a start that ended before all shards were "
                        f"compared: training is sound for certain up to step {unsure} only. Should that matter, start "
                        f"again with --force.")
        return told

    def _unsure_from(self) -> int:
        """The step from which on training is done with shards that were not all compared."""
        try:
            record = read_json(self.work.folder / COMPARED)
            if record["encode"] == self._of:
                return self.began if record["unsure_from"] is None else min(self.began, int(record["unsure_from"]))
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return 0

    def _note(self, unsure_from: int | None) -> None:
        write_json(self.work.folder / COMPARED, {"encode": self._of, "unsure_from": unsure_from})


def _rename(path: Path) -> None:
    number, name = 1, f"{SET_ASIDE}{path.name}"
    while (target := path.with_name(name)).exists():
        number, name = number + 1, f"{SET_ASIDE}{path.name}.{number + 1}"
    path.rename(target)
