"""Hooks: parts of training that observe the loop, check it or stop it. They know nothing of one another.

`train.hooks` adds your own hooks. docs/extending.md shows a guard in one file that stops on a rising gradient norm.

Every method is called on all ranks alike, in the order of `Loop.hooks`, unless it says otherwise. On GPUs `on_step`,
`look` and `after_step` of a step often come between the backward passes of the next one and its update; weights and
states are then still those that the step left, and no hook may change them or the gradients. An error that a method
raises stops training. It must be raised on all ranks alike, so decide by values that are the same on all ranks, such as
`StepResult` or the sums of `votes`.

Four are here: when to save, when to stop, when to collect garbage, and which checkpoints wait for their scores.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drover.pipeline.config.kinds import Kind, imported
from drover.pipeline.config.shipped import EVALUATOR
from drover.pipeline.contract.locks import lock
from drover.pipeline.contract.state import LOCAL, RANK_VARIABLES, STOP, this_job
from drover.pipeline.contract.workers import StopRequest, cause_of
from drover.pipeline.core.background import end_with_parent
from drover.pipeline.core.console import duration
from drover.pipeline.core.errors import UserError
from drover.pipeline.evaluation.results import figures
from drover.pipeline.records.checkpoint_scores import SCORED, CheckpointScores, is_scored, read_scores
from drover.pipeline.records.checkpoints import SCORES, checkpoint_name
from drover.pipeline.records.metrics import TrainingRecords

if TYPE_CHECKING:
    from drover.pipeline.parallel.ranks import Ranks
    from drover.pipeline.training.engine import StepResult
    from drover.pipeline.training.loop import Loop


class Hook:
    """The base of all hooks. Override the methods that you need."""

    def on_start(self, loop: Loop) -> None:
        """The first step of this start comes next. A later rollback sets `loop.progress` back."""

    def votes(self, loop: Loop) -> Sequence[float]:
        """Numbers that are summed over all ranks before each step, `loop.next_step`, always the same count. All hooks
        share one all-reduce. After a rollback it is called again, without `on_votes` in between: keep a request until
        then."""
        return ()

    def on_votes(self, loop: Loop, sums: Sequence[float]) -> None:
        """The sums of `votes`, the same on every rank; known before the step's update."""

    def before_update(self, loop: Loop) -> None:
        """The backward passes of the next step are done, and its gradients are reduced (`Engine.gradients`, `held`).
        Guards may still skip its update."""

    def on_step(self, loop: Loop, result: StepResult, record: dict[str, object]) -> None:
        """A step was done and not rolled back; nothing of it is saved yet. `record` is its line of metrics.jsonl."""

    def on_save(self, loop: Loop) -> None:
        """A checkpoint of `loop.progress` is about to be written."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of this hook: plain values for JSON, the same on every rank. Called after `on_save`.
        Only for the hooks of train.hooks."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Go back to what `state` returned: before the first step of a start that continues, and after a rollback. Not
        called if the checkpoint was written without this hook."""

    def on_saved(self, step: int) -> None:
        """The checkpoint after `step` is complete. Called in the thread that saves; an error ends that thread."""

    def needs(self, step: int) -> bool:
        """Whether the checkpoint after `step` must be kept, however old it is. Called on rank 0, in the thread that
        saves."""
        return False

    def look(self, loop: Loop) -> Mapping[str, object]:
        """Measurements of the model, as further fields of the last step's line. If a checkpoint was due after the step,
        it is being written already. Also called at a start that finds the line of its checkpoint's step missing."""
        return {}

    def after_step(self, loop: Loop) -> None:
        """The step is finished, and its checkpoint, if one was due, is being written."""

    def on_stop(self, loop: Loop) -> None:
        """Training leaves before its end; the checkpoint of `loop.progress` is complete."""

    def on_finish(self, loop: Loop) -> None:
        """Training is done and its last checkpoint complete; the manifest comes next."""

    def on_end(self, loop: Loop) -> None:
        """Training ends, whatever the reason. Other ranks may be gone."""


class HookSettings(Kind):
    """The settings of your own hook: one field each, with its description underneath."""

    @abstractmethod
    def open(self, loop: Loop) -> Hook:
        """Make the hook. Called on every rank."""


EVERY, ALL_EVERY = 50, 1000
"""Steps between two collections of young objects, as in torchtitan, and between two of all objects made since the
start. A young collection does not visit objects that survived an earlier one."""


