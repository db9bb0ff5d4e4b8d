"""Copies of training's checkpoints in an object store: a mirror for each step, under one owner."""

from __future__ import annotations

from dataclasses import dataclass

from drover.pipeline.records.checkpoints import checkpoint_name
from drover.pipeline.storage.mirror import COPY, Mirror
from drover.pipeline.storage.store import Store

RECORDS = "records/"
"""Below a step: what of the train folder goes on with it."""


@dataclass(frozen=True)
class Found:
    """What there is in the store: steps whose copy is whole, and paths of what is left of others, by step."""

    whole: list[int]
    unfinished: dict[int, list[str]]


class CopiedCheckpoints:
    """The copies in one store."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def of(self, step: int) -> Mirror:
        """The copy of the checkpoint after `step`."""
        return Mirror(self.store.join(checkpoint_name(step)))

    def found(self) -> Found:
        """What there is, in the order of steps; UserError if the store cannot be listed."""
        objects: dict[int, list[str]] = {}
        for entry in self.store.list():
            name, _, rest = entry.path.partition("/")
            number = name.removeprefix("step-")
            if rest and name.startswith("step-") and number.isdigit():
                objects.setdefault(int(number), []).append(entry.path)
        whole = sorted(step for step, paths in objects.items() if f"{checkpoint_name(step)}/{COPY}" in paths)
        return Found(whole, {step: paths for step, paths in sorted(objects.items()) if step not in whole})

    def remove(self, *steps: int) -> None:
        """Remove copies, the list of each first."""
        for step in steps:
            self.of(step).remove()

    def prune(self, keep: int, permanent_every: int | None) -> list[int]:
        """Remove all but the newest `keep` copies and permanent ones; the steps that went."""
        gone = [step for step in self.found().whole[:-keep] if permanent_every is None or step % permanent_every]
        self.remove(*gone)
        return gone
