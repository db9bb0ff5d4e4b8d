"""Stage 4: pretrain the decoder on the token shards.

The loop is in pipeline/training/loop.py; what it calls lives beside it (engines, guards, checkpoints, metrics), in
pipeline/data (which samples, in which order) and in pipeline/parallel (the rank grid, how a model is spread). The same
command continues an interrupted run: weights, moments and the number of samples used come from the newest valid
checkpoint.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if __package__ in (None, ""):  # run as a script: find the packages, and shadow no library with a file beside this one
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

if TYPE_CHECKING:
    from drover.pipeline.contract.stage_work import Work


def train(work: Work) -> None:
    """Train to the configured number of steps and commit, or save and leave when asked to stop."""
    from drover.pipeline.training.loop import Loop
    from drover.pipeline.training.watchdog import Watchdog

    with Watchdog.of(work) as watchdog:
        Loop(work, watchdog).run()


if __name__ == "__main__":
    from drover.pipeline.contract.entry import end_process, stage_main

    end_process(stage_main("train", train))
