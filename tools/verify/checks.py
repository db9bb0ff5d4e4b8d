"""The checks of a verification. Each reads one or two files, in a worker process, and returns its findings.

Text and token shards are read to their end, and compared with their records and with each other. Of a text shard one
document is in memory; of a token shard the offsets of its documents and `CHUNK` tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from drover.pipeline.contract.content_hash import content_hash
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import (
    Record,
    bounded_lines,
    opened,
    problem_of,
    read_json,
    refuse_irregular,
    seal_of,
    sealing,
)
from drover.pipeline.data.sampling.packing import is_sound
from drover.pipeline.data.text_shards import read_shard
from drover.pipeline.data.token_shards import TokenShard, column_offsets, read_batch

NOT_SEALED = "notes without a checksum: only checked to be readable"
TORN = "truncated at the end, as a kill leaves it; valid up to there"
WENT = "removed while the run was verified"
GONE = "input files that no longer exist; no problem, since their outputs are checked"
CHUNK = 1 << 22
"""Tokens or keys in memory at once."""


@dataclass(frozen=True)
class Problem:
    """A file with a problem: what is wrong, and what to do."""

    file: str
    what: str
    do: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what}. {self.do}."


class Recorded(NamedTuple):
    """A file in a folder, its record (path, bytes, sha256), and what to do if they do not match."""

    folder: Path
    record: Record
    do: str

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / self.record["path"]


@dataclass
class Findings:
    """Results of checks.

    Attributes:
        problems: in the order of the checks.
        files, bytes: how many were read and compared with their records.
        notes: files by remark, such as that nothing records their content. Notes are no problems.
    """

    problems: list[Problem] = field(default_factory=list)
    files: int = 0
    bytes: int = 0
    notes: dict[str, list[str]] = field(default_factory=dict)

    def problem(self, file: Path | str, what: str, do: str) -> None:
        """Add a problem of a file."""
        self.problems.append(Problem(str(file), what, do))

    def note(self, note: str, *files: Path | str) -> None:
        """Add a remark about files that is no problem."""
        self.notes.setdefault(note, []).extend(map(str, files))

    def add(self, found: Findings) -> None:
        """Add the findings of another check."""
        self.problems += found.problems
        self.files += found.files
        self.bytes += found.bytes
        for note, files in found.notes.items():
            self.note(note, *files)

    def compare(self, file: Recorded, hashed: bool = True) -> str:
        """Compare a file's size, and its hash, with its record. Returns "" if they match, else "size" or "content".

        hashed: False for a shard that the sample leaves out: only the size.
        """
        if not (problem := problem_of(file.path, file.record, hashed=hashed)):
            return ""
        self.problem(file.path, f"it {problem.removeprefix(f'{file.path} ')}", file.do)
        return "size" if problem_of(file.path, file.record, hashed=False) else "content"


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        function: called with the findings to add to, and the arguments.
        arguments: the paths and `Recorded` among them are the files that it reads.
        passing: a run that is working may remove the files meanwhile.
        counted: whether the files are read, not only their sizes.
    """

    function: Callable[..., object]
    arguments: tuple[Any, ...]
    passing: bool = False
    counted: bool = True

    @property
    def files(self) -> list[Path]:
        """The files that it reads."""
        return [one.path if isinstance(one, Recorded) else one for one in self.arguments
                if isinstance(one, Recorded | Path)]

    def __call__(self) -> Findings:
        """Run the check. An exception becomes a problem of the files that it reads."""
        found = Findings()
        try:
            for path in self.files:
                if path.exists():
                    refuse_irregular(path)
            self.function(found, *self.arguments)
            sizes = [path.stat().st_size for path in self.files if self.counted and path.is_file()]
            found.files, found.bytes = len(sizes), sum(sizes)
        except Exception as error:  # noqa: BLE001 - a damaged file may make any library fail
            of = getattr(error, "filename", None)
            for file in [of] if isinstance(of, str) else self.files:
                found.problem(file, f"it cannot be read ({type(error).__name__}: {error})",
                              "Check the disk, and put a valid file there")
        if self.passing and found.problems and (gone := [path for path in self.files if not path.exists()]):
            found = Findings()
            found.note(WENT, *gone)
        return found


