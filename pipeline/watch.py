"""Score the checkpoints of a run, while it trains or afterwards.

    drover evaluate demo --watch     each when it appears, until training ends
    drover evaluate demo             those that are there

The checkpoints at multiples of `evaluate.every` steps are scored in order, as the stage evaluate scores the finished
model: bits per byte of validation text, and the tasks of `evaluate.tasks`. Training keeps each until it was scored, and
draws the scores. Start this on any machine that sees the run's folder; torchrun shares the work over several ranks.
After a kill the same command continues, and nothing is measured twice.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from drover.pipeline.config.checks import absent_packages
from drover.pipeline.config.kinds import add_run_and_plugins
from drover.pipeline.config.loading import config_hash, load_config
from drover.pipeline.contract.locks import lock
from drover.pipeline.contract.manifest import MANIFEST, Manifest, read_manifest
from drover.pipeline.contract.run import Run, run_in
from drover.pipeline.contract.stage_work import Work
from drover.pipeline.contract.stages import WATCH
from drover.pipeline.contract.state import (
    STATE,
    StageJob,
    now,
    read_attempts,
    set_this_job,
    this_job,
    this_start,
    write_state,
)
from drover.pipeline.contract.workers import Stopped, StopRequest
from drover.pipeline.core.console import INTERRUPTED, Parser, Program, counted, say
from drover.pipeline.core.errors import UserError, listed
from drover.pipeline.core.files import write_sealed
from drover.pipeline.evaluate import Cached, load, measure_tasks, measure_text
from drover.pipeline.evaluation.aggregates import aggregated
from drover.pipeline.evaluation.results import (
    doubts,
    figures,
    rounded,
    score_texts,
    task_results,
    validation_results,
)
from drover.pipeline.evaluation.selection import selected
from drover.pipeline.evaluation.tasks import go_offline
from drover.pipeline.records.checkpoint_scores import CheckpointScores, digest_of, scores_path, unscored
from drover.pipeline.records.checkpoints import SCORES, read_marker, step_of

if TYPE_CHECKING:
    from drover.pipeline.contract.manifest import Fingerprint
    from drover.pipeline.parallel.ranks import Ranks

LOOK_S = 10.0
"""Seconds between two looks for a new checkpoint."""
BEGIN_S = 600.0
"""The job of a submission starts when that of training has started, or was cancelled: then training never begins."""


def add_options(parser: Parser) -> None:
    """The options."""
    add_run_and_plugins(parser)
    parser.add_argument("--watch", action="store_true", help="wait for further checkpoints until training is done")
    parser.add_argument("--config", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--job", type=StageJob.parse, default=StageJob(), help=argparse.SUPPRESS)


def work(options: argparse.Namespace) -> int:
    """Score what is due. As a job of a submission, also leave the records by which its runner judges a stage."""
    go_offline()  # before anything imports the libraries that look for it
    set_this_job(options.job)
    if not (options.config or options.run / "config.yaml").is_file():
        raise UserError(f"The run {options.run} has not begun. Give this command again after its first stage has "
                        f"started.")
    run = run_in(options.run) if options.config is None else Run(load_config(options.config))
    if run.config.evaluate.every is None:
        raise UserError(f"evaluate.every is not set in {run.folder}, so no checkpoint is due. Set it, a multiple of "
                        f"train.checkpoint.every_steps, and give the command again that trains. `drover compare` "
                        f"scores any checkpoint once.")
    if problems := absent_packages(run.config, "evaluate"):
        raise UserError(listed(problems))
    from drover.pipeline.parallel.ranks import start_ranks, stop_ranks

    ranks = start_ranks(device=run.config.launch.device)
    folder, recorded = run.folder / WATCH, ranks.is_rank_zero and bool(options.job.chain)
    try:
        with ExitStack() as held, StopRequest(0.0):
            known = ranks.by_leader(lambda: _known(run, held))
            if recorded:
                folder.mkdir(exist_ok=True)
                (folder / MANIFEST).unlink(missing_ok=True)
                write_state(folder, "running")
            began = now()
            scored = score(run, ranks, known, wait=options.watch)
            if recorded:
                Manifest(WATCH, {}, [], {"checkpoints": scored}, config_hash(run.config), started=began, finished=now(),
                         execution={"world_size": ranks.world, **this_start()}).write(folder)
                (folder / STATE).unlink()
            ranks.barrier()
    except Stopped as stopped:
        if recorded:
            write_state(folder, "preempted", reason=stopped.reason, **stopped.facts)
        say("evaluate", f"stopped ({stopped.reason}); the same command continues")
        return INTERRUPTED
    finally:
        stop_ranks()
    return 0


def _known(run: Run, held: ExitStack) -> Fingerprint:
    """What decides the scores besides the checkpoint. Refuses a second evaluator, and others that would rebuild what
    is read. Called on rank 0."""
    held.enter_context(lock(run.folder, SCORES, "The evaluation of checkpoints"))
    for stage in ("tokenizer", "encode"):
        held.enter_context(lock(run.stage_folder(stage).parent, stage, shared=True))
    return {"inputs": {stage: run.finished(stage).digest for stage in ("tokenizer", "encode")},
            "files": {record["name"]: record["sha256"] for record in run.files("evaluate")}}


def score(run: Run, ranks: Ranks, known: Fingerprint, *, wait: bool) -> int:
    """Score the checkpoints that are due; how many there were. wait: also those to come, until training is done. Called
    on all ranks."""
    train = run.own_folder("train")
    scored = list[int]()
    waits = False
    began = time.monotonic()
    evaluator = Work(run, "evaluate", known)

    def look() -> tuple[bool, bool, list[Path]]:
        made = read_manifest(train)  # first: after it there is no other checkpoint
        # One with fewer steps is of the training that a submission continues.
        is_trained = made is not None and made.counts["steps"] >= run.config.train.steps
        return is_trained, _has_ended(run, began), unscored(run)

    while True:
        is_trained, has_ended, paths = ranks.by_leader(look)
        for path in paths:
            measure(run, ranks, known, path)
            scored.append(step_of(path))
        if not paths and (is_trained or not wait):
            break
        if not paths and has_ended:
            raise Stopped("training ended before it was done", again=False)
        if not paths:
            if ranks.is_rank_zero and not waits:
                evaluator.say(f"waits for the next checkpoint at a multiple of {run.config.evaluate.every:,} steps")
            time.sleep(LOOK_S)
        waits = not paths
    if ranks.is_rank_zero:
        evaluator.say(f"{counted(len(scored), 'checkpoint')} scored")
        if is_trained and scored:
            _log(evaluator, train, scored)
    return len(scored)


def _has_ended(run: Run, began: float) -> bool:
    """Whether the training of the submission that this job belongs to has stopped for good, or does not begin. began:
    when this was first asked (of time.monotonic)."""
    chain = this_job().chain
    if not chain:
        return False
    attempts = [attempt for attempt in read_attempts(run.folder)
                if attempt["stage"] == "train" and attempt.get("chain") == chain]
    return attempts[-1].get("next") == "stop" if attempts else time.monotonic() - began > BEGIN_S


def _log(work: Work, train: Path, steps: list[int]) -> None:
    """Give loggers the scores of these steps for which training did not wait."""
    from drover.pipeline.training.hooks import unlogged
    from drover.pipeline.training.sinks import log_results

    log_results(work, *({"step": scores.step, **figures(vars(scores))} for scores in unlogged(train)
                        if scores.step in steps), after=work.run.finished("train").counts["steps"])


def measure(run: Run, ranks: Ranks, known: Fingerprint, path: Path) -> None:
    """Score a checkpoint. Called on all ranks."""
    from drover.pipeline.data.token_shards import ShardTable
    from drover.pipeline.training.data import download_once_per_node

    checkpoint = ranks.by_leader(lambda: digest_of(path))
    # It takes the place of the export, which the stage measures.
    work = Work(run, "evaluate", {**known, "inputs": {**known["inputs"], "convert": checkpoint}})
    if ranks.is_rank_zero:
        work.say(path.name)
    table = ShardTable.of(work.input("encode")[1].outputs)
    download_once_per_node(work, table, table.rows("validation").tolist(), ranks)
    gc.collect()  # the model before
    opened = load(work, ranks, path, "Give the command again.")
    length = run.config.evaluate.sequence_length or opened.config.context_length
    folder = path.parents[1] / SCORES
    cached = Cached(work, ranks, folder / "measured")
    validation = validation_results(measure_text(work, ranks, cached, opened, length), {})
    tasks = measure_tasks(work, ranks, cached, opened, length, folder / "lm_eval.log")
    if ranks.is_rank_zero:
        step = step_of(path)
        tokens = read_marker(path).progress.tokens
        train = run.config.train
        flops = None if train.phases else tokens * opened.config.flops_per_token(train.sequence_length, causal=False)
        write_sealed(scores_path(path.parents[1], step), vars(CheckpointScores(
            step, checkpoint, tokens, flops, validation, task_results(tasks),
            **rounded(aggregated(selected(run.config), tasks)))))
        for text in (f"{path.name}: {validation['overall']['bits_per_byte']} bits per byte", *score_texts(tasks),
                     *doubts(tasks)):
            work.say(text)


main = Program("python -m drover.pipeline.watch", __doc__, add_options, work)

if __name__ == "__main__":
    sys.exit(main())