class Saving(Hook):
    """Requests a checkpoint when enough minutes have passed, and stops all ranks if one of them could not save."""

    def __init__(self, every_minutes: float | None) -> None:
        self.every_minutes = every_minutes

    def votes(self, loop: Loop) -> Sequence[float]:
        """See Hook."""
        minutes = self.every_minutes
        since_save = time.monotonic() - loop.saver.last_save
        late = loop.ranks.is_rank_zero and minutes is not None and since_save > 60 * minutes
        return late, loop.saver.failed

    def on_votes(self, loop: Loop, sums: Sequence[float]) -> None:
        """See Hook."""
        late, failed = sums
        if failed:
            loop.saver.wait()  # raises, on every rank
        loop.save_requested |= bool(late)


class Garbage(Hook):
    """Collects Python's cyclic garbage on all ranks after the same steps.

    By itself Python collects whenever enough objects were made. Each rank would do so in a different step while all
    others wait: of a thousand ranks, one would be collecting in almost every step.
    """

    def on_start(self, loop: Loop) -> None:
        """From now on collect only after certain steps. Objects that exist now are never visited again."""
        gc.collect()
        gc.freeze()
        gc.disable()

    def after_step(self, loop: Loop) -> None:
        """Collect what the last steps made, after every `EVERY` steps."""
        if loop.progress.step % ALL_EVERY == 0:
            gc.collect()
        elif loop.progress.step % EVERY == 0:
            gc.collect(1)

    def on_end(self, loop: Loop) -> None:
        """Return to Python's own collection."""
        gc.enable()
        gc.unfreeze()


class Scores(Hook):
    """Keeps the checkpoints at multiples of `every` steps until `drover evaluate` has scored them, and logs the scores.

    If no evaluator works on the run, and a submission to Slurm has queued none, training pauses after each of these
    checkpoints while `drover evaluate` scores it. This is a process of its own, so an evaluator that fails or is killed
    costs training nothing.

    Training logs the scores as events because loggers take one writer at a time: TensorBoard reads only the newest file
    of a run.
    """

    def __init__(self, folder: Path, every: int) -> None:
        self.folder = folder
        self.every = every
        self._looked = self._changed = 0.0

    def needs(self, step: int) -> bool:
        """See Hook."""
        return step % self.every == 0 and not is_scored(self.folder, step)

    def look(self, loop: Loop) -> Mapping[str, object]:
        """Pause until the step's checkpoint was scored, if nobody else scores it. The time counts as validation."""
        step = loop.progress.step
        if step % self.every or (step == loop.config.train.steps and not loop.config.convert.average):
            return {}  # the stage evaluate measures these weights
        if not loop.ranks.by_leader(lambda: self._is_left_to_us(loop)):
            return {}
        import torch

        began = time.monotonic()
        with loop.recorder.looking(), loop.paused():
            loop.saver.wait()
            torch.cuda.empty_cache()  # the evaluator needs room for the weights
            evaluator = multiprocessing.get_context("spawn").Process(
                target=evaluate_once, args=(loop.work.run.folder, loop.config.plugins, os.getpid()), daemon=True)
            if loop.ranks.is_rank_zero:
                evaluator.start()
            while loop.ranks.by_leader(lambda: self._works(evaluator, loop)):
                pass  # rank 0 waits, and the others for rank 0
        if loop.ranks.is_rank_zero:
            name = checkpoint_name(step)
            loop.say(f"paused {duration(time.monotonic() - began)} to score {name}" if self._has(step) else
                     f"warning: {name} was not scored. It is kept until `drover evaluate` has scored it")
        self.on_finish(loop)
        return {}

    def _is_left_to_us(self, loop: Loop) -> bool:
        """Whether the step's checkpoint has no scores, and no evaluator works on the run or will."""
        chain = this_job().chain
        if (chain and not chain.startswith(LOCAL)) or self._has(loop.progress.step):
            return False
        with suppress(UserError):
            lock(loop.work.run.folder, SCORES).close()
            return True
        return False

    def _has(self, step: int) -> bool:
        """Whether a checkpoint was scored; a damaged record counts as no score, and is named by who writes it."""
        with suppress(UserError):
            return is_scored(self.folder, step)
        return False

    def _works(self, evaluator: BaseProcess, loop: Loop) -> bool:
        """Whether the evaluator is still at work, after a while. A request to stop ends it."""
        evaluator.join(LOOK_EVERY_S)
        if any(loop.stop.votes()):
            evaluator.kill()
            evaluator.join()
        return evaluator.is_alive()

    def after_step(self, loop: Loop) -> None:
        """See Hook."""
        if loop.ranks.is_rank_zero and time.monotonic() - self._looked > LOOK_EVERY_S:
            self.on_finish(loop)

    def on_finish(self, loop: Loop) -> None:
        """Log what was scored since the last look, on rank 0. A new record changes the time of the folder."""
        self._looked, before = time.monotonic(), self._changed
        folder = self.folder / SCORES
        try:
            if folder.is_dir() and loop.ranks.is_rank_zero:
                self._changed = folder.stat().st_mtime
            for scores in unlogged(self.folder) if self._changed != before else ():
                loop.recorder.event(SCORED, step=scores.step, checkpoint=scores.checkpoint, **figures(vars(scores)))
            loop.recorder.flush()
        except (UserError, OSError) as error:
            loop.say(f"warning: no scores are logged: {error}")


