"""Saving a checkpoint while training goes on: the loop stops for the copy to host memory, a thread does the rest.

One save is in flight at a time. The threads of all ranks talk through a channel of their own
(pipeline/parallel/host_channel.py). A failure is said, logged and tried again; when the attempts are used up, all ranks
stop with its reason.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from pipeline.config.training import CheckpointConfig
from pipeline.contract.signed import MessageError
from pipeline.errors import UserError, is_full_disk
from pipeline.formats.shard_index import Index
from pipeline.formats.sharded_tensors import TensorShard, write_index, write_part
from pipeline.parallel.host_channel import HostChannel
from pipeline.parallel.messages import portable
from pipeline.parallel.ranks import Ranks
from pipeline.records.checkpoints import TrainingProgress
from pipeline.training.checkpoint import Checkpoints

T = TypeVar("T")
SLAB_BYTES = 1 << 28
"""Host memory is taken in pieces of this size, or of a larger tensor's."""
Pieces = dict[str, list[TensorShard]]


@dataclass(frozen=True)
class Saved:
    """A save or a copy that ended: the event, as `checkpoint` or `checkpoint_failed`, and what to log of it."""

    event: str
    details: dict[str, Any]


class AsyncSaver:
    """Writes the checkpoints of one training run. Every method is called on all ranks alike, except `failed`.

    Args:
        about: what the marker tells of the run, besides progress and files.
        saved: told of each step whose checkpoint is complete, on every rank, in the thread that saves; it hands the
            step on to be copied.
    """

    def __init__(self, checkpoints: Checkpoints, ranks: Ranks, config: CheckpointConfig, about: dict[str, Any],
                 say: Callable[[str], None], saved: Callable[[int], None] = lambda step: None) -> None:
        self.checkpoints, self.config, self.about, self.say = checkpoints, config, about, say
        self.saved = saved
        self.on_gpu = ranks.device.type == "cuda"
        self.ranks, self.channel = ranks, HostChannel(ranks)
        self._copies: dict[tuple[str, int], torch.Tensor] = {}
        self._slab, self._used = torch.empty(0, dtype=torch.uint8), 0
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._ended: list[Saved] = []
        self.last_save = time.monotonic()

    @property
    def failed(self) -> bool:
        """Whether the save in flight has been given up on this rank. The others may not know yet: ask them all."""
        return self._error is not None

    def prepare(self, pieces: Pieces) -> None:
        """Take the host memory for copies now, so that a first save finds it there (and a lack of it shows)."""
        if self.config.background or self.on_gpu:
            self._copy(pieces)

    def save(self, pieces: Pieces, progress: TrainingProgress) -> float:
        """Begin to save (or, without `background`, save); returns the seconds for which the loop was kept."""
        began = time.perf_counter()
        self.wait()
        if self.config.background or self.on_gpu:
            pieces = self._copy(pieces)
        state = {**pieces, "random.cpu": [self._row(torch.get_rng_state())]}
        if self.on_gpu:
            state["random.cuda"] = [self._row(torch.cuda.get_rng_state())]
        stall = time.perf_counter() - began
        self._thread = threading.Thread(target=self._run, args=(state, progress, stall), daemon=True,
                                        name=f"checkpoint-{progress.step}")
        self._thread.start()
        if not self.config.background:
            self.wait()
            stall = time.perf_counter() - began
        self.last_save = time.monotonic()
        return stall

    def wait(self) -> None:
        """Until nothing is in flight.

        Raises:
            OSError: the save was given up because the disk is full; the same on every rank.
            UserError: because the disk or folder failed in another way.
            RuntimeError: for any other reason.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error = self._error
        if isinstance(error, OSError) and not is_full_disk(error):
            raise UserError(f"Saving failed {self.config.attempts} times: {error}. Training stopped, since what it did "
                            f"now could be lost; the last finished checkpoint in {self.checkpoints.folder} is sound. "
                            f"Look at the disk or folder, and run the same command again.") from error
        if error is not None:
            raise error

    def settle(self) -> None:
        """Let a save in flight end before the process does, whatever becomes of it."""
        if self._thread is not None:
            self._thread.join(self.ranks.patience.total_seconds())

    def ended(self) -> list[Saved]:
        """What has ended since this was last asked, for the log."""
        found = []
        while self._ended:
            found.append(self._ended.pop(0))
        return found

    def _row(self, state: torch.Tensor) -> TensorShard:
        """This rank's row of a table of the generators of all ranks."""
        return TensorShard(state.unsqueeze(0), (self.ranks.rank, 0), (self.ranks.world, len(state)))

    def _copy(self, pieces: Pieces) -> Pieces:
        """The pieces in host memory, in the same place each time: new memory would cost more than the copy."""
        copied: Pieces = {}
        for name, parts in pieces.items():
            for number, part in enumerate(parts):
                place = self._copies.get((name, number))
                if place is None:
                    place = self._copies[(name, number)] = self._room(part.tensor)
                place.copy_(part.tensor, non_blocking=True)
                copied.setdefault(name, []).append(TensorShard(place, part.offset, part.shape))
        if self.on_gpu:
            torch.cuda.synchronize()
        return copied

    def _room(self, tensor: torch.Tensor) -> torch.Tensor:
        """Host memory of a tensor's shape. It is cut from large slabs, because torch rounds each request for pinned
        memory up to a power of two, which could be almost twice what is needed."""
        size = tensor.numel() * tensor.element_size()
        if self._slab.numel() - self._used < size:
            self._slab = torch.empty(max(size, SLAB_BYTES), dtype=torch.uint8, pin_memory=self.on_gpu)
            self._used = 0
        place = self._slab[self._used:self._used + size].view(tensor.dtype).view(tensor.shape)
        self._used += -(-size // 64) * 64
        return place

    def _run(self, state: Pieces, progress: TrainingProgress, stall: float) -> None:
        started = time.perf_counter()
        try:
            for attempt in range(1, self.config.attempts + 1):
                began = time.perf_counter()
                try:
                    path = self._attempt(state, progress)
                except (dist.DistError, MessageError):  # the ranks hear each other no more
                    raise
                except Exception as error:
                    self._note_failure(error, progress, attempt)
                    if attempt == self.config.attempts:
                        raise
                    time.sleep(attempt)
                else:
                    seconds = time.perf_counter() - began
                    kept = stall if self.config.background else stall + time.perf_counter() - started
                    self._ended.append(Saved("checkpoint", {"step": progress.step, "path": path.name,
                                                            "stall_s": round(kept, 4), "seconds": round(seconds, 3)}))
                    return
        except BaseException as error:  # noqa: BLE001 - handed to the loop, which raises it
            self._error = error

    def _note_failure(self, error: Exception, progress: TrainingProgress, attempt: int) -> None:
        self.say(f"saving after step {progress.step} failed (attempt {attempt} of {self.config.attempts}): {error}")
        self._ended.append(Saved("checkpoint_failed", {"step": progress.step, "attempt": attempt,
                                                       "error": str(error)}))

    def _attempt(self, state: Pieces, progress: TrainingProgress) -> Path:
        """Write beside, index, publish; all ranks succeed or none."""
        ranks, checkpoints, channel = self.ranks, self.checkpoints, self.channel
        final = checkpoints.path(progress.step)
        temporary = final.with_name(f"{final.name}.tmp")
        room = tried(lambda: checkpoints.make_room(temporary), temporary) if ranks.leads else None
        raised(channel.same(room))
        part = tried(lambda: write_part(temporary / f"rank-{ranks.rank:05}.safetensors", state), temporary)
        index = channel.joined(part, _joined)
        problem = None
        if index is not None:  # on rank 0
            published = tried(lambda: self._publish(temporary, raised(index), progress), temporary)
            if isinstance(published, Exception):
                shutil.rmtree(temporary, ignore_errors=True)  # no half checkpoint is left behind
                problem = published
        raised(channel.same(problem))
        # The save is done on all ranks. A rank for which it failed now would try again alone, and hear of the next save
        # what the others say of this one: nothing from here on may raise.
        self._hand_on(progress.step)
        if ranks.leads:
            self.prune()
        return final

    def _hand_on(self, step: int) -> None:
        try:
            self.saved(step)
        except Exception as error:  # noqa: BLE001 - said and logged: it is no failure of the save
            self._ended.append(Saved("checkpoint_copy_failed", {"step": step, "error": str(error)}))
            self.say(f"warning: the checkpoint after step {step} is saved, but cannot be copied ({error}); training "
                     f"goes on")

    def prune(self) -> None:
        """Remove what is no longer kept, on rank 0. A failure is no failure of the save, which is done on all ranks: it
        is said, and the next save tries again."""
        try:
            self.checkpoints.prune(self.config.keep, self.config.permanent_every)
        except Exception as error:  # noqa: BLE001 - also where somebody put a folder of another name there
            self.say(f"warning: an old checkpoint could not be removed ({error}); tried again after the next save")

    def _publish(self, temporary: Path, index: Index, progress: TrainingProgress) -> Path:
        written = write_index(temporary, index)
        return self.checkpoints.publish(temporary, [*index.files, written], progress, self.about)


def tried(action: Callable[[], T], place: object = "") -> T | Exception:
    """What `action` gives, or why it failed, as other ranks are told. place: see `portable`."""
    try:
        return action()
    except Exception as error:  # noqa: BLE001 - raised on every rank
        return portable(error, place)


def raised(found: T | Exception) -> T:
    """What a rank was told, or raise it."""
    if isinstance(found, Exception):
        raise found
    return found


def _joined(parts: Sequence[Index | Exception]) -> Index | Exception:
    """The index of several ranks' files, or why there is none: of several reasons, the first rank's."""
    try:
        return Index.joined([raised(part) for part in parts])
    except Exception as error:  # noqa: BLE001 - handed on
        return error
