"""Stage 4, train: pretrain the decoder on the token shards.

`pipeline/training/set_up.py` prepares a start, and `loop.py` runs it. The same folder has engines, guards, checkpoints
and metrics, pipeline/data the order of samples, and pipeline/parallel the rank grid and layouts. The same command
continues an interrupted run: weights, optimizer state and the number of samples used come from the newest valid
checkpoint.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

if __package__ in (None, ""):  # run as a script: find the packages, and let no file of this folder shadow a library
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

if TYPE_CHECKING:
    from drover.pipeline.contract.stage_work import Work


def train(work: Work) -> None:
    """Train to the configured number of steps and commit. After a request to stop, save and return."""
    from drover.pipeline.training.set_up import set_up
    from drover.pipeline.training.watchdog import Watchdog

    with Watchdog.of(work) as watchdog, ExitStack() as ends:
        set_up(work, watchdog, ends).run()


if __name__ == "__main__":
    from drover.pipeline.contract.entry import end_process, stage_main

    end_process(stage_main("train", train))
