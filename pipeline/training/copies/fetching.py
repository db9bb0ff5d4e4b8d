"""A checkpoint from its copy: every rank fetches its share of the files, all are compared, then it counts as saved."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipeline.copies.checkpoints import RECORDS, CopiedCheckpoints, prefix_of
from pipeline.copies.transfer import DamagedCopyError, fetch
from pipeline.errors import UserError, is_full_disk
from pipeline.files import sync
from pipeline.parallel.ranks import Ranks
from pipeline.records.checkpoints import MARKER, checkpoint_name
from pipeline.training.async_saver import tried
from pipeline.training.checkpoint import Checkpoints
from pipeline.training.copies.beside import take_up

TAKEN_UP = "records.tmp"
"""In the train folder: what goes on with a checkpoint, while it is fetched."""


def fetch_newest(copies: CopiedCheckpoints, checkpoints: Checkpoints, ranks: Ranks, steps: Sequence[int],
                 train_folder: Path, say: Callable[[str], None]) -> tuple[int | None, list[int]]:
    """Fetch the newest sound copy; its step, None where there is none, and the steps of newer ones, which are damaged.
    Called on all ranks alike.

    Args:
        steps: of the copies that may be fetched, in order.

    Raises:
        UserError: the store cannot be read; the same on every rank.
        OSError: the disk is full, or does not work.
    """
    damaged = list[int]()
    for step in reversed(steps):
        try:
            _fetch(copies, checkpoints, ranks, step, train_folder, say)
        except DamagedCopyError as error:
            say(f"the copy of {checkpoint_name(step)} is damaged ({error}); going back to the one before it")
            damaged.append(step)
        else:
            return step, damaged
    return None, damaged


def _fetch(copies: CopiedCheckpoints, checkpoints: Checkpoints, ranks: Ranks, step: int, train_folder: Path,
           say: Callable[[str], None]) -> None:
    final = checkpoints.path(step)
    temporary, beside = final.with_name(f"{final.name}.tmp"), train_folder / TAKEN_UP

    def ready() -> list[dict[str, Any]]:
        files = copies.read(step)
        for folder in (temporary, beside):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        _refuse_full_disk(checkpoints.folder, sum(record["bytes"] for record in files), step)
        say(f"fetching {final.name} from {copies.store.url} "
            f"({sum(record['bytes'] for record in files) / 1e6:,.1f} MB in {len(files)} files)")
        return files

    files: list[dict[str, Any]] = ranks.by_leader(ready)
    records = [{**record, "path": record["path"].removeprefix(RECORDS)} for record in files
               if record["path"].startswith(RECORDS)]
    tensors = [record for record in files if not record["path"].startswith(RECORDS)]

    def mine() -> None:
        fetch(copies.store, prefix_of(step), temporary, tensors[ranks.rank::ranks.world])
        if ranks.leads:
            fetch(copies.store, f"{prefix_of(step)}{RECORDS}", beside, records)

    try:
        _raise_first(ranks.gather(tried(mine, temporary)))
        ranks.by_leader(lambda: _publish(temporary, beside, final, train_folder, say))
    finally:
        if ranks.leads:
            for folder in (temporary, beside):
                shutil.rmtree(folder, ignore_errors=True)


def _publish(temporary: Path, beside: Path, final: Path, train_folder: Path, say: Callable[[str], None]) -> None:
    """What was fetched takes its place: the log first, the checkpoint's marker last."""
    take_up(beside, train_folder, say)
    if final.exists():  # never finished, or it would not have been fetched
        (final / MARKER).unlink(missing_ok=True)
        shutil.rmtree(final)
    marker = temporary.with_name(f"{final.name}.{MARKER}.tmp")
    (temporary / MARKER).rename(marker)
    sync(temporary)
    temporary.rename(final)
    sync(final.parent)
    marker.rename(final / MARKER)
    sync(final)


def _refuse_full_disk(folder: Path, needed: int, step: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(f"The copy of {checkpoint_name(step)} has {needed / 1e9:,.2f} GB, but {free / 1e9:,.2f} GB are "
                        f"free where {folder} is: the disk is too full to fetch it. Free some space, and run the same "
                        f"command again.")


def _raise_first(found: Sequence[Any]) -> None:
    """Raise what the first rank failed with; a full disk, and a store that does not answer, before a damaged copy."""
    errors = [error for error in found if isinstance(error, Exception)]
    if errors:
        raise min(errors, key=lambda error: (not is_full_disk(error), isinstance(error, DamagedCopyError)))
