"""Hooks: parts of training that observe the loop, check it or stop it. They know nothing of one another.

`train.hooks` adds your own hooks. docs/extending.md shows a guard in one file that stops on a rising gradient norm.

Every method is called on all ranks alike, in the order of `Loop.hooks`, unless it says otherwise. An error that it
raises stops training. It must be raised on all ranks alike, so decide by values that are the same on all ranks, such as
`StepResult` or the sums of `votes`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from drover.pipeline.config.kinds import Kind
from drover.pipeline.core.files import Record

if TYPE_CHECKING:
    from drover.pipeline.training.engines.engine import StepResult
    from drover.pipeline.training.loop import Loop


class Hook:
    """The base of all hooks. Override the methods that you need."""

    def on_start(self, loop: Loop) -> None:
        """The first step of this start comes next. A later rollback sets `loop.progress` back."""

    def votes(self, loop: Loop) -> Sequence[float]:
        """Numbers that are summed over all ranks before each step, always the same count. All hooks share one
        all-reduce."""
        return ()

    def on_votes(self, loop: Loop, sums: Sequence[float]) -> None:
        """The sums of `votes`, the same on every rank."""

    def before_update(self, loop: Loop) -> None:
        """The backward passes of the next step are done, and its gradients are reduced (`Engine.gradients`, `held`).
        Guards may still skip its update."""

    def on_step(self, loop: Loop, result: StepResult, record: Record) -> None:
        """A step was done and not rolled back; nothing of it is saved yet. `record` is its line of metrics.jsonl."""

    def on_save(self, loop: Loop) -> None:
        """A checkpoint of `loop.progress` is about to be written."""

    def state(self) -> Record:
        """What a checkpoint keeps of this hook: plain values for JSON, the same on every rank. Called after `on_save`.
        Only for the hooks of train.hooks."""
        return {}

    def load(self, state: Record) -> None:
        """Go back to what `state` returned: before the first step of a start that continues, and after a rollback. Not
        called if the checkpoint was written without this hook."""

    def on_saved(self, step: int) -> None:
        """The checkpoint after `step` is complete. Called in the thread that saves; an error ends that thread."""

    def needs(self, step: int) -> bool:
        """Whether the checkpoint after `step` must be kept, however old it is. Called on rank 0, in the thread that
        saves."""
        return False

    def look(self, loop: Loop) -> Record:
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
