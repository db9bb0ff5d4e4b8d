"""About how long a plan takes on this machine: from a short look at how fast it multiplies matrices.

An estimate is a range, wide on purpose: a factor of two between the ends is what shapes, ranks and memory make of equal
matrix speeds. Once training runs, its progress line knows better.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from launch.forecast import corpus_bytes, shape_of
from launch.plan import Job
from pipeline.config.phases import PhasePlan
from pipeline.config.tree import Config

SIZE = 1024
"""Rows and columns of the matrices that are multiplied: 2 GFLOP, some 10 ms on two cores."""
LOOK_S = 0.1
"""The look is over after so long, however slow the machine is."""
EFFICIENCY = (1.0, 0.4)
"""Training's share of that speed on CPUs: at best (bfloat16, a faster library than NumPy's), and with small matrices,
two ranks or a slow memory. Measured on the demo: 1.0 in bfloat16, 0.7 in float32 under AVX2 (benchmarks/RESULTS.md)."""
STAGE_S = {"shard": (1.5, 0.1), "tokenizer": (3.0, 0.4), "encode": (1.5, 0.1), "train": (6.0, 0.0),
           "convert": (5.0, 0.0), "evaluate": (10.0, 0.0), "report": (3.0, 0.0)}
OTHER_S = (2.0, 0.0)
"""Seconds that a stage takes beside training's steps, and seconds per MB of the corpus, on a fast core."""
SLOWER = 2.0
"""How much longer that may take on another."""


@dataclass(frozen=True)
class Estimate:
    """Seconds from..to of the whole plan, and of the training steps in it."""

    low_s: float
    high_s: float
    train_low_s: float = 0.0
    train_high_s: float = 0.0

    def __str__(self) -> str:
        training = f"; training {spelled(self.train_low_s, self.train_high_s)}" if self.train_high_s else ""
        return f"about {spelled(self.low_s, self.high_s)} if this machine has little else to do{training}"


def matrix_rate(cores: int, look_s: float = LOOK_S) -> float:
    """FLOP/s of `cores` cores in float32 products, without importing torch.

    By processor time, which other programs on the machine change little: what it can do, not what is left of it now.
    """
    import numpy as np

    left = np.full((SIZE, SIZE), 0.5, dtype=np.float32)
    best, began = 0.0, time.perf_counter()
    while not best or time.perf_counter() - began < look_s:
        start = time.process_time()  # of all threads together
        left @ left
        best = max(best, 2 * SIZE**3 / max(1e-9, time.process_time() - start))
    return best * cores


def training_flops(config: Config) -> float | None:
    """Floating-point operations of the whole training, or None as long as the vocabulary is not known."""
    model = shape_of(config)
    if model is None or config.model.problems():
        return None
    return sum(phase.tokens * model.flops_per_token(phase.train.sequence_length, causal=False)
               for phase in PhasePlan.of(config.train).phases)


def estimate(config: Config, jobs: list[Job], rate: float) -> Estimate | None:
    """How long the jobs that are to run take where matrices are multiplied at `rate` FLOP/s.

    None where nothing is to be trained from its beginning, or not enough is known of it.
    """
    running = [job for job in jobs if job.to_run]
    begins = any(job.stage == "train" and (job.forced or job.state.kind not in ("partial", "stale")) for job in running)
    flops = training_flops(config)
    if not begins or flops is None:
        return None
    low, high = (flops / (rate * share) for share in EFFICIENCY)
    megabytes = corpus_bytes(config) / 1e6
    others = sum(fixed + each * megabytes for fixed, each in (STAGE_S.get(job.stage, OTHER_S) for job in running))
    return Estimate(low + others, high + SLOWER * others, low, high)


def spelled(low_s: float, high_s: float) -> str:
    """A range as a person says it: 40 to 80 seconds, 3 to 6 minutes, 2 to 5 hours; never finer than it is known."""
    unit, size, step = ("hour", 3600, 1) if high_s >= 7200 else ("minute", 60, 1) if high_s >= 120 else \
        ("second", 1, 10)
    first, last = (max(step, step * round(seconds / size / step)) for seconds in (low_s, high_s))
    return f"{first} to {last} {unit}s" if first < last else f"{last} {unit}{'s' if last != 1 else ''}"
