"""Profiles of some steps: traces, the slowest operations, and on GPUs the memory allocations.

    train/profile/steps-5-7.rank0.trace.json.gz     for https://ui.perfetto.dev or chrome://tracing
    train/profile/steps-5-7.rank0.operations.txt    a table of the slowest operations
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
ROWS, PRINTED_ROWS = 40, 5
"""Operations in the table, and operations that the log names."""
ALLOCATIONS = 200_000
"""The most allocations and releases in a memory snapshot."""


class Profiling(Hook):
    """Profiles the steps of this start and the ranks that `train.profile` names."""

    def __init__(self, config: ProfileConfig, start: int) -> None:
        self.config = config
        self.start = start
        self.last = start + config.steps - 1
        self._first = 0
        self._profile: profile | None = None

    def on_start(self, loop: Loop) -> None:
        """Start the profiler. It records from one step before the first, if there is one, which absorbs its setup."""
        self._first = loop.progress.step + self.start
        early = min(1, self.start - 1)
        if loop.ranks.rank not in self.config.ranks:
            return
        gpu = loop.ranks.device.type == "cuda"
        self._profile = profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * gpu], schedule=schedule(
            skip_first=self.start - 1 - early, wait=0, warmup=early, active=self.config.steps), acc_events=True)
        self._profile.start()
        self._record_allocations(loop)

    def after_step(self, loop: Loop) -> None:
        """After the last profiled step, all ranks wait until the profile is written, and rank 0 logs the slowest
        operations of each."""
        if loop.done < self.last and self._profile is not None:
            self._profile.step()
            self._record_allocations(loop)
        if loop.done != self.last:
            return
        with loop.watchdog.paused(loop.ranks.barrier):
            try:
                result: Any = self._write(loop)
            except (OSError, RuntimeError) as error:  # a profile that fails does not stop training
                result = f"the profile of rank {loop.ranks.rank} could not be written: {error}"
            for rank, results in enumerate(loop.ranks.collect(result)):
                self._log(loop, rank, results)

    def on_end(self, loop: Loop) -> None:
        """See Hook. If the profiled steps were not reached, log it."""
        if loop.done < self.last:
            loop.say(f"train.profile: training ended after {loop.done} steps of this start, before the {self.last} "
                     f"that were to be done; no profile is written")
        if self._profile is not None:
            with suppress(RuntimeError):
                self._profile.stop()

    def _record_allocations(self, loop: Loop) -> None:
        """On a GPU, record allocations from one step before the first. Without torch's C++ frames, whose names take
        minutes to find."""
        if loop.ranks.device.type == "cuda" and loop.done == max(0, self.start - 2):
            torch.cuda.memory._record_memory_history(max_entries=ALLOCATIONS, stacks="python")

    def _write(self, loop: Loop) -> dict[str, float]:
        """Write this rank's profile. Returns the shares of its operations, {} if it is not profiled."""
        if self._profile is None:
            return {}
        result, self._profile = self._profile, None
        result.stop()
        folder = loop.work.folder / PROFILE
        on = "device" if loop.ranks.device.type == "cuda" else "cpu"
        base = f"steps-{self._first}-{loop.progress.step}.rank{loop.ranks.rank}"
        with tempfile.TemporaryDirectory() as scratch:  # torch writes to paths, and not atomically
            trace, memory = Path(scratch) / "trace.json.gz", Path(scratch) / "memory.pickle"
            result.export_chrome_trace(str(trace))
            copy_file(trace, folder / f"{base}.{trace.name}")
            if on == "device":
                torch.cuda.memory._dump_snapshot(str(memory))
                torch.cuda.memory._record_memory_history(enabled=None)
                copy_file(memory, folder / f"{base}.{memory.name}")
        averages = result.key_averages()
        write_text(folder / f"{base}.operations.txt", averages.table(sort_by=f"self_{on}_time_total", row_limit=ROWS))
        return shares_of(averages, on)

    def _log(self, loop: Loop, rank: int, result: dict[str, float] | str) -> None:
        if isinstance(result, str):
            loop.say(result)
        elif result:
            steps = self.config.steps
            loop.recorder.event(PROFILE, step=loop.progress.step, steps=steps, rank=rank, shares=result)
            most = ", ".join(f"{name} {share:.0%}" for name, share in list(result.items())[:PRINTED_ROWS])
            loop.say(f"profiled {steps} steps up to step {loop.progress.step} on rank {rank}; most time: {most}; more "
                     f"in {loop.work.folder / PROFILE}")


def shares_of(averages: Any, on: str) -> dict[str, float]:
    """Each operation's share of the total time, the largest first; on a GPU, each kernel's.

    averages: torch.profiler's, by operation. on: measure the time of `device` or `cpu`. torch also adds a kernel's time
    to the CPU's operator and to every range around it; those are not counted.
    """
    times = Counter[str]()
    for item in averages:
        kernel = item.device_type != DeviceType.CPU and not item.is_user_annotation
        if kernel if on == "device" else not item.key.startswith("ProfilerStep"):
            times[item.key] += getattr(item, f"self_{on}_time_total")
    total = sum(times.values()) or 1
    return {name: round(time / total, 4) for name, time in times.most_common(ROWS)}
