"""Stage 4: pretrain the decoder on the token shards.

The loop below is the whole of training; what it calls lives in pipeline/training (engines, guards, checkpoints,
metrics), pipeline/data (which samples, in which order) and pipeline/parallel (the rank grid, how a model is spread).
The same command continues an interrupted run: weights, moments and the number of samples used come from the newest
valid checkpoint.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: find the packages, and shadow no library with a file beside this one
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from pipeline.entry import end_process, stage_main
from pipeline.work import Work


def train(work: Work) -> None:
    """Train to the configured number of steps and commit, or save and leave when asked to stop."""
    from pipeline.training.session import Session
    from pipeline.training.watchdog import Watchdog

    with Watchdog.of(work) as watchdog, Session(work, watchdog) as session:
        for step in session.steps():
            batch = session.loader.next()
            agreed = session.agree(batch)
            result = session.engine.step(batch.split(session.micro_batch), session.accumulation, agreed.targets,
                                         session.lr(step), session.limits(step))
            verdict = session.judge(step, result)
            if verdict.outcome == "rollback":
                session.roll_back(verdict)
                continue
            session.advance(step, result, verdict, agreed.targets)
            if session.due(step, work.config.train.checkpoint.every_steps) or agreed.save or agreed.stop:
                session.save()
            session.look()
            if agreed.stop and session.unfinished:
                return session.leave(agreed.stop)
        session.finish()


if __name__ == "__main__":
    end_process(stage_main("train", train))
