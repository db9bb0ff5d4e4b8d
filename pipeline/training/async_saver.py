"""Save a checkpoint while training goes on: the loop stops for the copy to host memory, a thread does the rest.

One save is in flight at a time. The threads of all ranks talk through a channel of their own
(pipeline/parallel/host_channel.py). A failure is logged and tried again; when the attempts are used up, all ranks
stop with its reason.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from drover.pipeline.config.training import CheckpointConfig
from drover.pipeline.core.background import BackgroundWorker
from drover.pipeline.core.errors import UserError, is_full_disk
from drover.pipeline.formats.shard_index import Index
from drover.pipeline.formats.sharded_tensors import TensorShard, write_index, write_part
from drover.pipeline.parallel.host_channel import HostChannel
from drover.pipeline.parallel.messages import portable
from drover.pipeline.parallel.ranks import Ranks
from drover.pipeline.records.checkpoints import TrainingProgress
from drover.pipeline.training.checkpoint import Checkpoints

T = TypeVar("T")
SLAB_BYTES = 1 << 28
"""Host memory is taken in pieces of this size, or of a larger tensor's."""
Pieces = dict[str, list[TensorShard]]
Event = Callable[..., None]
"""event(name, **details): to be logged by the loop. May be called from any thread."""


class AsyncSaver:
    """Writes the checkpoints of one training run. Every method is called on all ranks alike, except `failed`.

    Args:
        about: what the marker records of the run, besides progress and files.
        saved: called with each step whose checkpoint is complete, on every rank, in the thread that saves.
    """

    def __init__(self, checkpoints: Checkpoints, ranks: Ranks, config: CheckpointConfig, about: dict[str, Any],
                 say: Callable[[str], None], event: Event, saved: Callable[[int], None] = lambda step: None) -> None:
        self.checkpoints, self.config, self.about, self.say, self.event = checkpoints, config, about, say, event
        self.saved = saved
        self.on_gpu = ranks.device.type == "cuda"
        self.ranks, self.channel = ranks, HostChannel(ranks)
        self._host: dict[tuple[str, int], torch.Tensor] = {}
        self._slab, self._used = torch.empty(0, dtype=torch.uint8), 0
        self._worker = BackgroundWorker("checkpoints", self._save)
        self.last_save = time.monotonic()

    @property
    def failed(self) -> bool:
        """Whether the save in flight was given up on this rank. The other ranks may not know yet."""
        return self._worker.error is not None

    def prepare(self, pieces: Pieces) -> None:
        """Take the host memory for copies now, so that a first save finds it there (and a lack of it shows)."""
        self._copy(pieces)

    def save(self, pieces: Pieces, progress: TrainingProgress) -> None:
        """Begin to save; without `background`, save."""
        began = time.perf_counter()
        self.wait()
        state = {**self._copy(pieces), "random.cpu": [self._row(torch.get_rng_state())]}
        if self.on_gpu:
            state["random.cuda"] = [self._row(torch.cuda.get_rng_state())]
        self._worker.put((state, progress, time.perf_counter() - began))
        if not self.config.background:
            self.wait()
        self.last_save = time.monotonic()

    def wait(self) -> None:
        """Wait until nothing is in flight.

        Raises:
            OSError: the save was given up because the disk is full; the same on every rank.
            UserError: because the disk or folder failed in another way.
            RuntimeError: for any other reason.
        """
        self._worker.wait()
        error = self._worker.error
        if isinstance(error, OSError) and not is_full_disk(error):
            raise UserError(f"Saving failed {self.config.attempts} times: {error}. Training stopped, since what it did "
                            f"now could be lost; the last finished checkpoint in {self.checkpoints.folder} is sound. "
                            f"Look at the disk or folder, and run the same command again.") from error
        if error is not None:
            raise error

    def settle(self) -> None:
        """Let a save in flight end before the process does, whatever becomes of it."""
        self._worker.wait(self.ranks.patience.total_seconds())

    def _row(self, state: torch.Tensor) -> TensorShard:
        """This rank's row of a table of the generators of all ranks."""
        return TensorShard(state.unsqueeze(0), (self.ranks.rank, 0), (self.ranks.world, len(state)))

    def _copy(self, pieces: Pieces) -> Pieces:
        """The pieces in host memory, in the same place each time: new memory would cost more than the copy. They stay
        where they are if they are there and training waits."""
        if not (self.config.background or self.on_gpu):
            return pieces
        copied: Pieces = {}
        for name, parts in pieces.items():
            for number, part in enumerate(parts):
                place = self._host.get((name, number))
                if place is None:
                    place = self._host[(name, number)] = self._room(part.tensor)
                place.copy_(part.tensor, non_blocking=self.on_gpu)
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

    def _save(self, item: tuple[Pieces, TrainingProgress, float]) -> None:
        """Save, in as many attempts as are allowed. In the thread."""
        state, progress, stall_s = item
        started = time.perf_counter()
        for attempt in range(1, self.config.attempts + 1):
            began = time.perf_counter()
            problem = self._attempt(state, progress)
            if problem is None:
                break
            self.say(f"saving after step {progress.step} failed (attempt {attempt} of {self.config.attempts}): "
                     f"{problem}")
            self.event("checkpoint_failed", step=progress.step, attempt=attempt, error=str(problem))
            if attempt == self.config.attempts:
                raise problem
            time.sleep(attempt)
        now = time.perf_counter()
        stall_s += 0.0 if self.config.background else now - started
        self.event("checkpoint", step=progress.step, path=self.checkpoints.path(progress.step).name,
                   stall_s=round(stall_s, 4), seconds=round(now - began, 3))
        self.saved(progress.step)
        self.prune()

    def _attempt(self, state: Pieces, progress: TrainingProgress) -> Exception | None:
        """Write to a temporary folder, index, publish; why that failed."""
        final = self.checkpoints.path(progress.step)
        temporary = final.with_name(f"{final.name}.tmp")

        def publish(index: Index) -> None:
            written = write_index(temporary, index)
            self.checkpoints.publish(temporary, [*index.files, written], progress, self.about)
        problem = in_turn(self.channel, lambda: self.checkpoints.make_room(temporary),
                          lambda _: write_part(temporary / f"rank-{self.ranks.rank:05}.safetensors", state),
                          Index.joined, publish, temporary)
        if problem is not None and self.ranks.leads:
            shutil.rmtree(temporary, ignore_errors=True)  # no half checkpoint is left behind
        return problem

    def prune(self) -> None:
        """Remove what is no longer kept, on rank 0. A failure is logged, and the next save tries again."""
        problem = tried(lambda: self.checkpoints.prune(self.config.keep, self.config.permanent_every))
        if problem is not None:  # also where somebody put a folder of another name there
            self.say(f"warning: an old checkpoint could not be removed ({problem}); tried again after the next save")


def in_turn(channel: HostChannel, first: Callable[[], Any], share: Callable[[Any], Any],
            join: Callable[[Sequence[Any]], Any], last: Callable[[Any], object], place: object) -> Exception | None:
    """What the ranks do together, in a thread of each: rank 0 `first`; all of them their `share` of what that gave;
    rank 0 `last`, with their results as `join` makes one of them. Why it failed, the same on every rank; None if it did
    not. place: see `portable`."""
    begun = channel.same(tried(first, place) if channel.ranks.leads else None)
    if isinstance(begun, Exception):
        return begun
    done = channel.joined(tried(lambda: share(begun), place), partial(_joined, join))
    ended = tried(lambda: last(raised(done)), place) if channel.ranks.leads else None
    return channel.same(ended if isinstance(ended, Exception) else None)


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


def _joined(join: Callable[[Sequence[Any]], Any], parts: Sequence[Any]) -> Any:
    """The parts of several ranks as one, or why there is none: a full disk, which a user can mend, or the first."""
    problems = [part for part in parts if isinstance(part, Exception)]
    return min(problems, key=lambda problem: not is_full_disk(problem)) if problems else tried(lambda: join(parts))
