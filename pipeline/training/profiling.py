"""Where the time and the memory of some steps go: traces, the operations that take most, and on GPUs the allocations.

    train/profile/steps-5-7.rank0.trace.json.gz     for https://ui.perfetto.dev or chrome://tracing
    train/profile/steps-5-7.rank0.operations.txt    a table of the operations that take most
    train/profile/steps-5-7.rank0.memory.pickle     on GPUs: for https://pytorch.org/memory_viz
"""

from __future__ import annotations

import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

from drover.pipeline.config.training import ProfileConfig
from drover.pipeline.core.files import copy_file, write_text
from drover.pipeline.training.hooks import Hook

if TYPE_CHECKING:
    from drover.pipeline.training.loop import Loop

PROFILE = "profile"
ROWS, TOLD = 40, 5
"""How many operations the table has, and how many the log names."""
ALLOCATIONS = 200_000
"""The most allocations and releases that a memory snapshot goes back over."""


class Profiling(Hook):
    """Profiles the steps of this start that `train.profile` names, on the ranks that it names."""

    def __init__(self, config: ProfileConfig, start: int) -> None:
        self.config, self.start, self.last = config, start, start + config.steps - 1
        self._first = 0
        self._profile: profile | None = None

    def on_start(self, loop: Loop) -> None:
        """The profiler waits until one step before the first, where there is one, which pays for its setting up."""
        self._first, early = loop.progress.step + self.start, min(1, self.start - 1)
        if loop.ranks.rank not in self.config.ranks:
            return
        gpu = loop.ranks.device.type == "cuda"
        self._profile = profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * gpu], schedule=schedule(
            skip_first=self.start - 1 - early, wait=0, warmup=early, active=self.config.steps), acc_events=True)
        self._profile.start()
        self._record_allocations(loop)

    def after_step(self, loop: Loop) -> None:
        """After the last step that is profiled, all ranks wait until it is written, and rank 0 tells what took most on
        each."""
        if loop.done < self.last and self._profile is not None:
            self._profile.step()
            self._record_allocations(loop)
        if loop.done != self.last:
            return
        with loop.watchdog.paused(loop.ranks.barrier):
            try:
                told: Any = self._write(loop)
            except (OSError, RuntimeError) as error:  # what is only looked at stops no training
                told = f"the profile of rank {loop.ranks.rank} could not be written: {error}"
            for rank, found in enumerate(loop.ranks.collect(told)):
                self._tell(loop, rank, found)

    def on_end(self, loop: Loop) -> None:
        """See Hook. What was to be profiled and was not done by then is dropped, and this is said."""
        if loop.done < self.last:
            loop.say(f"train.profile: training ended after {loop.done} steps of this start, before the {self.last} "
                     f"that were to be done; no profile is written")
        if self._profile is not None:
            with suppress(RuntimeError):
                self._profile.stop()

    def _record_allocations(self, loop: Loop) -> None:
        """On a GPU, from one step before the first on. With torch's C++ frames, finding their names takes minutes."""
        if loop.ranks.device.type == "cuda" and loop.done == max(0, self.start - 2):
            torch.cuda.memory._record_memory_history(max_entries=ALLOCATIONS, stacks="python")

    def _write(self, loop: Loop) -> dict[str, float]:
        """Write what this rank has; the shares of its operations, {} where it is not profiled."""
        if self._profile is None:
            return {}
        found, self._profile = self._profile, None
        found.stop()
        folder, on = loop.work.folder / PROFILE, "device" if loop.ranks.device.type == "cuda" else "cpu"
        base = f"steps-{self._first}-{loop.progress.step}.rank{loop.ranks.rank}"
        with tempfile.TemporaryDirectory() as scratch:  # torch writes to paths, and not atomically
            trace, memory = Path(scratch) / "trace.json.gz", Path(scratch) / "memory.pickle"
            found.export_chrome_trace(str(trace))
            copy_file(trace, folder / f"{base}.{trace.name}")
            if on == "device":
                torch.cuda.memory._dump_snapshot(str(memory))
                torch.cuda.memory._record_memory_history(enabled=None)
                copy_file(memory, folder / f"{base}.{memory.name}")
        averages = found.key_averages()
        write_text(folder / f"{base}.operations.txt", averages.table(sort_by=f"self_{on}_time_total", row_limit=ROWS))
        return shares_of(averages, on)

    def _tell(self, loop: Loop, rank: int, found: dict[str, float] | str) -> None:
        if isinstance(found, str):
            loop.say(found)
        elif found:
            steps = self.config.steps
            loop.recorder.event(PROFILE, step=loop.progress.step, steps=steps, rank=rank, shares=found)
            most = ", ".join(f"{name} {share:.0%}" for name, share in list(found.items())[:TOLD])
            loop.say(f"profiled {steps} steps up to step {loop.progress.step} on rank {rank}; most time: {most}; more "
                     f"in {loop.work.folder / PROFILE}")


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
