"""Token shards copied to an object store, which a run may then be trained from.

There a shard has the path that it has in the stage's folder. Objects are written whole, and last of all the manifest: a
place without one holds no copy. What was sent is noted in the stage's folder with what the store called it (its ETag),
so that a copy that was stopped goes on; what was not noted is sent again, which gives the same objects.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drover.pipeline.data.shard_table import NUMBERS, ShardTable
from drover.pipeline.data.stored.shards import MEND
from drover.pipeline.errors import UserError, all_problems, listed
from drover.pipeline.files import append_line, read_lines, sha256_file, sha256_json
from drover.pipeline.stores.outcomes import Entry, Missing
from drover.pipeline.stores.store import Store, preflight

MANIFEST = "manifest.json"
FORMAT = 1
COPIES = "copies"
"""Folder inside of the stage's, with a file for each place that it was copied to."""
AT_ONCE = 8
SHOWN = 10
RECORD = ("path", "sha256", "split", "source", "dtype", *NUMBERS)
"""What the store's manifest says of a shard."""


@dataclass(frozen=True)
class Copied:
    """What a copy did: shards and bytes that were sent, and shards that were there already."""

    sent: int
    sent_bytes: int
    there: int

    def __str__(self) -> str:
        return f"{self.sent:,} token shards sent ({self.sent_bytes / 1e6:,.1f} MB), {self.there:,} were there already"


def copy_shards(folder: Path, outputs: Sequence[dict[str, Any]], counts: dict[str, Any], url: str,
                advance: Callable[[], None] = lambda: None) -> Copied:
    """Copy an encode stage's shards to a place, and then the manifest. Only one process at a time may do so.

    Args:
        folder: the stage's. outputs, counts: of its manifest.
        advance: called after each shard.

    Raises:
        UserError: the place holds other shards, the store does not keep what it is sent, or a shard is not what its
            record says.
    """
    store, note = Store(url), note_of(folder, url)
    preflight(store)
    there = {entry.path: (entry.size, entry.etag) for entry in store.list()}
    if MANIFEST in there and _held(store) != digest(outputs):
        raise UserError(f"{url} holds other token shards. Nothing there is overwritten: give another place, or, if "
                        f"nobody trains from there any more, delete {store.url_of(MANIFEST)} first.")
    noted = {line["path"]: line for line in read_lines(note, appended=True)}
    todo = [record for record in outputs if not _is_there(record, noted.get(record["path"]), there)]
    for _ in range(len(outputs) - len(todo)):
        advance()
    for record, entry in _in_threads(lambda record: _send(store, folder, record), todo):
        append_line(note, {"path": record["path"], "sha256": record["sha256"], "bytes": entry.size,
                           "etag": entry.etag})
        advance()
    content = manifest_bytes(outputs, counts)
    if there.get(MANIFEST, (0, ""))[0] != len(content) or store.read(MANIFEST) != content:
        store.put(MANIFEST, content)
    return Copied(len(todo), sum(record["bytes"] for record in todo), len(outputs) - len(todo))


def compare_copy(outputs: Sequence[dict[str, Any]], url: str, advance: Callable[[], None] = lambda: None) -> None:
    """Read every copied shard back; UserError names those whose content is not what their records say."""
    store, wrong = Store(url), list[str]()
    for record, found in _in_threads(lambda record: _hash(store, record), outputs):
        if found != record["sha256"]:
            wrong.append(f"{store.url_of(record['path'])}: sha256 {record['sha256'][:12]} -> {found[:12]}")
        advance()
    if wrong:
        raise UserError(f"{len(wrong):,} shards in {url} are not what was sent:\n{listed(wrong[:SHOWN])}\nDelete these "
                        f"objects and copy again; use another server if that does not help.")


def note_of(folder: Path, url: str) -> Path:
    """Where the stage in `folder` notes what was sent to that place."""
    return folder / COPIES / f"{hashlib.sha256(url.rstrip('/').encode()).hexdigest()[:16]}.jsonl"


