"""How copies of training's checkpoints lie in an object store, where nothing can be renamed.

    run.json                                whose checkpoints these are; claim.py
    lock.json                               who copies now; claim.py
    step-00000100/rank-00000.safetensors    the checkpoint's files, its marker among them
    step-00000100/records/metrics.jsonl     what of the train folder goes on with it
    step-00000100/copy.json                 put last: every other file with size and sha256. Without it there is no copy

Whoever removes one, or puts it again, removes copy.json first, so that at each moment a copy is whole or none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from drover.pipeline.copies.transfer import DamagedCopyError
from drover.pipeline.files import Count, Outputs, parsed_json, typed
from drover.pipeline.records.checkpoints import checkpoint_name
from drover.pipeline.stores.store import Missing, Store

COPY = "copy.json"
RECORDS = "records/"
FORMAT = 1


class CopyRecord(TypedDict):
    """What is written beside a copy of a checkpoint."""

    format: Literal[1]
    step: Count
    files: Outputs


class ExportRecord(TypedDict):
    """What is written beside a copy of an export. run: that makes it; whole: whether all of it is there."""

    format: Literal[1]
    run: str
    whole: bool
    files: Outputs


@dataclass(frozen=True)
class Found:
    """What there is in the store: steps whose copy is whole, and paths of what is left of others, by step."""

    whole: list[int]
    unfinished: dict[int, list[str]]


def prefix_of(step: int) -> str:
    """Where the copy of the checkpoint after `step` lies."""
    return f"{checkpoint_name(step)}/"


class CopiedCheckpoints:
    """The copies in one store."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def found(self) -> Found:
        """What there is, in the order of steps; UserError if the store cannot be listed."""
        objects: dict[int, list[str]] = {}
        for entry in self.store.list():
            name, _, rest = entry.path.partition("/")
            number = name.removeprefix("step-")
            if rest and name.startswith("step-") and number.isdigit():
                objects.setdefault(int(number), []).append(entry.path)
        whole = sorted(step for step, paths in objects.items() if f"{prefix_of(step)}{COPY}" in paths)
        return Found(whole, {step: paths for step, paths in sorted(objects.items()) if step not in whole})

    def read(self, step: int) -> list[dict[str, Any]]:
        """The records of a copy's files.

        Raises:
            DamagedCopyError: copy.json is not one that was put there.
            UserError: the store cannot be read.
        """
        path = f"{prefix_of(step)}{COPY}"
        try:
            content = typed(parsed_json(self.store.read(path)), CopyRecord)
            if content["step"] != step:
                raise ValueError(f"it is of step {content['step']}")
        except Missing:
            raise DamagedCopyError(f"{self.store.url}/{path} is missing") from None
        except ValueError as error:
            raise DamagedCopyError(f"{self.store.url}/{path} is damaged ({error})") from None
        return list(content["files"])

    def finish(self, step: int, files: Sequence[Mapping[str, Any]]) -> None:
        """Make the copy count: all that `files` tells of has been put."""
        kept = [{name: record[name] for name in ("path", "bytes", "sha256")} for record in files]
        text = json.dumps({"format": FORMAT, "step": step, "files": kept}, indent=1) + "\n"
        self.store.put(f"{prefix_of(step)}{COPY}", text.encode())

    def reopen(self, step: int) -> None:
        """Make the copy count no more, if there is one: what it is made of may be put again, or removed."""
        self.store.delete([f"{prefix_of(step)}{COPY}"])

    def remove(self, *steps: int) -> None:
        """Remove copies, copy.json first."""
        for step in steps:
            self.reopen(step)
            self.store.delete([entry.path for entry in self.store.list(checkpoint_name(step))])

    def prune(self, keep: int, permanent_every: int | None) -> list[int]:
        """Remove all but the newest `keep` copies and permanent ones; the steps that went."""
        gone = [step for step in self.found().whole[:-keep] if permanent_every is None or step % permanent_every]
        self.remove(*gone)
        return gone
