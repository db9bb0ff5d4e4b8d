"""Training checkpoints: written beside, proven, renamed, marked; the newest valid one is what counts.

    train/checkpoints/step-00000100/                 pieces of tensors and their index: pipeline/formats/checkpoint.py
                      step-00000100/COMPLETE.json   written last: progress, files with sha256, how it was made

Any engine on any number of ranks can load any checkpoint; the writing is in saving.py.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipeline.errors import UserError
from pipeline.files import sha256_file, sync, write_json
from pipeline.parallel.ranks import Ranks

MARKER = "COMPLETE.json"
FORMAT = 2
"""Of the marker and what it stands for; 1 was torch's distributed checkpoint."""


@dataclass(frozen=True)
class Progress:
    """Where training stands, apart from weights and moments.

    step: optimizer steps done. samples: sequences used, which is the data order's whole state. plan_sha256: the
    order they were drawn in. tokens, targets: what has been trained on. restarts: how often it was continued.
    precision: of the arithmetic. updates: optimizer updates applied, which is `step` less the skipped ones. guards:
    the history that they judge by. record: the metrics of the last step, should a kill have kept them from the log.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    targets: int = 0
    restarts: int = 0
    plan_sha256: str = ""
    precision: str = ""
    updates: int = 0
    guards: dict[str, Any] = field(default_factory=dict)
    record: dict[str, Any] | None = None


class Checkpoints:
    """The checkpoints of one training run. needed: of which steps somebody still needs one; it is not removed."""

    def __init__(self, folder: Path, ranks: Ranks, say: Callable[[str], None],
                 needed: Callable[[int], bool] = lambda step: False) -> None:
        self.folder, self.ranks, self.say, self.needed = folder, ranks, say, needed

    def path(self, step: int) -> Path:
        """Folder of the checkpoint after `step` optimizer steps."""
        return self.folder / f"step-{step:08d}"

    def make_room(self, temporary: Path) -> None:
        """An empty folder to write into; what killed saves left is cleared. For one rank."""
        for leftover in self.folder.glob("step-*.tmp"):
            shutil.rmtree(leftover)
        temporary.mkdir(parents=True)

    def publish(self, temporary: Path, records: list[dict[str, Any]], progress: Progress,
                about: dict[str, Any]) -> Path:
        """Give a written folder its name, then its marker: from that moment it counts. For one rank."""
        final = self.path(progress.step)
        if final.exists():  # damaged, or it would have been loaded: the marker goes first
            (final / MARKER).unlink(missing_ok=True)
            shutil.rmtree(final)
        sync(temporary)
        temporary.rename(final)
        sync(self.folder)
        write_json(final / MARKER, {"format": FORMAT, "progress": asdict(progress), "files": records,
                                    "world_size": self.ranks.world, **about})
        return final

    def newest_valid(self) -> tuple[Path, Progress] | None:
        """The newest checkpoint whose files are all there and unchanged, or None if none was ever finished.

        Unfinished ones are removed; damaged ones are named, set aside as `*.damaged`, and passed over.

        Raises:
            UserError: there are finished checkpoints, and every one is damaged.
        """
        damaged = 0
        for path in self.ranks.same(self._finished() if self.ranks.leads else None):
            if path.suffix == ".damaged":
                damaged += 1
                continue
            marker = self.ranks.same(_read_marker(path) if self.ranks.leads else None)
            problems = self.damage(path, marker["files"]) if marker else [f"{MARKER} is torn"]
            if marker and not problems:
                return path, Progress(**marker["progress"])
            self.say(f"checkpoint {path.name} is damaged ({'; '.join(problems[:3])}); set aside as "
                     f"{path.name}.damaged, going back to the one before it")
            damaged += 1
            if self.ranks.leads:
                # Otherwise it would count as one of the newest when old ones are pruned.
                shutil.rmtree(path.with_name(f"{path.name}.damaged"), ignore_errors=True)
                path.rename(path.with_name(f"{path.name}.damaged"))
        if damaged:
            raise UserError(f"Every finished checkpoint in {self.folder} is damaged (see above). Put sound files back "
                            f"(and take .damaged off the folder's name), or start training again with --force.")
        return None

    def _finished(self) -> list[Path]:
        """Checkpoints that were once finished, damaged ones too, newest first. All others are removed, also those
        older than a sound one: a kill may have cut short their removal. For one rank."""
        found = []
        for path in sorted(self.folder.glob("step-*"), reverse=True):
            if path.suffix == ".damaged" or (path / MARKER).exists():
                found.append(path)
            elif path.suffix != ".tmp":  # those give way to the next save
                self.say(f"checkpoint {path.name} has no {MARKER}: it was never finished, or its removal was cut "
                         f"short; removed")
                shutil.rmtree(path)
        return found

    def damage(self, path: Path, records: list[dict[str, Any]]) -> list[str]:
        """What is wrong with a checkpoint's files; each rank hashes its share, all get the answer."""
        found = []
        for record in records[self.ranks.rank::self.ranks.world]:
            file = path / record["path"]
            if not file.is_file():
                found.append(f"{file.name} is missing")
            elif file.stat().st_size != record["bytes"]:
                found.append(f"{file.name} has {file.stat().st_size} bytes instead of {record['bytes']}")
            elif sha256_file(file) != record["sha256"]:
                found.append(f"{file.name} has other content than was written")
        return [problem for part in self.ranks.gather(found) for problem in part]

    def prune(self, keep: int, permanent_every: int | None) -> None:
        """Remove all but the newest `keep` complete checkpoints, permanent and needed ones; markers go first."""
        if not self.ranks.leads:
            return
        complete = sorted(path for path in self.folder.glob("step-*")
                          if path.suffix != ".damaged" and (path / MARKER).is_file())
        for path in complete[:-keep]:
            step = int(path.name.removeprefix("step-"))
            if (permanent_every is None or step % permanent_every) and not self.needed(step):
                (path / MARKER).unlink()
                shutil.rmtree(path)


def read_marker(path: Path) -> dict[str, Any]:
    """The marker of a checkpoint; UserError if the checkpoint is not complete."""
    marker = _read_marker(path)
    if marker is None:
        raise UserError(f"{path} is not a complete checkpoint: {MARKER} is missing or damaged. "
                        f"Run the train stage again; it continues from the newest complete one.")
    return marker


def _read_marker(path: Path) -> dict[str, Any] | None:
    try:
        marker = json.loads((path / MARKER).read_text(encoding="utf-8"))
        if (form := marker.get("format", 1)) != FORMAT:
            raise UserError(f"{path} is a checkpoint of form {form}; this Drover reads form {FORMAT}. Go on with the "
                            f"version that wrote it (COMPLETE.json names its code), or start again with --force, which "
                            f"sets it aside.")
        Progress(**marker["progress"])
        return marker if isinstance(marker["files"], list) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
