"""Where the time and the memory of some steps go: traces, the operations that take most, and on GPUs the allocations.

    train/profile/steps-5-7.rank0.trace.json.gz     for https://ui.perfetto.dev or chrome://tracing
    train/profile/steps-5-7.rank0.operations.txt    a table of the operations that take most
    train/profile/steps-5-7.rank0.memory.pickle     on GPUs: for https://pytorch.org/memory_viz
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

from pipeline.config.training import ProfileConfig
from pipeline.files import copy_file, write_text
from pipeline.parallel.ranks import Ranks
from pipeline.training.hooks import Hook
from pipeline.training.watchdog import Watchdog

if TYPE_CHECKING:
    from pipeline.training.loop import Loop

PROFILE = "profile"
ROWS, TOLD = 40, 5
"""How many operations the table has, and how many the log names."""
ALLOCATIONS = 200_000
"""The most allocations and releases that a memory snapshot goes back over."""


class Profiling(Hook):
    """Profiles the steps of this start that `train.profile` names, on the ranks that it names.

    Args:
        folder: the train stage's.
        event: records what happened.
    """

    def __init__(self, config: ProfileConfig, folder: Path, ranks: Ranks, watchdog: Watchdog,
                 say: Callable[[str], None], event: Callable[..., None]) -> None:
        self.config, self.folder, self.ranks, self.watchdog = config, folder / PROFILE, ranks, watchdog
        self._say, self._event = say, event
        self._done = self._first = 0
        self._profile: profile | None = None
        self._last = None if config.start is None else config.start + config.steps - 1

    def on_start(self, loop: Loop) -> None:
        """See Hook."""
        self._begin_if_due(loop.progress.step)

    def after_step(self, loop: Loop) -> None:
        """After the last step that is profiled, all ranks wait until it is written, and rank 0 tells what took most on
        each."""
        step = loop.progress.step
        if self._last is None or self._done >= self._last:
            return
        self._done += 1
        if self._done < self._last:
            if self._profile is not None:
                self._profile.step()
            self._begin_if_due(step)
            return
        with self.watchdog.paused(self.ranks.barrier):
            try:
                shares, problem = self._write(step), ""
            except (OSError, RuntimeError) as error:  # what is only looked at stops no training
                shares, problem = {}, f"the profile of rank {self.ranks.rank} could not be written: {error}"
            for rank, (found, wrong) in enumerate(self.ranks.collect((shares, problem))):
                self._tell(step, rank, found, wrong)

    def _tell(self, step: int, rank: int, shares: dict[str, float], problem: str) -> None:
        if problem:
            self._say(problem)
        elif shares:
            self._event(PROFILE, step=step, steps=self.config.steps, rank=rank, shares=shares)
            most = ", ".join(f"{name} {share:.0%}" for name, share in list(shares.items())[:TOLD])
            self._say(f"profiled {self.config.steps} steps up to step {step} on rank {rank}; most time: {most}; more "
                      f"in {self.folder}")

    def on_end(self, loop: Loop) -> None:
        """See Hook. What was to be profiled and was not done by then is dropped, and this is said."""
        if self._last is not None and self._done < self._last:
            self._say(f"train.profile: training ended after {self._done} steps of this start, before the "
                      f"{self._last} that were to be done; no profile is written")
        if self._profile is not None:
            with suppress(RuntimeError):
                self._profile.stop()
            self._profile = None

    def _begin_if_due(self, done: int) -> None:
        """Start one step early, where there is one: the first step under the profiler pays for its setting up."""
        start = self.config.start
        if start is None or self._done != max(0, start - 2) or self.ranks.rank not in self.config.ranks:
            return
        early = min(1, start - 1)
        gpu, self._first = self.ranks.device.type == "cuda", done + early + 1
        self._profile = profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * gpu],
                                schedule=schedule(wait=0, warmup=early, active=self.config.steps))
        self._profile.start()
        if gpu:
            torch.cuda.memory._record_memory_history(max_entries=ALLOCATIONS)

    def _write(self, step: int) -> dict[str, float]:
        """Write what this rank has; the shares of its operations, {} where it is not profiled."""
        if self._profile is None:
            return {}
        found, self._profile = self._profile, None
        found.stop()
        base = f"steps-{self._first}-{step}.rank{self.ranks.rank}"
        with tempfile.TemporaryDirectory() as scratch:  # torch writes to paths, and not atomically
            trace = Path(scratch) / "trace.json.gz"
            found.export_chrome_trace(str(trace))
            copy_file(trace, self.folder / f"{base}.{trace.name}")
            if self.ranks.device.type == "cuda":
                memory = Path(scratch) / "memory.pickle"
                torch.cuda.memory._dump_snapshot(str(memory))
                torch.cuda.memory._record_memory_history(enabled=None)
                copy_file(memory, self.folder / f"{base}.{memory.name}")
        averages = found.key_averages()
        on = "device" if self.ranks.device.type == "cuda" else "cpu"
        write_text(self.folder / f"{base}.operations.txt",
                   averages.table(sort_by=f"self_{on}_time_total", row_limit=ROWS))
        return shares_of(averages, on)


def shares_of(averages: Any, on: str) -> dict[str, float]:
    """Shares of the time of all operations, the largest first; of a GPU, of its kernels.

    averages: torch.profiler's, by operation. on: `device` or `cpu`, whose time is meant. A kernel's time is that of the
    CPU's operator too, and of every range around it: those do not count.
    """
    times = Counter[str]()
    for item in averages:
        kernel = item.device_type != DeviceType.CPU and not item.is_user_annotation
        if kernel if on == "device" else not item.key.startswith("ProfilerStep"):
            times[item.key] += getattr(item, f"self_{on}_time_total")
    total = sum(times.values()) or 1
    return {name: round(time / total, 4) for name, time in times.most_common(ROWS)}