def check_shard(found: Findings, text: Recorded | None, tokens: Recorded | None, vocabulary: Record | None) -> None:
    """Check a text shard, its token shard, or both against each other. vocabulary: the tokenizer's record; without it
    token shards are only hashed."""
    made = None
    if tokens is not None:
        state = found.compare(tokens)
        if vocabulary is not None and state != "size":
            for what in token_problems(tokens.path, tokens.record, vocabulary, mapped=not state):
                found.problem(tokens.path, what, tokens.do)
        if text is not None and not state:
            made = TokenShard(tokens.path, tokens.record)
            if (before := tokens.record["input_sha256"]) != (now := text.record["sha256"]):
                found.problem(tokens.path, f"it was made from another version of {text.record['path']} (sha256 "
                                           f"{before[:12]}, not {now[:12]})", "Run --stage encode --force")
    if text is not None and (state := found.compare(text)) != "size":
        own, other = text_problems(text.folder, text.record, None if state else made)
        for what in own:
            found.problem(text.path, what, text.do)
        for what in other if tokens else ():
            found.problem(tokens.path, what, tokens.do)  # type: ignore[union-attr]


def check_source(found: Findings, path: Path, record: Record, stage: str) -> None:
    """Compare an input file with the size and hash that it had when the stage read it."""
    fix = f"Put the old file back, or run --stage {stage} --force with the new one"
    try:
        stat = path.stat()
    except FileNotFoundError:
        found.note(GONE, path)
        return
    if stat.st_size != record["bytes"]:
        found.problem(path, f"it has {stat.st_size:,} bytes instead of the {record['bytes']:,} that the stage {stage} "
                            f"read (as {record['name']})", fix)
    elif (now := content_hash(str(path), record["sha256"])) != record["sha256"]:
        kept = ", though its modification time is the same" if stat.st_mtime_ns == record["mtime_ns"] else ""
        found.problem(path, f"its content changed after the stage {stage} read it (as {record['name']}){kept}: "
                            f"{_short(record['sha256'])} -> {_short(now)}",
                      fix)


def check_seal(found: Findings, path: Path, do: str, required: bool = False) -> None:
    """Check a record's checksum of its own bytes. A note without one only has to be valid JSON."""
    seal = seal_of(path)
    if seal == "damaged":
        found.problem(path, "its checksum does not match its content", do)
    elif seal == "not sealed" and required:
        found.problem(path, "its checksum is missing: it was cut or edited", do)
    elif seal == "not sealed":
        try:
            found.note(NOT_SEALED, path)
            if path.suffix == ".json":
                read_json(path)
        except ValueError as error:
            found.problem(path, f"it is not JSON ({error})", do)


def check_ledger(found: Findings, path: Path, do: str) -> None:
    """Check a ledger of finished tasks. Each line has a checksum; a kill may leave the last one truncated."""
    with opened(path) as file:
        for number, line in enumerate(bounded_lines(file), 1):
            if sealing(line) != "sealed" and re.search(rb'"seal": ".{64}|[0-9a-f]{64}', line[-90:]):
                found.problem(path, f"the checksum of line {number} does not match", do)


def check_plan(found: Findings, path: Path) -> None:
    """Check the packing plan of a shard."""
    if not is_sound(path):
        found.problem(path, "it is truncated or changed", "Delete it: training makes it again")


def check_tensorboard(found: Findings, path: Path) -> None:
    """Check a TensorBoard file by the checksums of its records."""
    if find_spec("tensorboard") is None:
        found.note("TensorBoard files that were not read, since the package tensorboard is not installed", path)
        return
    from tensorboard.compat.tensorflow_stub.errors import DataLossError, OutOfRangeError
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New
    reader = PyRecordReader_New(str(path))
    try:
        while True:
            reader.GetNext()
    except OutOfRangeError:
        return
    except DataLossError as error:
        if "truncated record" in str(error):
            found.note(TORN, path)
        else:
            found.problem(path, f"the checksum of one of its records does not match ({error})",
                          "Delete it; the curves are in train/metrics.jsonl too")


def _short(digest: str) -> str:
    kind, _, value = digest.rpartition(":")
    return f"{kind or 'sha256'} {value[:12]}"


