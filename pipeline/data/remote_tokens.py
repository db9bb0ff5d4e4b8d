"""Token shards in an object store: uploaded by encode, downloaded to each node before training.

There a shard has the path that it has in the stage's folder.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from drover.pipeline.contract.inputs import Expected, output
from drover.pipeline.contract.manifest import digest
from drover.pipeline.contract.stage_work import Work
from drover.pipeline.core.console import ProgressBar, first
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Outputs, Record, lock_file, problem_of, remove_temporary
from drover.pipeline.data.token_shards import Shards, ShardTable, open_shards
from drover.pipeline.storage.mirror import COPY, Copied, DamagedCopyError, Mirror, copy_files, ledger_of
from drover.pipeline.storage.store import Missing, Store

UPLOAD = "drover copy-tokens RUN --to"


def upload_shards(folder: Path, outputs: Outputs, url: str,
                  advance: Callable[[], None] = lambda: None) -> Copied:
    """Upload an encode stage's shards to a place of theirs alone; UserError as of `copy_files`.

    Args:
        folder: the stage's. outputs: of its manifest.
        advance: called after each shard.
    """
    own = digest(outputs)
    return copy_files(url, f"the token shards {own[:16]}", own, folder, outputs, ledger=ledger_of(folder, url),
                      advance=advance)


def shard_folder(work: Work, table: ShardTable) -> Path:
    """The folder with the run's token shards on this node: the stage encode's, or with `train.tokens_from` the one
    that they are downloaded to, whose name is made of their content."""
    train = work.config.train
    if train.tokens_from is None:
        return work.input("encode")[0]
    content = hashlib.sha256("\n".join(table.paths).encode() + table.sha256.tobytes()).hexdigest()
    return Path(train.tokens_folder or tempfile.gettempdir()) / f"drover-tokens-{os.getuid()}-{content[:16]}"


def download_shards(work: Work, table: ShardTable, rows: Iterable[int], *, shows_progress: bool = True) -> None:
    """With `train.tokens_from`, download the shards in these rows into this node's folder and compare their hashes.
    Files that are there already stay, so a killed download continues. Processes of a node take turns.

    Raises:
        UserError: the store does not hold these shards, or the folder has no room or cannot be written to.
    """
    url = work.config.train.tokens_from
    folder = shard_folder(work, table)
    if url is None:
        return
    records = [table.record(row) for row in rows]
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            raise UserError(f"{folder} on {platform.node()} does not belong to you. Give another train.tokens_folder.")
        with open(folder / "lock", "ab") as lock:
            lock_file(lock.fileno(), wait=True)
            remove_temporary(folder)
            missing = [record for record in records if problem_of(folder / record["path"], record, hashed=False)]
            if not missing:
                return
            mirror = _mirror_of(url, records)
            _refuse_full_disk(folder, missing)
            with ProgressBar(work.name, f"token shards to {folder}", len(records), "shards") as progress:
                progress.already(len(records) - len(missing))
                mirror.fetch(folder, missing, progress.advance if shows_progress else lambda: None)
    except DamagedCopyError as error:
        raise UserError(f"{error} (train.tokens_from). Delete the copy there, and upload the run's shards again "
                        f"({UPLOAD} {url}).") from None
    except OSError as error:
        raise UserError(f"Token shards cannot be kept in {folder} on {platform.node()}: {error.strerror}. Give a "
                        f"train.tokens_folder on a disk of the node that this user can write to.") from None


def recorded_shards(work: Work, table: ShardTable, rows: Iterable[int]) -> list[Expected]:
    """The files of the shards in these rows, with the hashes that encode recorded."""
    folder = shard_folder(work, table)
    result = [output(folder, table.record(row), "encode") for row in rows]
    if work.config.train.tokens_from is None:
        return result
    return [replace(file, origin=f"on {platform.node()} {file.origin}",
                    fix="Delete it, so that it is downloaded again") for file in result]


def shards_of(work: Work, split: str) -> dict[str, Shards]:
    """The token shards of a split by source. They must be on this node."""
    table = ShardTable.of(work.input("encode")[1].outputs)
    return open_shards(table, split, work.config.source_names, shard_folder(work, table))


def _mirror_of(url: str, records: Sequence[Record]) -> Mirror:
    """The finished copy of these shards at a place; UserError if it has none, or other shards."""
    mirror = Mirror(Store(url))
    try:
        copied = {record["path"]: record["sha256"] for record in mirror.read()["files"]}
    except Missing:
        raise UserError(f"{mirror.store.url_of(COPY)} is not there, so {url} (train.tokens_from) holds no finished "
                        f"copy of token shards. Upload them: {UPLOAD} {url}") from None
    other = [record["path"] for record in records if copied.get(record["path"]) != record["sha256"]]
    if other:
        raise UserError(f"{url} (train.tokens_from) holds other token shards than the stage encode of this run made "
                        f"({len(other):,} of {len(records):,} differ: {first(other)}). Upload this run's to another "
                        f"place ({UPLOAD} URL), or give the place that has them.")
    return mirror


def _refuse_full_disk(folder: Path, missing: Sequence[Record]) -> None:
    needed, free = sum(record["bytes"] for record in missing), shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(f"The token shards that are missing in {folder} on {platform.node()} have {needed / 1e9:,.3f} "
                        f"GB, but {free / 1e9:,.3f} GB are free there. Free some space, or give another "
                        f"train.tokens_folder.")
