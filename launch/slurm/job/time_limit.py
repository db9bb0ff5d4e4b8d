"""The time limit of a job, watched by its runner: a stage without ranks is no step, and Slurm warns only those."""

from __future__ import annotations

import math
import time

from launch.slurm.scheduler import Scheduler

ASK_AGAIN_S = 600.0
"""Where there is no limit, or Slurm does not answer. A limit may also be changed while the job runs."""


class TimeLimit:
    """When a job is to be warned of its end: `signal_s` seconds before."""

    def __init__(self, scheduler: Scheduler, job: str, signal_s: float) -> None:
        self._scheduler, self._job, self._signal_s = scheduler, job, signal_s
        self._look_at = -math.inf

    def is_near(self) -> bool:
        """Whether it is time. Slurm is asked now and then only."""
        if time.monotonic() < self._look_at:
            return False
        left = self._scheduler.seconds_left(self._job) - self._signal_s
        self._look_at = time.monotonic() + min(left, ASK_AGAIN_S)
        return left <= 0