def manifest_bytes(outputs: Sequence[dict[str, Any]], counts: dict[str, Any]) -> bytes:
    """What the store's manifest holds: the shards' records and counts. Equal shards give equal bytes."""
    records = [{name: record[name] for name in RECORD} for record in outputs]
    value = {"format": FORMAT, "holds": "token shards of Drover", "digest": digest(outputs),
             "counts": {name: counts[name] for name in ("total", "dtype", "vocab_size", "tokenizer_sha256")
                        if name in counts}, "outputs": records}
    return json.dumps(value, indent=1).encode() + b"\n"


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
    store = Store(url)
    try:
        found = json.loads(store.read(MANIFEST))
        held, outputs = found["digest"], found["outputs"]
    except Missing:
        raise UserError(f"{store.url_of(MANIFEST)} is not there, so {url} (train.tokens_from) holds no finished copy "
                        f"of token shards. Copy them there: python -m drover.tools.copy_tokens --run RUN --to "
                        f"{url}") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{store.url_of(MANIFEST)} is not a manifest of token shards. Give the place that this run's "
                        f"shards were copied to as train.tokens_from.") from None
    if held != wanted:
        there = {record["path"]: record["sha256"] for record in outputs}
        other = [table.path(row) for row in range(len(table)) if there.get(table.path(row)) != table.digest(row)]
        raise UserError(f"{url} (train.tokens_from) holds other token shards than the stage encode of this run made "
                        f"({len(other):,} of {len(table):,} differ: {', '.join(other[:3])}{' ...' if other[3:] else ''}"
                        f"). Copy this run's to another place (python -m drover.tools.copy_tokens --run RUN --to "
                        f"URL), or "
                        f"give the place that has them.")
    entries = {entry.path: entry for entry in store.list()}
    problems, etags = list[str](), list[str]()
    for row in range(len(table)):
        entry, size = entries.get(table.path(row)), int(table.record(row)["bytes"])
        etags.append(entry.etag if entry is not None else "")
        if entry is None:
            problems.append(f"{store.url_of(table.path(row))} is missing")
        elif entry.size != size:
            problems.append(f"{store.url_of(table.path(row))} has {entry.size:,} bytes instead of {size:,}")
    if problems:
        raise UserError(all_problems(problems, f"{len(problems):,} of {len(table):,} token shards in {url} "
                                               f"(train.tokens_from) are damaged") + f"\n{MEND}")
    return etags


def _held(store: Store) -> str:
    """The digest in a place's manifest; "" where that is none of ours."""
    try:
        return str(json.loads(store.read(MANIFEST))["digest"])
    except (Missing, ValueError, KeyError, TypeError):
        return ""


def _is_there(record: dict[str, Any], noted: dict[str, Any] | None, there: dict[str, tuple[int, str]]) -> bool:
    """Whether the store has what was noted when this very shard was sent."""
    return (noted is not None and noted["sha256"] == record["sha256"] and bool(noted["etag"])
            and there.get(record["path"]) == (record["bytes"], noted["etag"]))


def _send(store: Store, folder: Path, record: dict[str, Any]) -> Entry:
    path = folder / record["path"]
    try:
        found = sha256_file(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}. Run --stage encode again, then copy.") from None
    if found != record["sha256"]:
        raise UserError(f"{path} is not what the stage encode made (sha256 {record['sha256'][:12]} -> {found[:12]}), "
                        f"so it is not copied. Delete it and run --stage encode again; then copy again.")
    entry = store.put(record["path"], path)
    if entry.size != record["bytes"]:
        raise UserError(f"{store.url_of(record['path'])} has {entry.size:,} bytes after {record['bytes']:,} were sent. "
                        f"The server does not keep what it is sent; use another one.")
    return entry


def _hash(store: Store, record: dict[str, Any]) -> str:
    found = hashlib.sha256()
    with store.stream(record["path"]) as stream:
        while chunk := stream.read(1 << 20):
            found.update(chunk)
    return found.hexdigest()


def _in_threads(function: Callable[[dict[str, Any]], Any],
                records: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], Any]]:
    """Each record with what `function` gives for it, in their order."""
    pool = ThreadPoolExecutor(AT_ONCE, "copying")
    try:
        yield from zip(records, pool.map(function, records), strict=True)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