def text_problems(folder: Path, record: Record, tokens: TokenShard | None = None) -> tuple[list[str], list[str]]:
    """Problems of a text shard (its tar, its members' names, its counts), and of its token shard. That must have the
    same documents in the same order, by key and length. The text is read once."""
    text_bytes, number, other = 0, -1, list[str]()
    try:
        for number, document in enumerate(read_shard(folder, record)):
            if document.source != record["source"]:
                raise UserError(f"the document {document.id} is of the source {document.source}, the shard of "
                                f"{record['source']}")
            text_bytes += (length := len(document.text.encode()))
            if tokens is not None and not other and number < tokens.documents:
                try:
                    found = tokens.document_key(number), tokens.document_bytes(number)
                except UserError as error:
                    other.append(_without_path(error, tokens.path))
                    continue
                if found != (key := document.key.partition("-")[0], length):
                    other.append(f"its document {number:,} is {found[0]} of {found[1]:,} bytes; in {record['path']} it "
                                 f"is {key} of {length:,}")
    except UserError as error:
        return [_without_path(error, folder / record["path"])], other
    if tokens is not None and number + 1 != tokens.documents:
        other.append(f"it holds {tokens.documents:,} documents, {record['path']} {number + 1:,}")
    return _count_problems(record, text_bytes), other


def _count_problems(record: Record, text_bytes: int) -> list[str]:
    return [] if text_bytes == record["text_bytes"] else [
        f"it holds {text_bytes:,} bytes of text, its record says {record['text_bytes']:,}"]


def token_problems(path: Path, record: Record, vocabulary: Record, *, mapped: bool) -> list[str]:
    """Problems of a token shard: layout, offsets, BOS and EOS, ids, counts.

    vocabulary: of the tokenizer stage (size, bos_id, eos_id, sha256). mapped: also read it with Arrow, which a damaged
    file may crash.
    """
    try:
        shard = TokenShard(path, record)
        text_bytes = sum(int(shard.text_bytes(start, min(start + CHUNK, shard.documents)).sum())
                         for start in range(0, shard.documents, CHUNK))
        return [*(_arrow_problems(path, record, vocabulary) if mapped else ()),
                *_id_problems(shard, shard.read_offsets(), vocabulary), *_count_problems(record, text_bytes)]
    except UserError as error:
        return [_without_path(error, path)]


def _arrow_problems(path: Path, record: Record, vocabulary: Record) -> Iterator[str]:
    """Compare Arrow's columns with the record, and the schema with the vocabulary."""
    batch = read_batch(path)
    if batch.num_rows != record["docs"]:
        yield f"Arrow reads {batch.num_rows:,} documents, its record says {record['docs']:,}"
    if other := {name: place for name, place in column_offsets(path).items() if place != record[name]}:
        yield f"Arrow finds columns at other places than its record says ({other})"
    said = {name.decode(): value.decode() for name, value in (batch.schema.metadata or {}).items()}
    for name, value in {"dtype": record["dtype"], "tokenizer_sha256": vocabulary["sha256"],
                        "vocab_size": vocabulary["size"], "bos_id": vocabulary["bos_id"],
                        "eos_id": vocabulary["eos_id"]}.items():
        if said.get(name) != str(value):
            yield f"its schema says {name} {said.get(name)}, it should be {value}"


def _id_problems(shard: TokenShard, offsets: NDArray[np.int64], vocabulary: Record) -> Iterator[str]:
    """The first id outside of the vocabulary, and the first BOS or EOS that is missing or misplaced."""
    starts, ends, bos, eos = offsets[:-1], offsets[1:] - 1, vocabulary["bos_id"], vocabulary["eos_id"]
    bounds = {"BOS": (bos, starts), "EOS": (eos, ends)} if bos != eos else {
        "BOS, which is EOS too,": (bos, np.union1d(starts, ends))}  # some vocabularies have one token for both
    told = set[str]()

    def where(at: int) -> str:
        number = int(np.searchsorted(offsets, at, side="right")) - 1
        return f"document {number:,}, key {shard.document_key(number)}"
    for start in range(0, shard.token_count, CHUNK):
        tokens = shard.tokens(start, stop := min(start + CHUNK, shard.token_count))
        if "id" not in told and (foreign := np.flatnonzero(tokens >= vocabulary["size"])).size:
            told.add("id")
            at = start + int(foreign[0])
            yield (f"its token {at:,} is the id {tokens[foreign[0]]}, outside of the vocabulary of "
                   f"{vocabulary['size']:,} ({where(at)})")
        for name, (number, places) in bounds.items():
            here = places[np.searchsorted(places, start):np.searchsorted(places, stop)]
            wrong = np.setxor1d(np.flatnonzero(tokens == number) + start, here)
            if name not in told and wrong.size:
                told.add(name)
                what = "is missing at" if int(wrong[0]) in here else "is inside of a document at"
                yield f"{name} {what} its token {wrong[0]:,} ({where(int(wrong[0]))})"


def _without_path(error: UserError, path: Path) -> str:
    """The error without the path and without what to do: a problem adds both."""
    return str(error).removeprefix(f"{path} ").partition(". ")[0].rstrip(".")
