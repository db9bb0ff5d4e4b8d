"""Stage 4: pretrain the decoder on the token shards.

The loop below is the whole of training; what it calls lives in pipeline/training (engine, checkpoints, metrics),
pipeline/data (which samples, in which order) and pipeline/parallel (ranks, sharding). The same command continues an
interrupted run: weights, moments and the number of samples used come from the newest valid checkpoint.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: find the packages, and shadow no library with a file beside this one
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from pipeline.entry import stage_main
from pipeline.work import Work


def train(work: Work) -> None:
    """Train to the configured number of steps and commit, or save and leave when asked to stop."""
    from pipeline.training.session import Session

    with Session(work) as session:
        for step in session.steps():
            batch = session.loader.next()
            targets, stop = session.agree(batch)
            result = session.engine.step(batch.split(session.micro_batch), session.accumulation, targets,
                                         session.lr(step))
            session.check_finite(step, result)
            session.advance(batch, targets)
            session.record(step, result, targets)
            if session.due(step, work.config.train.checkpoint.every_steps) or stop:
                session.save()
            session.look()
            if stop:
                return session.leave(stop)
        session.finish()


if __name__ == "__main__":
    sys.exit(stage_main("train", train))
