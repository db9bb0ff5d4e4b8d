"""What of the train folder goes on with a checkpoint, beside its tensors: the log, what was left out, and why.

A run whose folder is gone takes these up again with the checkpoint, and its log has no hole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.files import atomic_file
from pipeline.records.generation_settings import FILE
from pipeline.records.rollbacks import ROLLBACKS
from pipeline.training.data.token_check import COMPARED

LOGS = ("metrics.jsonl", "samples.jsonl", "events.jsonl")
"""They only grow: of one that is written to, its whole lines are taken."""
OF_STEPS = LOGS[:2]
OTHERS = (ROLLBACKS, COMPARED, FILE, "wandb.json", "mlflow.json")
"""The last two are under which names log sinks know the run."""


def whole_records(folder: Path, step: int) -> list[tuple[dict[str, Any], bytes]]:
    """The files that go on with the checkpoint after `step`, as far as they are there, each with its record (path,
    bytes, sha256).

    Of the curves and the texts, only what is of steps before: who goes on from a checkpoint does first what belongs to
    its own step (`Monitor.catch_up`), and what of that was written when the copy was made is a matter of chance.
    """
    found = []
    for name in (*LOGS, *OTHERS):
        try:
            data = (folder / name).read_bytes()
        except FileNotFoundError:
            continue
        if name in LOGS:
            data = data[:data.rfind(b"\n") + 1]
        if name in OF_STEPS:
            data = _before(data, step)
        found.append(({"path": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}, data))
    return found


def _before(lines: bytes, step: int) -> bytes:
    """Lines without the last ones that are of `step` or later."""
    end = len(lines)
    while end:
        start = lines.rfind(b"\n", 0, end - 1) + 1
        if json.loads(lines[start:end])["step"] < step:
            break
        end = start
    return lines[:end]


def take_up(fetched: Path, folder: Path, say: Callable[[str], None]) -> None:
    """Put fetched files into the train folder. What is there already and goes on from the same lines stays; what says
    something else is set aside, which is said."""
    for path in sorted(fetched.iterdir()):
        data, mine = path.read_bytes(), folder / path.name
        if mine.is_file():
            here = mine.read_bytes()
            if _goes_on(path.name, data, here):
                continue
            if here and not _goes_on(path.name, here, data):
                aside = _unused(mine)
                mine.rename(aside)
                say(f"{mine.name} is not what went on with the checkpoint; it is set aside as {aside.name}")
        with atomic_file(mine) as file:
            file.write(data)


def _goes_on(name: str, before: bytes, after: bytes) -> bool:
    """Whether `after`, a file's content, is what `before` was or became by growing."""
    if name == ROLLBACKS:  # a list that grows; what is excluded by a rollback must never be seen again
        with suppress(ValueError, KeyError, TypeError):
            old, new = json.loads(before)["rollbacks"], json.loads(after)["rollbacks"]
            return bool(new[:len(old)] == old)
    return after.startswith(before) if name in LOGS else after == before


def _unused(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.replaced-{number}")).exists():
        number += 1
    return aside
