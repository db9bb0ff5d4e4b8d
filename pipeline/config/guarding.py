"""Settings of the guards: how training handles non-finite values, loss spikes and replicas that differ."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from drover.pipeline.config.section import Section

FIRST = 3
"""The watchdog waits this many times `hang_minutes` for a first step, which may compile."""


class GuardConfig(Section):
    """What training does when a step goes wrong.

    All of it is execution: these settings change nothing in a run in which nothing goes wrong. If something does, the
    manifest counts it (`skipped`, `spikes`, `rollbacks`). So you may change them in a stopped run, and a finished run
    does not become stale.
    """

    max_skipped: NonNegativeInt = 8
    """Most updates that may be skipped in a row; one more, and training stops with an explanation. A loss or gradient
    norm that is not finite always skips the update. A spike skips it under `spike: skip`."""
    spike: Literal["log", "skip", "rollback"] = "log"
    """What to do when the loss or gradient norm is far above recent steps. `log`: log it and continue. `skip`: skip the
    update. `rollback`: return to the last checkpoint and leave this step's samples out for good."""
    spike_deviations: PositiveFloat = 8.0
    """A spike exceeds the running median by more than this many running deviations. The deviation is the median
    absolute deviation, scaled to the standard deviation of normal noise. Gradient norms have long tails: if this is too
    low, good steps count as spikes."""
    spike_window: int = Field(128, gt=1)
    """Updates over which the running median and deviation are computed. A lasting higher level counts as normal once it
    fills half the window."""
    spike_min_history: int = Field(32, gt=1)
    """Updates before anything counts as a spike. The window is never shorter than this."""
    max_rollbacks: NonNegativeInt = 5
    """Most rollbacks in the whole run, with all its restarts; one more, and training stops with an explanation. If data
    spikes again and again, leaving out more of it does not help."""
    replica_hash_every: PositiveInt | None = 200
    """Steps between two comparisons of the weights of replicas, which must be bit-identical; null: never. The
    comparison finds hardware that computes wrong numbers silently. It has nothing to compare without replicas."""
    hang_minutes: PositiveFloat | None = 10.0
    """Minutes without a sign of life after which a rank counts as hung; never less than 10 median steps. null: never.
    All ranks then write their stacks and exit, and a launcher restarts from the last checkpoint. Signs of life are a
    step, a validation batch and each token of a sample text. Saving and loading are not watched. The first step and the
    first validation batches may compile, so they have three times as long. In later steps, once all ranks have their
    batch, the limit is 100 seconds (300 with compiled blocks). If 10 median steps are longer, they are the limit."""
