"""Token shards are hashed in the background when a step first reads them, and compared with the encode stage's
manifest.

A checkpoint appears only when all shards that were read before it are as encode recorded them, so none is made of
damaged tokens. If one is not, all ranks stop together, and training continues from the newest checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from drover.pipeline.contract.input_check import InputCheck
from drover.pipeline.core.errors import UserError
from drover.pipeline.data.remote_tokens import recorded_shards
from drover.pipeline.data.sampling.packing import forget
from drover.pipeline.records.checkpoints import complete_checkpoints, step_of
from drover.pipeline.training.hooks import Hook

if TYPE_CHECKING:
    from drover.pipeline.contract.stage_work import Work
    from drover.pipeline.parallel.ranks import Ranks
    from drover.pipeline.training.data.step_batches import StepBatches
    from drover.pipeline.training.loop import Loop
    from drover.pipeline.training.recorder import Recorder

DAMAGED = "token_shards_damaged"
"""The event: the steps after `step`, the newest checkpoint's, may have read damaged tokens and are repeated."""


class DamagedTokensError(UserError):
    """A token shard is not what encode recorded."""


class TokenCheck(Hook):
    """This rank's part of the comparison. Each shard is hashed by one rank; one that was downloaded to every node, by
    one rank of each node."""

    def __init__(self, work: Work, ranks: Ranks, nodes: Sequence[str], batches: StepBatches, recorder: Recorder
                 ) -> None:
        self.work = work
        self.ranks = ranks
        self.batches = batches
        self.recorder = recorder
        table = batches.table
        readers = [rank for rank, node in enumerate(nodes) if node == nodes[ranks.rank]]
        if work.config.train.tokens_from is None:
            readers = list(range(ranks.world))
        self._unread = np.zeros(len(table), bool)
        self._unread[readers.index(ranks.rank)::len(readers)] = True
        self._check = InputCheck([])
        self._closed = False
        self._compare(table.rows("validation"))

    def votes(self, loop: Loop) -> Sequence[float]:
        """Compare the shards that the next step is the first to read. Returns whether this rank found a damaged one."""
        if self._unread.any():
            samples = loop.guards.excluded.numbers(loop.progress.samples, 0, loop.batch.sequences)
            self._compare(loop.data.shard_rows(samples))
        return [bool(self._check.problem)]

    def on_votes(self, loop: Loop, sums: Sequence[float]) -> None:
        """DamagedTokensError, the same on every rank, if a shard is damaged."""
        if not any(sums):
            return
        loop.watchdog.pause()
        problems = [problem for problem in loop.ranks.gather(self._check.problem) if problem]
        self.close()
        loop.saver.settle()  # a save that waits for other shards ends without a checkpoint

        def refuse() -> None:
            raise self._error(problems)
        loop.ranks.by_leader(refuse)

    def refuse_damaged(self) -> None:
        """Wait until this rank's part of the shards read so far is compared. Called in the thread that saves, before a
        checkpoint appears. DamagedTokensError if one is damaged, or if the comparison was ended."""
        self._check.wait()
        if self._closed or self._check.problem:
            raise self._error([self._check.problem])

    def note_damage(self) -> None:
        """Log that steps will be repeated, and delete plans of packings that may be made of damage."""
        self.recorder.event(DAMAGED, step=max(map(step_of, self._checkpoints()), default=0))
        if self.ranks.is_rank_zero:
            for packing in self.batches.data.packings:
                forget(packing)

    def close(self) -> None:
        """Stop comparing."""
        self._closed = True
        self._check.close()

    def _compare(self, rows: np.ndarray) -> None:
        new = rows[self._unread[rows]]
        self._unread[new] = False
        self._check.add(recorded_shards(self.work, self.batches.table, new.tolist()))

    def _error(self, problems: Iterable[str]) -> DamagedTokensError:
        saved = self._checkpoints()
        newest = f"The newest checkpoint is {saved[-1]}." if saved else "There is no checkpoint yet."
        return DamagedTokensError("\n".join([*filter(None, problems), newest]))

    def _checkpoints(self) -> list[Path]:
        return complete_checkpoints(self.work.folder)
