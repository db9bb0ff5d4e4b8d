"""Save a checkpoint while training continues: the loop waits for the copy to host memory, a thread does the rest.

One save is in flight at a time. The threads of all ranks communicate through their own channel
(pipeline/parallel/host_channel.py). A failed save is logged and retried. After the last attempt all ranks stop with the
reason.
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
from drover.pipeline.core.console import Say
from drover.pipeline.core.errors import UserError, is_full_disk
from drover.pipeline.core.files import Record
from drover.pipeline.formats.shard_index import Index
from drover.pipeline.formats.sharded_tensors import Pieces, TensorShard, write_index, write_part
from drover.pipeline.parallel.host_channel import HostChannel
from drover.pipeline.parallel.messages import portable
from drover.pipeline.parallel.ranks import Ranks
from drover.pipeline.records.checkpoints import TrainingProgress
from drover.pipeline.training.checkpoint import Checkpoints
from drover.pipeline.training.data.token_check import DamagedTokensError

T = TypeVar("T")
SLAB_BYTES = 1 << 28
"""Host memory is allocated in pieces of this size, or of a larger tensor's size."""
Event = Callable[..., None]
"""event(name, **details): the loop logs it. Any thread may call it."""


class AsyncSaver:
    """Writes the checkpoints of one training run. Every method is called on all ranks alike, except `failed`.

    Args:
        about: further fields of the marker, besides progress and files.
        saved: called with the step of each complete checkpoint, on every rank, in the thread that saves.
        refuse_damaged: called there when this rank's part is written; if it raises, the checkpoint does not appear.
    """

    def __init__(self, checkpoints: Checkpoints, ranks: Ranks, config: CheckpointConfig, about: Record,
                 say: Say, event: Event, saved: Callable[[int], None] = lambda step: None,
                 refuse_damaged: Callable[[], None] = lambda: None) -> None:
        self.checkpoints = checkpoints
        self.config = config
        self.about = about
        self.say = say
        self.event = event
        self.saved = saved
        self.refuse_damaged = refuse_damaged
        self.on_gpu = ranks.device.type == "cuda"
        self.ranks = ranks
        self.channel = HostChannel(ranks)
        self._host: dict[tuple[str, int], torch.Tensor] = {}
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self._worker = BackgroundWorker("checkpoints", self._save)
        self.last_save = time.monotonic()

    @property
    def failed(self) -> bool:
        """Whether the save in flight was given up on this rank. The other ranks may not know yet."""
        return self._worker.error is not None

    def prepare(self, pieces: Pieces) -> None:
        """Allocate the host memory for copies now, so that a lack of memory shows before the first save."""
        self._copy(pieces)

    def save(self, pieces: Pieces, progress: TrainingProgress) -> None:
        """Start to save; without `background`, save."""
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
            DamagedTokensError: a token shard that was read is damaged; the same on every rank.
            OSError: the save failed because the disk is full; the same on every rank.
            UserError: the disk or folder failed in another way.
            RuntimeError: it failed for another reason.
        """
        self._worker.wait()
        error = self._worker.error
        if isinstance(error, OSError) and not is_full_disk(error):
            raise UserError(f"Saving failed {self.config.attempts} times: {error}. Training stopped, since later steps "
                            f"could be lost; the last complete checkpoint in {self.checkpoints.folder} is valid. "
                            f"Check the disk or folder, and run the same command again.") from error
        if error is not None:
            raise error

    def settle(self) -> None:
        """Wait for a save in flight, successful or not, before the process ends."""
        self._worker.wait(self.ranks.patience.total_seconds())

    def _row(self, state: torch.Tensor) -> TensorShard:
        """This rank's row in the table of all ranks' generator states."""
        return TensorShard(state.unsqueeze(0), (self.ranks.rank, 0), (self.ranks.world, len(state)))

    def _copy(self, pieces: Pieces) -> Pieces:
        """Copy the pieces to host memory, always the same memory: allocating would cost more than the copy. No copy is
        made if the pieces are on the host and training waits for the save."""
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
        """Host memory of a tensor's shape. It is cut from large slabs, because torch rounds each allocation of pinned
        memory up to a power of two, which can be almost twice the need."""
        size = tensor.numel() * tensor.element_size()
        if self._slab.numel() - self._used < size:
            self._slab = torch.empty(max(size, SLAB_BYTES), dtype=torch.uint8, pin_memory=self.on_gpu)
            self._used = 0
        place = self._slab[self._used:self._used + size].view(tensor.dtype).view(tensor.shape)
        self._used += -(-size // 64) * 64
        return place

    def _save(self, item: tuple[Pieces, TrainingProgress, float]) -> None:
        """Save, with up to `attempts` attempts. Runs in the thread."""
        state, progress, stall_s = item
        started = time.perf_counter()
        for attempt in range(1, self.config.attempts + 1):
            began = time.perf_counter()
            problem = self._attempt(state, progress)
            if problem is None:
                break
            if isinstance(problem, DamagedTokensError):
                raise problem
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
        """Write to a temporary folder, index, publish. Returns the error if that failed."""
        final = self.checkpoints.path(progress.step)
        temporary = final.with_name(f"{final.name}.tmp")

        def write(_: None) -> Index:
            index = write_part(temporary / f"rank-{self.ranks.rank:05}.safetensors", state)
            self.refuse_damaged()
            return index

        def publish(index: Index) -> None:
            written = write_index(temporary, index)
            self.checkpoints.publish(temporary, [*index.files, written], progress, self.about)
        problem = in_turn(self.channel, lambda: self.checkpoints.make_room(temporary),
                          write, Index.joined, publish, temporary)
        if problem is not None and self.ranks.is_rank_zero:
            shutil.rmtree(temporary, ignore_errors=True)  # leave no partial checkpoint
        return problem

    def prune(self) -> None:
        """Remove checkpoints that are not kept, on rank 0. A failure is logged, and the next save retries."""
        problem = tried(lambda: self.checkpoints.prune(self.config.keep, self.config.permanent_every))
        if problem is not None:  # for instance, a user put another folder there
            self.say(f"warning: an old checkpoint could not be removed ({problem}); retrying after the next save")


def in_turn(channel: HostChannel, first: Callable[[], Any], share: Callable[[Any], Any],
            join: Callable[[Sequence[Any]], Any], last: Callable[[Any], object], place: object) -> Exception | None:
    """Work of all ranks together, in a thread of each. Rank 0 calls `first`; every rank calls `share` with its result;
    rank 0 calls `last` with their results, which `join` combines. Returns the error, the same on every rank, or None.
    place: see `portable`."""
    started = channel.same(tried(first, place) if channel.ranks.is_rank_zero else None)
    if isinstance(started, Exception):
        return started
    done = channel.joined(tried(lambda: share(started), place), partial(_joined, join))
    ended = tried(lambda: last(raised(done)), place) if channel.ranks.is_rank_zero else None
    return channel.same(ended if isinstance(ended, Exception) else None)


def tried(action: Callable[[], T], place: object = "") -> T | Exception:
    """The result of `action`, or its error in a form that can be sent to other ranks. place: see `portable`."""
    try:
        return action()
    except Exception as error:  # noqa: BLE001 - raised on every rank
        return portable(error, place)


def raised(result: T | Exception) -> T:
    """Raise an error that was received; return any other value."""
    if isinstance(result, Exception):
        raise result
    return result


def _joined(join: Callable[[Sequence[Any]], Any], parts: Sequence[Any]) -> Any:
    """The joined parts of several ranks, or an error: a full disk first, since a user can fix that, else the first
    one."""
    problems = [part for part in parts if isinstance(part, Exception)]
    return min(problems, key=lambda problem: not is_full_disk(problem)) if problems else tried(lambda: join(parts))
