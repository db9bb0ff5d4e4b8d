"""Settings of the guards: what training does about numbers that are none, spikes, and replicas that differ."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from drover.pipeline.config.section import Section

FIRST = 3
"""How many times as long as `hang_minutes` the watchdog waits for a first step, which may compile."""


class GuardConfig(Section):
    """What is done when a step goes wrong.

    All of it is execution: a run in which nothing went wrong is the same under every setting, and where something did,
    the manifest counts it (`skipped`, `spikes`, `rollbacks`). So a stopped run may go on under other guards, and a
    finished one does not become stale.
    """

    max_skipped: NonNegativeInt = 8
    """Updates that may be skipped in a row before training stops with an explanation; 0 stops at the first. A loss
    or gradient norm that is not finite always skips the update; a spike does under `spike: skip`."""
    spike: Literal["log", "skip", "rollback"] = "log"
    """On a loss or gradient norm far above those of the steps before: `log` says so and goes on; `skip` leaves the
    update out; `rollback` goes back to the last checkpoint and leaves the samples of that step out for good."""
    spike_deviations: PositiveFloat = 8.0
    """A spike is a value above the running median by more than so many running deviations (median absolute
    deviation, scaled to equal the standard deviation of normal noise). Gradient norms have long tails: too low, and
    good steps count as spikes."""
    spike_window: int = Field(128, gt=1)
    """Updates that the running median and deviation look back on. A lasting higher level is taken for normal once
    it fills half the window."""
    spike_min_history: int = Field(32, gt=1)
    """Updates before anything counts as a spike; the window is this long at least."""
    max_rollbacks: NonNegativeInt = 5
    """Rollbacks over the whole run, restarts included, before training stops with an explanation: data that spikes
    again and again is not mended by leaving out more of it."""
    replica_hash_every: PositiveInt | None = 200
    """Steps between two comparisons of the weights of replicas, which must be equal to the last bit: it finds faulty
    hardware that computes wrong numbers without a word. Nothing to do where there is one copy; null: never."""
    hang_minutes: PositiveFloat | None = 10.0
    """Without a sign of life for so long, and for 10 median steps, a rank is taken to hang: all write their stacks and
    end, and a launcher starts again from the last checkpoint. A step, a held-out batch and each token of a sample text
    are signs of life; saving and loading are not watched. Three times as long for what may compile: until the first
    step is done, and for the first held-out batches. In later steps the limit is 100 seconds (300 where blocks are
    compiled; or 10 median steps, if longer) once all ranks have their batch. null: never."""
