"""The checks of a verification: each reads one thing, in a process of its own, and says what it found."""

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

NOT_SEALED = "notes that carry no seal: only seen to be readable"
TORN = "torn at its end, as a kill leaves it; sound up to there"
WENT = "went while the run was looked at"
GONE = "not there any more, which is no problem: what was made of it is checked by itself"
Record = dict[str, Any]


@dataclass(frozen=True)
class Problem:
    """A file that is not what it should be: what is wrong with it, and what to do."""

    file: str
    what: str
    do: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what}. {self.do}."


class Recorded(NamedTuple):
    """A file of a folder, what is recorded of it (path, bytes, sha256), and what to do if it is something else."""

    folder: Path
    record: Record
    do: str

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / str(self.record["path"])


@dataclass
class Findings:
    """What checks found.

    Attributes:
        problems: in the order of the checks.
        files, bytes: that were read and compared with what is recorded of them.
        notes: files by what is to be known of them, such as that nothing records their content; no problems.
    """

    problems: list[Problem] = field(default_factory=list)
    files: int = 0
    bytes: int = 0
    notes: dict[str, list[str]] = field(default_factory=dict)

    def problem(self, file: Path | str, what: str, do: str) -> None:
        """Something is wrong with a file."""
        self.problems.append(Problem(str(file), what, do))

    def note(self, note: str, *files: Path | str) -> None:
        """Something to be known of files that is no problem."""
        self.notes.setdefault(note, []).extend(map(str, files))

    def add(self, found: Findings) -> None:
        """Take in what another check found."""
        self.problems += found.problems
        self.files += found.files
        self.bytes += found.bytes
        for note, files in found.notes.items():
            self.note(note, *files)

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        return asdict(self)

    def compare(self, file: Recorded, *, hashed: bool = True) -> str:
        """Compare a file's size, and its hash, with its record: "" as it should be, else "size" or "content"."""
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
        function: told where to note what it finds, and the arguments.
        arguments: the files among them, paths or `Recorded`, are those that it reads.
        passing: a run at work may remove them meanwhile.
        counted: whether they are read, and not only looked at.
    """

    function: Callable[..., None]
    arguments: tuple[Any, ...]
    passing: bool = False
    counted: bool = True

    @property
    def files(self) -> list[Path]:
        """What it reads."""
        return [one.path if isinstance(one, Recorded) else one for one in self.arguments
                if isinstance(one, Recorded | Path)]

    def __call__(self) -> Findings:
        """Do it. What goes wrong in it is a problem of what it reads, and ends no other."""
        found = Findings()
        try:
            self.function(found, *self.arguments)
            sizes = [path.stat().st_size for path in self.files if self.counted and path.is_file()]
            found.files, found.bytes = len(sizes), sum(sizes)
        except Exception as error:  # noqa: BLE001 - a damaged file may upset any library; it is named
            of = getattr(error, "filename", None)
            for file in [of] if isinstance(of, str) else self.files:
                found.problem(file, f"it cannot be read ({type(error).__name__}: {error})",
                              "Look at the disk, and put a sound file there")
        if self.passing and found.problems and (gone := [path for path in self.files if not path.exists()]):
            found = Findings()
            found.note(WENT, *gone)
        return found


def check_file(found: Findings, file: Recorded) -> None:
    """A file by its record."""
    found.compare(file)


def check_size(found: Findings, file: Recorded) -> None:
    """Only the size, of a shard that the sample leaves out."""
    found.compare(file, hashed=False)


def check_shard(found: Findings, text: Recorded | None, tokens: Recorded | None, vocabulary: Record | None) -> None:
    """A text shard, the token shard made of it, or both, each against the other. vocabulary: the tokenizer's record,
    without which tokens are only hashed."""
    made = None
    if tokens is not None:
        state = found.compare(tokens)
        if vocabulary is not None and state != "size":
            for what in token_problems(tokens.path, tokens.record, vocabulary, mapped=not state):
                found.problem(tokens.path, what, tokens.do)
        if text is not None and not state:
            made = TokenShard(tokens.path, tokens.record)
            if (before := tokens.record["input_sha256"]) != (now := text.record["sha256"]):
                found.problem(tokens.path, f"it was made of another state of {text.record['path']} (sha256 "
                                           f"{before[:12]}, not {now[:12]})", "Run --stage encode --force")
    if text is not None and (state := found.compare(text)) != "size":
        own, other = text_problems(text.folder, text.record, None if state else made)
        for what in own:
            found.problem(text.path, what, text.do)
        for what in other if tokens else ():
            found.problem(tokens.path, what, tokens.do)  # type: ignore[union-attr]


def check_source(found: Findings, path: Path, record: Record, stage: str) -> None:
    """A file from outside of the run, by the hash that was made while the stage read it."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        found.note(GONE, path)
        return
    if (now := content_hash(path, record["sha256"])) != record["sha256"]:
        kept = ", though it has the same time" if stat.st_mtime_ns == record["mtime_ns"] else ""
        found.problem(path, f"it has other content than when the stage {stage} read it (as {record['name']}){kept}: "
                            f"{_short(record['sha256'])} -> {_short(now)}",
                      f"Put back what was there, or run --stage {stage} --force, which takes what is there now")


def check_seal(found: Findings, path: Path, do: str, required: bool = False) -> None:
    """A record that is sealed with the hash of its own bytes; of a note that is not, whether it is JSON at all."""
    seal = seal_of(path)
    if seal == "damaged":
        found.problem(path, "it is not what was written: its seal does not fit its bytes", do)
    elif seal == "not sealed" and required:
        found.problem(path, "its seal is gone: it was cut or edited", do)
    elif seal == "not sealed":
        try:
            found.note(NOT_SEALED, path)
            if path.suffix == ".json":
                read_json(path)
        except ValueError as error:
            found.problem(path, f"it is no JSON ({error})", do)


def check_ledger(found: Findings, path: Path, do: str) -> None:
    """A ledger of finished tasks, whose lines are sealed one by one; a kill leaves the last one of a start torn."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if sealing(line) != "sealed" and re.search(rb'"seal": ".{64}|[0-9a-f]{64}', line[-90:]):
                found.problem(path, f"line {number} is not what was written: its seal does not fit", do)


def check_plan(found: Findings, path: Path) -> None:
    """A packing's plan of a shard."""
    if not is_sound(path):
        found.problem(path, "it was torn or changed", "Delete it: training makes it anew")


def check_tensorboard(found: Findings, path: Path) -> None:
    """A file of TensorBoard's: each of its records carries checksums."""
    if find_spec("tensorboard") is None:
        found.note("curves that are not read, since the package tensorboard is not installed", path)
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
            found.problem(path, f"a record of it is not what was written ({error})",
                          "Delete it; the curves are in train/metrics.jsonl too")


def _short(digest: str) -> str:
    kind, _, value = digest.rpartition(":")
    return f"{kind or 'sha256'} {value[:12]}"
