"""The checkpoints of a training run: saved while training continues, verified, and continued from.

A checkpoint is written to a temporary folder, renamed, and marked; pipeline/records/checkpoints.py defines its place.
The newest valid one counts. Any engine on any number of ranks can load it.

The loop waits for the copy to host memory, a thread does the rest. One save is in flight at a time. The threads of all
ranks communicate through their own channel (pipeline/parallel/host_channel.py). A failed save is logged and retried.
After the last attempt all ranks stop with the reason.

On a resume the phases of the plan that have started must stay; later ones may change.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import torch

from drover.pipeline.config.phases import Phase, PhasePlan, tokens_text
from drover.pipeline.config.training import CheckpointConfig, TrainConfig
from drover.pipeline.core.background import BackgroundWorker
from drover.pipeline.core.console import Say, first
from drover.pipeline.core.errors import UserError, is_full_disk, listed
from drover.pipeline.core.files import Outputs, problem_of, publish, renamed, write_sealed
from drover.pipeline.formats.sharded_tensors import (
    CheckpointReader,
    Index,
    Pieces,
    TensorShard,
    read_index,
    write_index,
    write_part,
)
from drover.pipeline.parallel.host_channel import HostChannel
from drover.pipeline.parallel.messages import portable
from drover.pipeline.parallel.ranks import Ranks
from drover.pipeline.records.checkpoints import (
    FORMAT,
    MARKER,
    TrainingProgress,
    checkpoint_name,
    complete_checkpoints,
    read_marker,
    step_of,
    valid_marker,
)
from drover.pipeline.training.data import DamagedTokensError
from drover.pipeline.training.device import choose_precision
from drover.pipeline.training.engine import Engine
from drover.pipeline.training.optimizers import planned_rate

T = TypeVar("T")
SLAB_BYTES = 1 << 28
"""Host memory is allocated in pieces of this size, or of a larger tensor's size."""
Event = Callable[..., None]
"""event(name, **details): the loop logs it. Any thread may call it."""
FIXED = ("sequence_length", "batch_tokens", "mixture")
CURVE = ("lr", "lr_end", "schedule", "warmup_steps")
OWN_CURVE = ("lr", "min_lr_share", "warmup_steps", "schedule", "decay_steps")
OF_A_PLAN = ("steps", "packing", "phases", "grain_tokens", *FIXED, *OWN_CURVE)
"""The settings of train that make the plan."""


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
                about: Mapping[str, object]) -> None:
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


@dataclass(eq=False)
class AsyncSaver:
    """Writes the checkpoints of one training run. Every method is called on all ranks alike, except `failed`.

    Args:
        about: further fields of the marker, besides progress and files.
        saved: called with the step of each complete checkpoint, on every rank, in the thread that saves.
        refuse_damaged: called there when this rank's part is written; if it raises, the checkpoint does not appear.
    """

    checkpoints: Checkpoints
    config: CheckpointConfig
    about: Mapping[str, object]
    event: Event
    saved: Callable[[int], None] = lambda step: None
    refuse_damaged: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.say = self.checkpoints.say
        self.ranks = self.checkpoints.ranks
        self.on_gpu = self.ranks.device.type == "cuda"
        self.channel = HostChannel(self.ranks)
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
            files: list[Any] = [*index.files, written]
            self.checkpoints.publish(temporary, files, progress, self.about)
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


def continued(path: Path, progress: TrainingProgress, plan: str, accepted: bool) -> TrainingProgress:
    """The progress of training that continues from the checkpoint at `path` with `progress`.

    Args:
        plan: SHA-256 of the configured order of samples.
        accepted: whether it may differ from the checkpoint's.

    Raises:
        UserError: it differs and must not.
    """
    if progress.plan_sha256 != plan and not accepted:
        raise UserError(f"{path} was trained on other token shards, sequence length, mixture or seed than are "
                        f"configured now (plan {progress.plan_sha256[:12]} -> {plan[:12]}). Use --accept-changes to "
                        f"continue with the new order, or --force to start again.")
    return dataclasses.replace(progress, plan_sha256=plan)


def changed_code(path: Path, code: dict[str, str]) -> str:
    """A warning if the checkpoint at `path` was made by other code than `code`, hashes by file; "" if it was not."""
    before = read_marker(path).code
    changed = sorted(name for name in before.keys() | code.keys() if before.get(name) != code.get(name))
    return f"warning: trained so far by other code than is here now ({first(changed)})" if before and changed else ""


