"""Hooks take part in training beside the loop: they watch it, check it, or stop it, and know nothing of one another.

`train.hooks` adds hooks of your own; docs/extending.md has a guard that stops on a rising gradient norm, in one file.

Every method is called on all ranks alike, where it does not say otherwise, in the order of `Loop.hooks`. What it raises
stops training: it must be raised on all ranks alike, so decide by what is the same on all of them (`StepResult` is), or
by sums of `votes`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from drover.pipeline.config.kinds import Kind

if TYPE_CHECKING:
    from drover.pipeline.training.engines.engine import StepResult
    from drover.pipeline.training.loop import Loop


class Hook:
    """Every method may be left out."""

    def on_start(self, loop: Loop) -> None:
        """The first step of this start comes next. A rollback sets `loop.progress` back later."""

    def votes(self, loop: Loop) -> Sequence[float]:
        """Numbers that are summed over all ranks before each step, always as many. One collective serves all hooks."""
        return ()

    def on_votes(self, loop: Loop, sums: Sequence[float]) -> None:
        """The sums of `votes`, the same on every rank."""

    def before_update(self, loop: Loop) -> None:
        """The backward passes of the next step are done, and its gradients summed (`Engine.gradients`, `held`); guards
        may still leave its update out."""

    def on_step(self, loop: Loop, result: StepResult, record: dict[str, Any]) -> None:
        """A step was done and is not undone; nothing of it is saved yet. `record` is its line of metrics.jsonl."""

    def on_save(self, loop: Loop) -> None:
        """A checkpoint of `loop.progress` is about to be written."""

    def on_saved(self, step: int) -> None:
        """The checkpoint after `step` is complete. In the thread that saves; what is raised ends it."""

    def needs(self, step: int) -> bool:
        """Whether the checkpoint after `step` must stay, however old it is. On rank 0, in the thread that saves."""
        return False

    def look(self, loop: Loop) -> dict[str, Any]:
        """What else goes into the last step's line: what is seen of the model. The step's checkpoint, if one was due,
        is on its way. Called also at a start that finds the line of its checkpoint's step missing."""
        return {}

    def after_step(self, loop: Loop) -> None:
        """All of a step is done, its checkpoint included."""

    def on_damage(self, after: int) -> None:
        """Training is about to stop: checkpoints after step `after` may be made of damaged tokens."""

    def on_stop(self, loop: Loop) -> None:
        """Training leaves before its end; the checkpoint of `loop.progress` is complete."""

    def on_finish(self, loop: Loop) -> None:
        """Training is done and its last checkpoint complete; the manifest comes next."""

    def on_end(self, loop: Loop) -> None:
        """Training ends, whatever the reason. Other ranks may be gone."""


class HookSettings(Kind):
    """The settings of a hook of your own, each a field with its text underneath."""

    @abstractmethod
    def open(self, loop: Loop) -> Hook:
        """The hook, on every rank."""
