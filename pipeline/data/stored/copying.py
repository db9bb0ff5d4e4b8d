"""Token shards copied to an object store, which a run may then be trained from.

There a shard has the path that it has in the stage's folder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from drover.pipeline.contract.manifest import digest
from drover.pipeline.core.console import first
from drover.pipeline.core.errors import UserError, all_problems
from drover.pipeline.data.shard_table import ShardTable
from drover.pipeline.data.stored.shards import FIX
from drover.pipeline.storage.mirror import COPY, Copied, DamagedCopyError, Mirror, copy_files, ledger_of, listed_files
from drover.pipeline.storage.store import Missing, Store


def copy_shards(folder: Path, outputs: Sequence[dict[str, Any]], url: str,
                advance: Callable[[], None] = lambda: None) -> Copied:
    """Copy an encode stage's shards to a place of theirs alone; UserError as of `copy_files`.

    Args:
        folder: the stage's. outputs: of its manifest.
        advance: called after each shard.
    """
    own = digest(outputs)
    return copy_files(url, f"the token shards {own[:16]}", own, folder, outputs, ledger=ledger_of(folder, url),
                      advance=advance)


def survey(url: str, table: ShardTable) -> list[str]:
    """Check, with one listing, that a place has all shards of the run's encode stage in their sizes. For one rank.

    Returns:
        The ETag of each row's object, as the store has it now.

    Raises:
        UserError: there is no finished copy, it is of other shards, or some are missing or cut.
    """
    store, command = Store(url), "drover copy-tokens RUN --to"
    try:
        found = Mirror(store).read()
    except Missing:
        raise UserError(f"{store.url_of(COPY)} is not there, so {url} (train.tokens_from) holds no finished copy "
                        f"of token shards. Copy them there: {command} {url}") from None
    except DamagedCopyError as error:
        raise UserError(f"{error}. Give the place that this run's shards were copied to as "
                        f"train.tokens_from.") from None
    records = [table.record(row) for row in range(len(table))]
    if found["of"] != digest(records):
        there = {record["path"]: record["sha256"] for record in found["files"]}
        other = [record["path"] for record in records if there.get(record["path"]) != record["sha256"]]
        raise UserError(f"{url} (train.tokens_from) holds other token shards than the stage encode of this run made "
                        f"({len(other):,} of {len(table):,} differ: {first(other)}). "
                        f"Copy this run's to another place ({command} URL), or give the place that has them.")
    problems, etags = listed_files(store, records)
    if problems:
        raise UserError(all_problems(problems, f"{len(problems):,} of {len(table):,} token shards in {url} "
                                               f"(train.tokens_from) are damaged") + f"\n{FIX}")
    return etags
