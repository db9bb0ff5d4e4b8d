"""The checks of a verification. Each reads one or two files, in a worker process, and returns its findings."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from drover.pipeline.contract.content_hash import content_hash
from drover.pipeline.core.files import read_json, seal_of, sealing, sha256_file
from drover.pipeline.data.sampling.packing import is_sound
from drover.pipeline.data.token_shards import TokenShard
from drover.tools.verify.shards import text_problems, token_problems

NOT_SEALED = "notes without a checksum: only checked to be readable"
TORN = "truncated at the end, as a kill leaves it; valid up to there"
WENT = "removed while the run was verified"
GONE = "input files that no longer exist; no problem, since their outputs are checked"
Record = dict[str, Any]


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
        return self.folder / str(self.record["path"])


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

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        return asdict(self)

    def compare(self, file: Recorded, *, hashed: bool = True) -> str:
        """Compare a file's size, and its hash, with its record. Returns "" if they match, else "size" or "content"."""
        path, record, do = file.path, file.record, file.do
        try:
            size = path.stat().st_size
            found = sha256_file(path) if hashed and size == record["bytes"] else record["sha256"]
        except OSError as error:
            self.problem(path, f"it is missing or cannot be read ({error.strerror})", do)
            return "size"
        if size != record["bytes"]:
            self.problem(path, f"it has {size:,} bytes instead of {record['bytes']:,}", do)
            return "size"
        if found != record["sha256"]:
            self.problem(path, f"its content was changed: sha256 {found[:12]} instead of {record['sha256'][:12]}", do)
            return "content"
        return ""


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        function: called with the findings to add to, and the arguments.
        arguments: the paths and `Recorded` among them are the files that it reads.
        passing: a run that is working may remove the files meanwhile.
        counted: whether the files are read, not only their sizes.
    """

    function: Callable[..., None]
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


def check_file(found: Findings, file: Recorded, hashed: bool = True) -> None:
    """Compare a file with its record. hashed: False for a shard that the sample leaves out: only the size."""
    found.compare(file, hashed=hashed)


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
    """Compare an input file with the hash that was made when the stage read it."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        found.note(GONE, path)
        return
    if (now := content_hash(str(path), record["sha256"])) != record["sha256"]:
        kept = ", though its modification time is the same" if stat.st_mtime_ns == record["mtime_ns"] else ""
        found.problem(path, f"its content changed after the stage {stage} read it (as {record['name']}){kept}: "
                            f"{_short(record['sha256'])} -> {_short(now)}",
                      f"Put the old file back, or run --stage {stage} --force with the new one")


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
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
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
