"""Score the checkpoints of a run, while it trains or afterwards.

    drover evaluate demo --watch     each one when it appears, until training is done
    drover evaluate demo             those that are there

The checkpoints at multiples of `evaluate.every` steps are scored in order, as the stage evaluate scores the finished
model: bits per byte of validation text, and the tasks of `evaluate.tasks`. Training keeps each until it was scored, and
draws the scores. Start this on any machine that sees the run's folder; torchrun shares the work over several ranks.
After a kill the same command continues, and nothing is measured twice.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from drover.pipeline.config.kinds import add_run_and_plugins
from drover.pipeline.config.phases import PhasePlan
from drover.pipeline.config.section import identity
from drover.pipeline.contract.locks import lock
from drover.pipeline.contract.run import Run, code_hashes, run_in
from drover.pipeline.contract.stage_work import Work
from drover.pipeline.contract.stages import STAGES
from drover.pipeline.core.console import Parser, Program, counted, say
from drover.pipeline.core.errors import UserError, listed, require
from drover.pipeline.core.files import sha256_json
from drover.pipeline.evaluate import Cached, load, measure_tasks, measure_text
from drover.pipeline.evaluation.checkpoint_scores import (
    CheckpointScores,
    TaskScores,
    digest_of,
    due,
    is_scored,
    read_scores,
)
from drover.pipeline.evaluation.items import BITS
from drover.pipeline.evaluation.results import OVERALL, bits_per_byte, doubts, library_versions, metrics_text, rounded
from drover.pipeline.evaluation.scores import Score
from drover.pipeline.evaluation.selection import problems
from drover.pipeline.evaluation.tasks import go_offline
from drover.pipeline.records.checkpoints import SCORES, read_marker, step_of

if TYPE_CHECKING:
    from drover.model.config import ModelConfig
    from drover.pipeline.parallel.ranks import Ranks

LOOK_S = 10.0
"""Seconds between two looks for a new checkpoint."""


def add_options(parser: Parser) -> None:
    """The options."""
    add_run_and_plugins(parser)
    parser.add_argument("--watch", action="store_true", help="wait for further checkpoints until training is done")


def work(options: argparse.Namespace) -> None:
    """Score what is due."""
    go_offline()  # before anything imports the libraries that look for it
    run = run_in(options.run)
    settings = run.config.evaluate
    if settings.every is None:
        raise UserError(f"evaluate.every is not set in {run.folder}, so no checkpoint is due. Set it, a multiple of "
                        f"train.checkpoint.every_steps, and give the command again that trains. `drover compare` "
                        f"scores any checkpoint once.")
    if settings.tasks:
        require("evaluate.tasks", "lm_eval")
    if wrong := problems(run.config):
        raise UserError(listed(wrong))
    from drover.pipeline.parallel.ranks import start_ranks, stop_ranks

    ranks = start_ranks(device=run.config.launch.device)
    try:
        with ExitStack() as held:
            ranks.by_leader(lambda: _lock(run, held))
            Watcher(run, ranks, settings.every).score(wait=options.watch)
            ranks.barrier()
    finally:
        stop_ranks()


def _lock(run: Run, held: ExitStack) -> None:
    """Refuse a second evaluator, and keep others from rebuilding what is read."""
    held.enter_context(lock(run.folder, SCORES, "The evaluation of checkpoints"))
    for stage in ("tokenizer", "encode"):
        run.finished(stage)
        held.enter_context(lock(run.stage_folder(stage).parent, stage, shared=True))


@dataclass
class Watcher:
    """Scores the checkpoints of one run. All ranks call the methods together."""

    run: Run
    ranks: Ranks
    every: int

    def __post_init__(self) -> None:
        self.train = self.run.own_folder("train")
        self.known = self.ranks.by_leader(lambda: {
            "inputs": {stage: self.run.finished(stage).digest for stage in ("tokenizer", "encode")},
            "files": {record["name"]: record["sha256"] for record in self.run.files("evaluate")}})
        self.inputs = sha256_json([self.known, identity(self.run.config.evaluate), code_hashes(STAGES["evaluate"]),
                                   library_versions()])
        self._scored = set[tuple[int, str]]()
        self._shown = set[str]()

    def score(self, *, wait: bool) -> None:
        """Score all checkpoints that are due. wait: also those to come, until training is done."""
        while True:
            is_trained, paths = self.ranks.by_leader(self._look)
            for path in paths:
                self._measure(path)
            if not paths and (is_trained or not wait):
                break
            if not paths:
                time.sleep(LOOK_S)
        if self.ranks.is_rank_zero:
            if is_trained:
                self._log()
            more = "" if is_trained else "; training is not done, and with --watch this waits for more"
            say("evaluate", f"{counted(len(read_scores(self.train)), 'checkpoint')} scored{more}")

    def _look(self) -> tuple[bool, list[Path]]:
        """Whether training is done, and the checkpoints to score. Called on rank 0."""
        is_trained = self.run.manifest("train") is not None  # first: after it there is no other checkpoint
        return is_trained, [path for path in due(self.train, self.every)
                            if not is_scored(self.train, step_of(path), self.inputs)]

    def _measure(self, path: Path) -> None:
        """Score a checkpoint."""
        from drover.pipeline.data.token_shards import ShardTable
        from drover.pipeline.training.data import download_once_per_node

        checkpoint = self.ranks.by_leader(lambda: digest_of(path))
        # It takes the place of the export, which the stage measures.
        work = Work(self.run, "evaluate", {**self.known, "inputs": {**self.known["inputs"], "convert": checkpoint}})
        if self.ranks.is_rank_zero:
            work.say(path.name)
        table = ShardTable.of(work.input("encode")[1].outputs)
        download_once_per_node(work, table, table.rows("validation").tolist(), self.ranks)
        gc.collect()  # the model before
        opened = load(work, self.ranks, path, "Give the command again.")
        length = work.config.evaluate.sequence_length or opened.config.context_length
        folder = self.train / SCORES
        cached = Cached(work, self.ranks, folder / "measured")
        sources = measure_text(work, self.ranks, cached, opened, length)["sources"]
        tasks = measure_tasks(work, self.ranks, cached, opened, length, folder / "lm_eval.log")
        if not self.ranks.is_rank_zero:
            return
        step = step_of(path)
        scores = CheckpointScores(
            step, checkpoint, self.inputs, read_marker(path).progress.tokens,
            flops(PhasePlan.of(self.run.config.train), opened.config, step), rounded(bits_per_byte(sources)),
            {name: rounded({key: value for key, value in task.items() if key in TaskScores.__annotations__})
             for name, task in tasks.items()})
        scores.write(self.train)
        self._scored.add(scores.identity)
        text: dict[str, Score] = {BITS: {"value": scores.bits_per_byte[OVERALL], "stderr": None}}
        work.say("; ".join([f"{path.name}: {metrics_text(text)}", *(
            f"{name}: {metrics_text(task['metrics'])}" for name, task in tasks.items())]))
        for doubt in doubts(tasks):
            if doubt not in self._shown:
                self._shown.add(doubt)
                work.say(doubt)

    def _log(self) -> None:
        """Give loggers the scores of this process that training did not wait for. Called on rank 0."""
        from drover.pipeline.training.hooks import logged_scores
        from drover.pipeline.training.sinks import log_results

        left = self._scored - logged_scores(self.train)
        records = [{"step": scores.step, **scores.figures} for scores in read_scores(self.train)
                   if scores.identity in left]
        if records:
            log_results(Work(self.run, "evaluate", {}), *records, after=self.run.finished("train").counts["steps"])


def flops(plan: PhasePlan, shape: ModelConfig, step: int) -> float:
    """Floating-point operations of the first `step` steps of a plan, counted as for MFU."""
    return math.fsum(
        (plan.tokens_at(min(step, phase.end_step)) - plan.tokens_at(min(step, phase.first_step)))
        * shape.flops_per_token(phase.train.sequence_length, causal=False) for phase in plan.phases)


main = Program("python -m drover.pipeline.watch", __doc__, add_options, work)

if __name__ == "__main__":
    sys.exit(main())
