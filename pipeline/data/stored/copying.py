"""Token shards copied to an object store, which a run may then be trained from.

There a shard has the path that it has in the stage's folder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from drover.pipeline.core.errors import UserError, all_problems
from drover.pipeline.core.files import sha256_json
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


def digest(outputs: Sequence[dict[str, Any]]) -> str:
    """What identifies the shards: as `drover.pipeline.contract.manifest.Manifest.digest`."""
    return sha256_json(sorted([record["path"], record["sha256"]] for record in outputs))


def digest_of(table: ShardTable) -> str:
    """`digest` of the shards of a table."""
    return sha256_json(sorted([table.path(row), table.digest(row)] for row in range(len(table))))


def survey(url: str, table: ShardTable, wanted: str) -> list[str]:
    """See that a place has the shards of a table, in their sizes: one listing. For one rank.

    Args:
        wanted: the digest of the run's encode stage.

    Returns:
        The ETag of each row's object, as the store has it now.

    Raises:
        UserError: there is no finished copy, it is of other shards, or some are missing or cut.
    """
    store, command = Store(url), "python -m drover.tools.copy_tokens --run RUN --to"
    try:
        found = Mirror(store).read()
    except Missing:
        raise UserError(f"{store.url_of(COPY)} is not there, so {url} (train.tokens_from) holds no finished copy "
                        f"of token shards. Copy them there: {command} {url}") from None
    except DamagedCopyError as error:
        raise UserError(f"{error}. Give the place that this run's shards were copied to as "
                        f"train.tokens_from.") from None
    if found["of"] != wanted:
        there = {record["path"]: record["sha256"] for record in found["files"]}
        other = [table.path(row) for row in range(len(table)) if there.get(table.path(row)) != table.digest(row)]
        raise UserError(f"{url} (train.tokens_from) holds other token shards than the stage encode of this run made "
                        f"({len(other):,} of {len(table):,} differ: {', '.join(other[:3])}{' ...' if other[3:] else ''}"
                        f"). Copy this run's to another place ({command} URL), or give the place that has them.")
    problems, etags = listed_files(store, map(table.record, range(len(table))))
    if problems:
        raise UserError(all_problems(problems, f"{len(problems):,} of {len(table):,} token shards in {url} "
                                               f"(train.tokens_from) are damaged") + f"\n{FIX}")
    return etags