def evaluate_once(run: Path, plugins: Sequence[str], parent: int) -> None:
    """Score the checkpoints that are due, in a process that ends with training and is no rank of it."""
    end_with_parent(parent)
    for name in (*RANK_VARIABLES, "LOCAL_RANK"):
        os.environ.pop(name, None)
    sys.exit(imported(EVALUATOR, "evaluate.every")(
        [str(run), *(word for plugin in plugins for word in ("--plugin", plugin))]))


def unlogged(folder: Path) -> list[CheckpointScores]:
    """The scores that training in this folder has not logged, in the order of steps."""
    events: list[Any] = [event for event in TrainingRecords(folder).events if event["event"] == SCORED]
    logged = [(event["step"], event["checkpoint"]) for event in events]
    return [scores for scores in read_scores(folder) if (scores.step, scores.checkpoint) not in logged]


CAUSES = {"SIGINT": False, "SIGTERM": False, "SIGUSR1": True, "SIGUSR2": True, "file": False, "time": True}
"""Causes of a stop, and whether the launcher should restart training at once: yes after a time limit, of which a site
warns by a user signal; no after a person's request. If both kinds come together, the person's request counts."""
LOOK_EVERY_S = 2.0
"""Seconds between two checks for the file: it may be on a busy network file system."""


@dataclass(frozen=True)
class Stop:
    """The ranks' decision to stop: the reason as text, and whether to restart at once."""

    reason: str
    again: bool


class StopAgreement(StopRequest, Hook):
    """This rank's requests to stop, and the decision of all ranks. Rank 0 checks the file and the clock for all.

    Args:
        run_folder: the folder of the file.
        minutes: stop this long after `began` (of time.monotonic); None: never.

    Attributes:
        stop: the decision; None while no rank has a request.
    """

    def __init__(self, ranks: Ranks, run_folder: Path, minutes: float | None, began: float) -> None:
        super().__init__(signals=(signal.SIGINT,), waits=True)
        self.ranks = ranks
        self._file = run_folder / STOP
        self._minutes = minutes
        self._ends = None if minutes is None else began + 60 * minutes
        self._looked = -LOOK_EVERY_S
        self._file_text = str(STOP)
        self.stop: Stop | None = None

    def votes(self, loop: Loop | None = None) -> Sequence[float]:
        """One flag for each cause."""
        if self.ranks.is_rank_zero:
            self._check_file_and_clock()
        return [cause in self._requests for cause in CAUSES]

    def on_votes(self, loop: Loop | None, sums: Sequence[float]) -> None:
        """Decide by the sums. Only rank 0 knows the text of the file."""
        result = {cause: round(count) for cause, count in zip(CAUSES, sums, strict=True) if count}
        self.stop = Stop(" and ".join(self._describe(cause, count) for cause, count in result.items()),
                         all(CAUSES[cause] for cause in result)) if result else None

    def _describe(self, cause: str, count: int) -> str:
        if cause == "file":
            return self._file_text
        if cause == "time":
            return f"train.stop_after_minutes={self._minutes:g}"
        cause = cause_of(cause)
        return cause if count == self.ranks.world else f"{cause} on {count} of {self.ranks.world} ranks"

    def _check_file_and_clock(self) -> None:
        now = time.monotonic()
        if self._ends is not None and now >= self._ends:
            self._requests.add("time")
        if now - self._looked < LOOK_EVERY_S:
            return
        self._looked = now
        try:
            text = self._file.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return
        self._file_text = " ".join(text.split()) or f"the file {STOP}"
        self._requests.add("file")
