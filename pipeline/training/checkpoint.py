"""Training checkpoints: written beside, proven, renamed, marked; the newest valid one is what counts.

    train/checkpoints/step-00000100/     torch.distributed.checkpoint files, any world size can load them
                      step-00000100/COMPLETE.json   written last: step, samples used, plan hash, files with sha256
"""

from __future__ import annotations

import errno
import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from pipeline.errors import UserError
from pipeline.files import sha256_file, sync, write_json
from pipeline.parallel.ranks import Ranks

MARKER = "COMPLETE.json"


@dataclass(frozen=True)
class Progress:
    """Where training stands, apart from weights and moments.

    step: optimizer steps done. samples: sequences used, which is the data order's whole state. plan_sha256: the
    order they were drawn in. tokens, targets: what has been trained on. restarts: how often it was continued.
    precision: of the arithmetic. record: the metrics of the last step, should a kill have kept them from the log.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    targets: int = 0
    restarts: int = 0
    plan_sha256: str = ""
    precision: str = ""
    record: dict[str, Any] | None = None


class Checkpoints:
    """The checkpoints of one training run."""

    def __init__(self, folder: Path, ranks: Ranks, say: Callable[[str], None]) -> None:
        self.folder, self.ranks, self.say = folder, ranks, say

    def path(self, step: int) -> Path:
        """Folder of the checkpoint after `step` optimizer steps."""
        return self.folder / f"step-{step:08d}"

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> Path:
        """Write a checkpoint; it counts from the moment its marker appears. All ranks call this.

        Raises:
            OSError: on every rank, if any rank could not write (a full disk). Earlier checkpoints stay.
        """
        final = self.path(progress.step)
        temporary = final.with_name(f"{final.name}.tmp")
        self._together(lambda: self._make_room(temporary), temporary)
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
        self._together(lambda: _write(state, temporary), temporary)
        # One listing for all: on a network file system two ranks may not see the same files at once.
        files: list[Path] = self.ranks.same(sorted(temporary.iterdir()) if self.ranks.leads else None)
        mine = files[self.ranks.rank::self.ranks.world]
        hashed = [{"path": path.name, "bytes": path.stat().st_size, "sha256": sha256_file(path)} for path in mine]
        records: list[dict[str, Any]] = sorted((record for part in self.ranks.gather(hashed) for record in part),
                                               key=lambda record: str(record["path"]))
        self._together(lambda: self._publish(temporary, final, records, progress), temporary)
        return final

    def _make_room(self, temporary: Path) -> None:
        if self.ranks.leads:
            for leftover in self.folder.glob("step-*.tmp"):  # of saves that were killed
                shutil.rmtree(leftover)
            temporary.mkdir(parents=True)

    def _publish(self, temporary: Path, final: Path, records: list[dict[str, Any]], progress: Progress) -> None:
        if not self.ranks.leads:
            return
        if final.exists():  # damaged, or it would have been loaded: the marker goes first
            (final / MARKER).unlink(missing_ok=True)
            shutil.rmtree(final)
        sync(temporary)
        temporary.rename(final)
        sync(self.folder)
        write_json(final / MARKER, {"progress": asdict(progress), "files": records, "torch": torch.__version__,
                                    "world_size": self.ranks.world})

    def _together(self, action: Callable[[], None], temporary: Path) -> None:
        """Do `action` on every rank; if it fails on one, fail on all, and leave no half checkpoint behind."""
        problem: BaseException | None = None
        try:
            action()
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - raised again below, on every rank
            problem = error  # CheckpointException is no Exception: torch derives it from BaseException
        problems = [found for found in self.ranks.gather(problem and _picklable(problem)) if found is not None]
        if not problems:
            return
        if self.ranks.leads:
            shutil.rmtree(temporary, ignore_errors=True)
        raise problems[0] from problem

    def newest_valid(self) -> tuple[Path, Progress] | None:
        """The newest checkpoint whose files are all there and unchanged, or None if none was ever finished.

        Unfinished ones are removed; damaged ones are named, set aside as `*.damaged`, and passed over.

        Raises:
            UserError: there are finished checkpoints, and every one is damaged.
        """
        damaged = 0
        found = sorted(self.folder.glob("step-*"), reverse=True) if self.ranks.leads else None
        for path in self.ranks.same(found):
            if path.suffix in (".tmp", ".damaged"):
                damaged += path.suffix == ".damaged"
                continue
            seen = (_read_marker(path), (path / MARKER).exists()) if self.ranks.leads else None
            marker, marked = self.ranks.same(seen)
            if not marked:
                self.say(f"checkpoint {path.name} has no {MARKER}: it was never finished, or its removal was cut "
                         f"short; removed")
                if self.ranks.leads:
                    shutil.rmtree(path)
                continue
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

    def load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Bring model and optimizer to the state saved in `path`, on any number of ranks."""
        weights, moments = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": weights, "optimizer": moments}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def prune(self, keep: int, permanent_every: int | None) -> None:
        """Remove all but the newest `keep` complete checkpoints and the permanent ones; markers go first."""
        if not self.ranks.leads:
            return
        complete = sorted(path for path in self.folder.glob("step-*")
                          if path.suffix != ".damaged" and (path / MARKER).is_file())
        for path in complete[:-keep]:
            step = int(path.name.removeprefix("step-"))
            if permanent_every is None or step % permanent_every:
                (path / MARKER).unlink()
                shutil.rmtree(path)


def read_marker(path: Path) -> dict[str, Any]:
    """The marker of a checkpoint; UserError if the checkpoint is not complete."""
    marker = _read_marker(path)
    if marker is None:
        raise UserError(f"{path} is not a complete checkpoint: {MARKER} is missing or damaged. "
                        f"Run the train stage again; it continues from the newest complete one.")
    return marker


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint as whole tensors in host memory, by name, without a process group."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
    reader = dcp.FileSystemReader(path)
    entries = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = {name: torch.empty(entry.size, dtype=entry.properties.dtype)
                             for name, entry in entries.items()
                             if name.startswith("model.") and isinstance(entry, dcp.metadata.TensorStorageMetadata)}
    dcp.load(state, storage_reader=reader, no_dist=True)
    return {name.removeprefix("model."): tensor for name, tensor in state.items()}


def _write(state: dict[str, Any], folder: Path) -> None:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, single_file_per_rank=True, sync_files=True))


def _read_marker(path: Path) -> dict[str, Any] | None:
    try:
        marker = json.loads((path / MARKER).read_text(encoding="utf-8"))
        Progress(**marker["progress"])
        return marker if isinstance(marker["files"], list) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _picklable(error: BaseException) -> Exception:
    """What other ranks are told: an OSError keeps its number (a full disk is the user's to mend), the rest its text."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, OSError):
        return OSError(cause.errno, cause.strerror, str(cause.filename))
    if "inline_container" in str(error):
        # torch's archive writer reports a write that came up short as its own inconsistency, and hides the OSError.
        return OSError(errno.ENOSPC, "a write of the checkpoint came up short")
    return error if isinstance(error, UserError) else RuntimeError(f"{type(error).__name__}: {error}")
