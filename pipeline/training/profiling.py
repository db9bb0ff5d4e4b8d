"""Profiles of some steps: traces, the slowest operations, and on GPUs the memory allocations.

    train/profile/steps-5-7.rank0.trace.json.gz     for https://ui.perfetto.dev or chrome://tracing
    train/profile/steps-5-7.rank0.operations.txt    a table of the slowest operations
    train/profile/steps-5-7.rank0.memory.pickle     on GPUs: for https://pytorch.org/memory_viz
"""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from drover.pipeline.config.training import ProfileConfig
from drover.pipeline.core.files import copy_file, write_text
from drover.pipeline.training.hooks import Hook

if TYPE_CHECKING:
    from drover.pipeline.training.loop import Loop

PROFILE = "profile"
ROWS = 40
"""Operations in the table."""
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
        """After the last profiled step, all ranks wait until the profiles are written, and rank 0 logs where."""
        if loop.done < self.last and self._profile is not None:
            self._profile.step()
            self._record_allocations(loop)
        if loop.done != self.last:
            return
        problem = ""
        with loop.watchdog.paused(loop.ranks.barrier):
            try:
                self._write(loop)
            except (OSError, RuntimeError) as error:  # a profile that fails does not stop training
                problem = f"the profile of rank {loop.ranks.rank} could not be written: {error}"
            problems = list(filter(None, loop.ranks.collect(problem)))
        written = f"profiled {self.config.steps} steps up to step {loop.progress.step}: {loop.work.folder / PROFILE}"
        for text in problems or [written]:
            loop.say(text)

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

    def _write(self, loop: Loop) -> None:
        """Write this rank's profile, if it has one."""
        if self._profile is None:
            return
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
        table = result.key_averages().table(sort_by=f"self_{on}_time_total", row_limit=ROWS)
        write_text(folder / f"{base}.operations.txt", table)
