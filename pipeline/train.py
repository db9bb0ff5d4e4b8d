"""Stage 4: pretrain the decoder on the token shards.

The loop below is the whole of training; what it calls lives in pipeline/training (engines, guards, checkpoints,
metrics), pipeline/data (which samples, in which order) and pipeline/parallel (the rank grid, how a model is spread).
The same command continues an interrupted run: weights, moments and the number of samples used come from the newest
valid checkpoint.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if __package__ in (None, ""):  # run as a script: find the packages, and shadow no library with a file beside this one
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from pipeline.contract.preparation import is_leader

if TYPE_CHECKING:
    from pipeline.contract.stage_work import Work


def train(work: Work) -> None:
    """Train to the configured number of steps and commit, or save and leave when asked to stop."""
    from pipeline.training.session import Session
    from pipeline.training.sinks.base import refuse_unusable
    from pipeline.training.watchdog import Watchdog

    if is_leader():  # it alone has sinks
        refuse_unusable(work.config.train.log_to)
    with Watchdog.of(work) as watchdog, Session(work, watchdog) as session:
        for step in session.steps():
            batch = session.batches.next()
            agreed = session.agree(batch)
            result = session.update(step, batch, agreed)
            verdict = session.judge(step, result)
            if verdict.outcome == "rollback":
                session.roll_back(verdict)
                continue
            session.advance(step, result, verdict, agreed)
            if session.checkpoint_is_due(step, agreed):
                session.save()
            heldout = session.monitor.validate(step)
            fp8 = session.monitor.watch_fp8(step, batch, agreed.targets)
            session.monitor.log(session.progress, heldout, fp8)
            session.monitor.draw_samples(step)
            session.end_step()
            if agreed.stop and session.unfinished:
                return session.leave(agreed.stop)
        session.finish()


if __name__ == "__main__":
    from pipeline.contract.entry import end_process, stage_main

    end_process(stage_main("train", train))
