"""Where the time and the memory of some steps go: traces, the operations that take most, and on GPUs the allocations.

    train/profile/steps-5-7.rank0.trace.json.gz     for https://ui.perfetto.dev or chrome://tracing
    train/profile/steps-5-7.rank0.operations.txt    a table of the operations that take most
    train/profile/steps-5-7.rank0.memory.pickle     on GPUs: for https://pytorch.org/memory_viz
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from pipeline.config.training import ProfileConfig
from pipeline.files import copy_file, write_text
from pipeline.parallel.ranks import Ranks
from pipeline.training.watchdog import Watchdog

PROFILE = "profile"
ROWS, TOLD = 40, 5
"""Operations in the table, and of them, those that are said."""
ALLOCATIONS = 200_000
"""The most allocations and releases that a memory snapshot goes back over."""


class Profiling:
    """Profiles the steps of this start that `train.profile` names, on the ranks that it names.

    Args:
        folder: the train stage's.
        event: records what happened.
    """

    def __init__(self, config: ProfileConfig, folder: Path, ranks: Ranks, watchdog: Watchdog,
                 say: Callable[[str], None], event: Callable[..., None]) -> None:
        self.config, self.folder, self.ranks, self.watchdog = config, folder / PROFILE, ranks, watchdog
        self._say, self._event = say, event
        self._done = 0
        self._profile: profile | None = None
        self._last = None if config.start is None else config.start + config.steps - 1

    def begin(self) -> None:
        """The first step of this start comes next."""
        self._begin_if_due()

    def step(self, step: int) -> None:
        """Step number `step` of the run is done. After the last one that is profiled, all ranks wait until it is
        written."""
        if self._last is None or self._done >= self._last:
            return
        self._done += 1
        if self._done == self._last:
            with self.watchdog.paused(self.ranks.barrier):
                self._write(step)
            return
        if self._profile is not None:
            self._profile.step()
        self._begin_if_due()

    def end(self) -> None:
        """Training ends. What was to be profiled and was not done by then is dropped, and this is said."""
        if self._last is not None and self._done < self._last:
            self._say(f"train.profile: training ended after {self._done} steps of this start, before the "
                      f"{self._last} that were to be done; no profile is written")
        if self._profile is not None:
            self._profile.stop()
            self._profile = None

    def _begin_if_due(self) -> None:
        """Start one step early, where there is one: the first step under the profiler pays for its setting up."""
        start = self.config.start
        if start is None or self._done != max(0, start - 2) or self.ranks.rank not in self.config.ranks:
            return
        gpu = self.ranks.device.type == "cuda"
        self._profile = profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * gpu],
                                schedule=schedule(wait=0, warmup=min(1, start - 1), active=self.config.steps))
        self._profile.start()
        if gpu:
            torch.cuda.memory._record_memory_history(max_entries=ALLOCATIONS)

    def _write(self, step: int) -> None:
        steps = f"steps-{step - self.config.steps + 1}-{step}"
        if self._profile is None:
            return
        self._profile.stop()
        base = f"{steps}.rank{self.ranks.rank}"
        with tempfile.TemporaryDirectory() as scratch:  # torch writes to paths, and not atomically
            trace = Path(scratch) / "trace.json.gz"
            self._profile.export_chrome_trace(str(trace))
            copy_file(trace, self.folder / f"{base}.{trace.name}")
            if self.ranks.device.type == "cuda":
                memory = Path(scratch) / "memory.pickle"
                torch.cuda.memory._dump_snapshot(str(memory))
                torch.cuda.memory._record_memory_history(enabled=None)
                copy_file(memory, self.folder / f"{base}.{memory.name}")
        averages = self._profile.key_averages()
        self._profile = None
        on = "device" if self.ranks.device.type == "cuda" else "cpu"
        write_text(self.folder / f"{base}.operations.txt",
                   averages.table(sort_by=f"self_{on}_time_total", row_limit=ROWS))
        shares = shares_of(averages, on)
        self._event(PROFILE, step=step, steps=self.config.steps, rank=self.ranks.rank, shares=shares)
        most = ", ".join(f"{name} {share:.0%}" for name, share in list(shares.items())[:TOLD])
        self._say(f"profiled {self.config.steps} steps up to step {step}; most time: {most}; more in {self.folder}")


def shares_of(averages: Any, on: str) -> dict[str, float]:
    """Shares of the time of all operations, the largest first.

    averages: torch.profiler's, by operation. on: `device` or `cpu`, whose time is meant.
    """
    times = {item.key: getattr(item, f"self_{on}_time_total") for item in averages
             if not item.key.startswith("ProfilerStep")}
    total = sum(times.values()) or 1
    return {name: round(time / total, 4) for name, time in sorted(times.items(), key=lambda item: -item[1])[:ROWS]}
