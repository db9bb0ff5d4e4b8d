"""The checkpoints of a training run: written to a temporary folder, verified, renamed, marked. The newest valid one
counts.

Any engine on any number of ranks can load any checkpoint. pipeline/records/checkpoints.py defines their places, and
async_saver.py writes them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from drover.pipeline.core.console import Say
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Outputs, Record, problem_of, publish, renamed, write_sealed
from drover.pipeline.parallel.ranks import Ranks
from drover.pipeline.records.checkpoints import (
    FORMAT,
    MARKER,
    TrainingProgress,
    checkpoint_name,
    complete_checkpoints,
    step_of,
    valid_marker,
)


@dataclass
class Checkpoints:
    """The checkpoints of one training run. needed: whether a step's checkpoint is still in use, so it is kept."""

    folder: Path
    ranks: Ranks
    say: Say
    needed: Callable[[int], bool] = lambda step: False

    def path(self, step: int) -> Path:
        """Folder of the checkpoint after `step` optimizer steps."""
        return self.folder / checkpoint_name(step)

    def make_room(self, temporary: Path) -> None:
        """Make an empty folder to write into, and remove leftovers of killed saves. Called on rank 0."""
        for leftover in self.folder.glob("step-*.tmp"):
            shutil.rmtree(leftover)
        temporary.mkdir(parents=True)

    def publish(self, temporary: Path, records: Outputs, progress: TrainingProgress,
                about: Record) -> None:
        """Give a written folder its name, then its marker: from that moment it counts. Called on rank 0."""
        final = self.place(temporary, progress.step)
        write_sealed(final / MARKER, {"format": FORMAT, "progress": asdict(progress), "files": records,
                                      "world_size": self.ranks.world, **about})

    def place(self, temporary: Path, step: int) -> Path:
        """Give a written folder without a marker the name of the checkpoint after `step`. Called on rank 0."""
        final = self.path(step)
        if final.exists():  # damaged, or it would have been loaded: the marker goes first
            (final / MARKER).unlink(missing_ok=True)
            shutil.rmtree(final)
        publish(temporary, final)
        return final

    def newest_valid(self) -> tuple[Path, TrainingProgress] | None:
        """The newest checkpoint whose files all exist and are unchanged, or None if none was ever finished.

        Unfinished checkpoints are removed. Damaged ones are logged, renamed to `*.damaged`, and skipped.

        Raises:
            UserError: there are finished checkpoints, and all are damaged.
        """
        damaged = 0
        for path in self.ranks.by_leader(self._finished):
            if ".damaged" in path.name:
                damaged += 1
                continue
            marker = self.ranks.by_leader(partial(valid_marker, path))
            problems = self.damage(path, marker.files) if marker else [f"{MARKER} is truncated"]
            if marker and not problems:
                return path, marker.progress
            self.say(f"checkpoint {path.name} is damaged ({'; '.join(problems[:3])}); renamed to "
                     f"{path.name}.damaged, going back to the one before it")
            damaged += 1
            if self.ranks.is_rank_zero:
                # Otherwise it would count as one of the newest when old ones are pruned.
                shutil.rmtree(path.with_name(f"{path.name}.damaged"), ignore_errors=True)
                renamed(path, f"{path.name}.damaged")
        if damaged:
            raise UserError(f"Every finished checkpoint in {self.folder} is damaged (see above). Restore valid files "
                            f"(and remove .damaged from the folder's name), or start training again with --force.")
        return None

    def _finished(self) -> list[Path]:
        """Checkpoints that were once finished, including damaged ones, newest first. All others are removed, even if
        older than a valid one: a kill may have interrupted their removal. Called on rank 0."""
        result = []
        for path in sorted(self.folder.glob("step-*"), reverse=True):
            if path.suffix == ".tmp":  # the next save removes those
                continue
            if ".damaged" in path.name or (path / MARKER).exists():
                result.append(path)
            else:
                self.say(f"checkpoint {path.name} has no {MARKER}: it was never finished, or its removal was "
                         f"interrupted; removed")
                shutil.rmtree(path)
        return result

    def damage(self, path: Path, records: Outputs) -> list[str]:
        """The problems of a checkpoint's files. Each rank hashes its share, and all get the result."""
        problems = [problem_of(path / record["path"], record) for record in records[self.ranks.rank::self.ranks.world]]
        return [problem for part in self.ranks.gather(problems) for problem in part if problem]

    def prune(self, keep: int, permanent_every: int | None) -> None:
        """Remove all but the newest `keep` complete checkpoints, permanent and needed ones; markers go first."""
        if not self.ranks.is_rank_zero:
            return
        for path in complete_checkpoints(self.folder.parent)[:-keep]:
            step = step_of(path)
            if (permanent_every is None or step % permanent_every) and not self.needed(step):
                (path / MARKER).unlink()
                shutil.rmtree(path)