def changed_future(path: Path, progress: TrainingProgress, plan: PhasePlan) -> list[str]:
    """The changes in later phases since the checkpoint at `path` was written, a sentence each. A training without
    phases is one phase; while it has none, any change needs --accept-changes, and none is named here.

    Raises:
        UserError: a phase that has started has changed; names it, and both values.
    """
    written = read_marker(path).config.get("train", {})
    before = PhasePlan.of(TrainConfig.model_validate({key: written[key] for key in OF_A_PLAN if key in written}))
    if not (before.declared or plan.declared):
        return []
    changes = list(plan_changes(before, plan, progress.step))
    past = [text for started, text in changes if started]
    # The phases after the first begin at sample numbers that follow from the plan alone.
    if not (past or before.declared) and (used := plan.sequences_between(0, progress.step)) != progress.samples:
        past.append(f"{progress.samples:,} samples were used; with train.phases from the start it would be {used:,}. "
                    f"So samples were left out, or train.batch_tokens has changed: leave train.phases out")
    if past:
        raise UserError(
            f"{path.name} was trained with another plan, and the plan of finished steps cannot change:\n{listed(past)}"
            f"\nRestore these. You may still change phases that have not started, the end of the current phase (after "
            f"step {progress.step}), and add phases. To start from scratch, use --force or name=<another>.")
    result = [text for _, text in changes]
    if result and progress.step < min(before.steps, plan.steps):
        was, rate = planned_rate(progress.step, before), planned_rate(progress.step, plan)
        if was != rate:
            result.append(f"the learning rate of step {progress.step + 1} changes from {was:.3g} to {rate:.3g}, since "
                         f"the length of its schedule has changed")
    return result


def plan_changes(before: PhasePlan, now: PhasePlan, step: int) -> Iterator[tuple[bool, str]]:
    """The differences between two plans: whether the phase had started by step `step`, and a sentence with both
    values."""
    if now.phases[0].train.packing == "concatenate" and before.grain != now.grain:
        yield True, (f"sources were cut into chunks of {before.grain:,} tokens, and would now be cut into chunks of "
                     f"{now.grain:,}: set train.grain_tokens to {before.grain}; a phase of longer sequences then reads "
                     f"its sources from the start again")
    for old, new in zip_longest(before.phases, now.phases):
        if old is None:
            yield False, f"train.phases[{new.number}] was added ({new})"
            continue
        started = old.first_step < step
        if new is None:
            yield started, f"train.phases[{old.number}] is gone ({old})"
            continue
        was, after = _settings(old, new.name), _settings(new, new.name)
        for key in was | after:
            if was.get(key) != after.get(key):
                yield started, f"{key}: {was.get(key)} -> {after.get(key)}"
        end = "train.steps" if new.own is None else f"{new.name}.until"
        if new.end_step != old.end_step:
            yield min(old.end_step, new.end_step) < step, f"{end}: {_until(old)} -> {_until(new)}"


def _settings(phase: Phase, name: str) -> dict[str, object]:
    """The settings that a phase of this name must keep once it has started, by key."""
    result = {f"{name}.{key}": getattr(phase.train, key) for key in FIXED}
    if phase.number == 0:
        result |= {f"train.{key}": getattr(phase.train, key) for key in OWN_CURVE}
    return result | {f"{name}.{key}": value for key in CURVE if (value := getattr(phase.own, key, None)) is not None}


def _until(phase: Phase) -> str:
    return tokens_text(phase.own.until) if phase.own is not None else f"step {phase.end_step}"


def load(path: Path, engine: Engine, ranks: Ranks, updates: int) -> None:
    """Load weights, optimizer state and random generators from a checkpoint, written by any engine on any number of
    ranks."""
    with CheckpointReader(path, index=ranks.by_leader(lambda: read_index(path))) as reader:
        engine.load(reader, updates)
        for device, restore in (("cpu", torch.set_rng_state), ("cuda", torch.cuda.set_rng_state)):
            table = f"random.{device}"
            rank = ranks.rank
            # After a change of ranks or devices the checkpoint may have no state for this rank.
            if device in ("cpu", ranks.device.type) and table in reader.names() and rank < reader.shape(table)[0]:
                restore(reader.read(table, (rank, 0), (1, reader.shape(table)[1]))[0])


def agreed_precision(wanted: str, started: str, ranks: Ranks) -> tuple[str, str]:
    """The precision of all ranks, and the reason. started: the checkpoint's, if there is one: `auto` must not change
    with the machine."""
    if wanted == "auto" and started:
        return started, f"{started}, as the run started"
    result = ranks.gather(choose_precision(wanted, ranks.device))
    chosen, why = result[0]
    if len({name for name, _ in result}) > 1:
        chosen, why = "fp32", "fp32: not every rank has fast bf16"
    return chosen, f"{why}, {started} before" if started not in ("", chosen) else why
