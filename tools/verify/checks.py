"""The pieces of a verification: each reads one thing, in a process of its own, and says what it came to."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.contract.content_hash import content_hash
from pipeline.data.sampling.packing import is_sound
from pipeline.data.token_shards import TokenShard
from pipeline.files import seal_of, sha256_file
from tools.verify.findings import Found, Problem
from tools.verify.shards import text_problems, token_problems

NOT_SEALED = "not sealed: written by a version before seals, or open-ended; only seen to be readable"
TORN = "torn at its end, as a kill leaves it; sound up to there"
WENT = "went while the run was looked at"
GONE = "not there any more, which is no problem: what was made of it is checked by itself"
Record = dict[str, Any]


@dataclass(frozen=True)
class Check:
    """One piece: the function, what it is given, and whether a run at work may remove the file meanwhile."""

    function: Callable[..., Found]
    arguments: tuple[Any, ...]
    passing: bool = False

    def __call__(self) -> Found:
        """Do it. What goes wrong in it is a problem of what it reads, and ends no other."""
        try:
            found = self.function(*self.arguments)
        except Exception as error:  # noqa: BLE001 - a damaged file may upset any library; it is named
            of = getattr(error, "filename", None)
            files = [of] if isinstance(of, str) else list(map(str, self._paths()))
            found = Found(tuple(Problem(file, f"it cannot be read ({type(error).__name__}: {error})",
                                        "Look at the disk, and put a sound file there") for file in files))
        if self.passing and found.problems and (gone := [path for path in self._paths() if not path.exists()]):
            return Found(notes=tuple((WENT, str(path)) for path in gone))
        return found

    def _paths(self) -> list[Path]:
        """The files that it reads."""
        given = [argument for argument in self.arguments if argument is not None]
        sides = [argument[0] / argument[1]["path"] for argument in given if isinstance(argument, tuple)]
        if sides or isinstance(given[0], Path):
            return sides or [given[0]]
        return [Path(given[0]["path"])]


def hash_problem(path: Path, record: Record, mend: str) -> Problem | None:
    """Whether a file has the size and hash of its record."""
    try:
        size = path.stat().st_size
        found = sha256_file(path) if size == record["bytes"] else ""
    except OSError as error:
        return Problem(str(path), f"it is missing or cannot be read ({error.strerror})", mend)
    if size != record["bytes"]:
        return Problem(str(path), f"it has {size:,} bytes instead of {record['bytes']:,}", mend)
    if found != record["sha256"]:
        return Problem(str(path), f"its content was changed: sha256 {found[:12]} instead of {record['sha256'][:12]}",
                       mend)
    return None


def check_file(path: Path, record: Record, mend: str) -> Found:
    """An output by its record."""
    problem = hash_problem(path, record, mend)
    return Found((problem,) if problem else (), 1, record["bytes"])


def check_plan(path: Path) -> Found:
    """A packing's plan of a shard."""
    problems = () if is_sound(path) else (
        Problem(str(path), "it was torn or changed", "Delete it: training makes it anew"),)
    return Found(problems, 1, path.stat().st_size)


def check_size(path: Path, record: Record, mend: str) -> Found:
    """A shard that the sample leaves out: only its size."""
    try:
        size = path.stat().st_size
    except OSError as error:
        return Found((Problem(str(path), f"it is missing or cannot be read ({error.strerror})", mend),))
    return Found() if size == record["bytes"] else Found(
        (Problem(str(path), f"it has {size:,} bytes instead of {record['bytes']:,}", mend),))


def check_shard(text: tuple[Path, Record, str] | None, tokens: tuple[Path, Record, str] | None,
                vocabulary: Record | None) -> Found:
    """A text shard (stage folder, record, what mends it), the token shard made of it, or both, each against the
    other. vocabulary: the tokenizer's record, without which tokens are only hashed."""
    problems, read, files, made = list[Problem](), 0, 0, None
    if tokens is not None:
        folder, record, mend = tokens
        path, files, read = folder / record["path"], files + 1, read + record["bytes"]
        wrong = hash_problem(path, record, mend)
        if wrong:
            problems.append(wrong)
        if vocabulary is not None and (wrong is None or "content" in wrong.what):
            inside = token_problems(path, record, vocabulary, mapped=wrong is None)
            problems += [Problem(str(path), what, mend) for what in inside]
        if text is not None and wrong is None:
            made = TokenShard(path, record)
            if record["input_sha256"] != text[1]["sha256"]:
                problems.append(Problem(str(path), f"it was made of another state of {text[1]['path']} (sha256 "
                                                   f"{record['input_sha256'][:12]}, not {text[1]['sha256'][:12]})",
                                        "Run --stage encode --force"))
    if text is not None:
        folder, record, mend_text = text
        path, files, read = folder / record["path"], files + 1, read + record["bytes"]
        wrong = hash_problem(path, record, mend_text)
        own, other = ([], []) if wrong and "content" not in wrong.what else text_problems(
            folder, record, None if wrong else made)
        problems += [wrong] if wrong else []
        problems += [Problem(str(path), what, mend_text) for what in own]
        if tokens is not None and made is not None:
            problems += [Problem(str(made.path), what, tokens[2]) for what in other]
    return Found(tuple(problems), files, read)


def check_source(record: Record, stage: str) -> Found:
    """A file from outside of the run, by the hash that was made while the stage read it."""
    path = Path(record["path"])
    try:
        stat = path.stat()
    except FileNotFoundError:
        return Found(notes=((GONE, str(path)),))
    if (found := content_hash(path, record["sha256"])) == record["sha256"]:
        return Found((), 1, stat.st_size)
    kept = ", though it has the same time" if stat.st_mtime_ns == record["mtime_ns"] else ""
    return Found((Problem(
        str(path), f"it has other content than when the stage {stage} read it (as {record['name']}){kept}: "
                   f"{_short(record['sha256'])} -> {_short(found)}",
        f"Put back what was there, or run --stage {stage} --force, which takes what is there now"),), 1, stat.st_size)


def check_seal(path: Path, mend: str) -> Found:
    """A record that is sealed with the hash of its own bytes; of one that is not, whether it is JSON at all."""
    sealed = seal_of(path)
    if sealed == "damaged":
        return Found((Problem(str(path), "it is not what was written: its seal does not fit its bytes", mend),), 1)
    if sealed == "sealed":
        return Found((), 1, path.stat().st_size)
    if path.suffix == ".json":
        try:
            json.loads(path.read_bytes())
        except ValueError as error:
            return Found((Problem(str(path), f"it is no JSON ({error})", mend),), 1)
    return Found(notes=((NOT_SEALED, str(path)),))


def check_tensorboard(path: Path) -> Found:
    """A file of TensorBoard's: each of its records carries checksums."""
    from tensorboard.compat.tensorflow_stub.errors import DataLossError
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New
    reader, size = PyRecordReader_New(str(path)), path.stat().st_size
    while True:
        try:
            reader.GetNext()
        except DataLossError as error:
            if "truncated record" in str(error):
                return Found((), 1, size, ((TORN, str(path)),))
            mend = "Delete it; the curves are in train/metrics.jsonl too"
            return Found((Problem(str(path), f"a record of it is not what was written ({error})", mend),), 1, size)
        except Exception as error:
            if type(error).__name__ != "OutOfRangeError":
                raise
            return Found((), 1, size)


def _short(digest: str) -> str:
    kind, _, value = digest.rpartition(":")
    return f"{kind or 'sha256'} {value[:12]}"
