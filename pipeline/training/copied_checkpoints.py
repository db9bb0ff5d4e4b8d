"""Uploaded checkpoints in an object store: a mirror for each step, under one owner."""

from __future__ import annotations

from dataclasses import dataclass

from drover.pipeline.records.checkpoints import checkpoint_name
from drover.pipeline.storage.mirror import COPY, Mirror
from drover.pipeline.storage.store import Store

RECORDS = "records/"
"""Folder below a step for the train folder's records that belong to the checkpoint."""


@dataclass(frozen=True)
class Found:
    """The content of the store: steps with a complete copy, and the paths of incomplete ones, by step."""

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
        """The content of the store, in the order of steps; UserError if it cannot be listed."""
        objects: dict[int, list[str]] = {}
        for entry in self.store.list():
            name, _, rest = entry.path.partition("/")
            number = name.removeprefix("step-")
            if rest and name.startswith("step-") and number.isdigit():
                objects.setdefault(int(number), []).append(entry.path)
        whole = sorted(step for step, paths in objects.items() if f"{checkpoint_name(step)}/{COPY}" in paths)
        return Found(whole, {step: paths for step, paths in sorted(objects.items()) if step not in whole})

    def remove(self, *steps: int) -> None:
        """Remove copies, each one's copy.json first."""
        for step in steps:
            self.of(step).remove()

    def prune(self, keep: int, permanent_every: int | None) -> list[int]:
        """Remove all but the newest `keep` copies and permanent ones. Returns the removed steps."""
        gone = [step for step in self.found().whole[:-keep] if permanent_every is None or step % permanent_every]
        self.remove(*gone)
        return gone
