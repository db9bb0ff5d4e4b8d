"""Files that appear complete or not at all: written as `.tmp`, fsynced, renamed; records with their own checksum; and
records that are validated when they are read."""

from __future__ import annotations

import errno
import fcntl
import filecmp
import hashlib
import itertools
import json
import os
import platform
import re
import reprlib
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    IO,
    Annotated,
    Any,
    Literal,
    NoReturn,
    TypedDict,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from drover.pipeline.core.background import ordered_map
from drover.pipeline.core.errors import OtherVersionError, UserError

Record = dict[str, Any]
"""A JSON object: a line of a log, a manifest's record of a file, a marker."""
Make = Callable[[Any], Any]


def typed(value: Any, kind: Any) -> Any:
    """A JSON value as `kind`: a dataclass, TypedDict, list, tuple, dict, Literal, union, or one of JSON's own types.

    Numbers must be finite and fit into 64 bits. Further arguments of `Annotated` are called with the value and may
    raise ValueError. A TypedDict may have undeclared keys, a dataclass may not. ValueError, naming the place, if the
    value does not fit.
    """
    try:
        return _as(kind)(value)
    except ValueError as error:
        raise ValueError(f"it{error}" if str(error).startswith(" ") else str(error).removeprefix(".")) from None


@cache
def _as(kind: Any) -> Make:
    """The function that converts a value to `kind`. Its error messages begin with a blank if the value itself is wrong,
    and with a point if something in it is."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind in (Any, object):
        return lambda value: value
    if kind in (str, bool, NoneType):
        return lambda value: value if type(value) is kind else _refuse(value)
    if kind in (int, float):
        return lambda value: value if type(value) in (int, kind) and abs(value) < 2**63 else _refuse(value)
    if origin is Literal:
        return lambda value: value if value in inner else _refuse(value)
    if origin is Annotated:
        return _checked(_as(inner[0]), inner[1:])
    if origin in (Union, UnionType):
        return _one_of([_as(one) for one in inner])
    if origin is dict:
        return lambda value: _entries(value.items(), {}, _as(inner[1])) if type(value) is dict else _refuse(value)
    if origin is list or (origin is tuple and ... in inner):
        return _sequence(origin, _as(inner[0]))
    if origin is tuple:
        by_number = {number: _as(one) for number, one in enumerate(inner)}
        return lambda value: tuple(_entries(enumerate(value), by_number).values()) if type(value) is list and \
            len(value) == len(inner) else _refuse(value)
    return _record(kind)


def _checked(make: Make, checks: Iterable[Callable[[Any], Any]]) -> Make:
    def read(value: Any) -> Any:
        result = make(value)
        for check in checks:
            check(result)
        return result
    return read


def _one_of(makes: list[Make]) -> Make:
    def read(value: Any) -> Any:
        for make in makes:
            with suppress(ValueError):
                return make(value)
        _refuse(value)
    return read


def _sequence(kind: Any, make: Make) -> Make:
    def read(value: Any) -> Any:
        return kind(_entries(enumerate(value), {}, make).values()) if type(value) is list else _refuse(value)
    return read


def _record(kind: Any) -> Make:
    """A dataclass or TypedDict."""
    makes = {name: _as(one) for name, one in get_type_hints(kind, include_extras=True).items()}
    is_class = is_dataclass(kind)
    needed = {field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING} \
        if is_class else kind.__required_keys__

    def read(value: Any) -> Any:
        if type(value) is not dict:
            _refuse(value)
        for name in sorted(needed - value.keys()):
            raise ValueError(f" has no {name}")
        for name in sorted(value.keys() - makes.keys()) if is_class else ():
            raise ValueError(f" has {reprlib.repr(name)}, which is not known")
        result = _entries(value.items(), makes, _as(Any))
        return kind(**result) if is_class else result
    return read


def _refuse(value: Any) -> NoReturn:
    raise ValueError(f" is {reprlib.repr(value)}")


def _entries(items: Iterable[tuple[Any, Any]], makes: dict[Any, Make], otherwise: Make = _refuse
             ) -> dict[Any, Any]:
    """Convert each value by the function for its key, or else by `otherwise`."""
    result, key = {}, None
    try:
        for key, item in items:
            result[key] = makes.get(key, otherwise)(item)
    except ValueError as error:
        text = str(error)
        raise ValueError(f".{key}{text if text[:1] in ' .' else f': {text}'}") from None
    return result


def is_inside(text: str) -> None:
    """ValueError unless a relative path stays inside its folder."""
    parts = os.fsencode(text).split(b"/")
    if not parts[0] or b".." in parts or "\0" in text or max(map(len, parts)) > 255 or len(text) > 4000:
        raise ValueError(f"{text[:100]!r} is no path inside the folder")


def is_count(number: float) -> None:
    """ValueError for a negative number."""
    if number < 0:
        raise ValueError(f"{number} is below 0")


def like(kind: Any) -> Callable[[Any], Any]:
    """For `Annotated`: checks that a JSON value is of a kind (`typed`), without changing its static type."""
    return lambda value: typed(value, kind)


Inside = Annotated[str, is_inside]
Count = Annotated[int, is_count]


Kind = TypeVar("Kind")
LARGEST = 1 << 29
"""Bytes of the largest file that is read as a whole: the manifest of millions of shards."""
LONGEST = 1 << 27
"""Bytes of the longest line."""


@contextmanager
def atomic_file(path: Path, mode: str = "wb", errors: str | None = None, *,
                keep_equal: bool = False, durable: bool = True) -> Iterator[IO[Any]]:
    """Open a temporary file next to `path`; on success fsync it and rename it to `path`.

    The temporary name has host and process id. So neither an orphan of a killed run nor another node that shares the
    folder can write into our file. On any error the temporary file is removed and `path` is left as it was.

    keep_equal: do not replace `path` if it has the same content. For files that several processes write: on NFS a file
        must not be replaced while another node maps it.
    durable: without, the file may be lost in a power cut. For frequent writes, where an fsync would delay the work.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{platform.node()}-{os.getpid()}.tmp")
    try:
        with named_in_errors(path), open(temporary, mode, encoding=None if "b" in mode else "utf-8",
                                         errors=errors) as file:
            yield file
            if durable:
                flush(file)
        if keep_equal and path.is_file() and filecmp.cmp(temporary, path, shallow=False):
            temporary.unlink()
        else:
            temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


@contextmanager
def named_in_errors(path: Path) -> Iterator[None]:
    """Name the file that is being written in the OSError of a full disk, which names none."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) and error.filename is None:
            error.filename = str(path)
        raise


def opened(path: Path | str, buffering: int = -1) -> Any:
    """A regular file, open for reading. OSError for a folder, a device, a pipe or a socket: somebody else may have put
    it there, and reading it might wait for ever or never end."""
    refuse_irregular(Path(path))  # already opening a device may do something
    return open(path, "rb", buffering, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


def refuse_irregular(path: Path | int) -> os.stat_result:
    """The state of a regular file, by its path or its descriptor; OSError for anything else."""
    state = os.stat(path)  # noqa: PTH116 - of a descriptor, too
    if not stat.S_ISREG(state.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return state


def read_bytes(path: Path, most: int = LARGEST) -> bytes:
    """The content of a regular file of at most so many bytes; OSError if it cannot be read."""
    with opened(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise OSError(errno.EOVERFLOW, f"it has {size:,} bytes; at most {most:,} are read", str(path))
        return bytes(file.read(size))


def copy_file(source: Path, target: Path) -> None:
    """Copy a file's content, atomically."""
    with opened(source) as reading, atomic_file(target) as writing:
        shutil.copyfileobj(reading, writing)


def sync(path: Path) -> None:
    """Make a file's content, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush(file: IO[Any]) -> None:
    """Write a file's buffers to the disk."""
    file.flush()
    os.fsync(file.fileno())


def publish(temporary: Path, final: Path) -> None:
    """Rename a finished file or folder to its final name, durably. Raises OSError like `Path.rename`."""
    sync(temporary)
    temporary.rename(final)
    sync(final.parent)


def renamed(path: Path, name: str) -> Path:
    """Rename a file or folder to `name`, or to `name-2` and so on if that is taken; returns the new path."""
    return path.rename(next(free for number in itertools.count(1) if not os.path.lexists(
        free := path.with_name(f"{name}-{number}" if number > 1 else name))))


def lock_file(descriptor: int, *, shared: bool = False, wait: bool = False) -> bool:
    """Lock an open file or folder, or change the kind of its lock, until it is closed or the process ends.

    Returns:
        False if the file system has no locks.

    Raises:
        BlockingIOError: it is locked, unless `wait`.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise
        return False
    return True


def write_json(path: Path, value: Any, *, keep_equal: bool = False, durable: bool = True) -> None:
    """Write `value` as indented JSON, as `atomic_file` does."""
    # A lone surrogate, Python's form of a byte of a file's name that is not UTF-8, becomes \udce9: JSON's own escape.
    with atomic_file(path, "w", "backslashreplace", keep_equal=keep_equal, durable=durable) as file:
        json.dump(value, file, indent=1, ensure_ascii=False)
        file.write("\n")


def write_text(path: Path, text: str) -> None:
    """Write text as UTF-8, atomically."""
    with atomic_file(path, "w") as file:
        file.write(text)


def read_json(path: Path) -> Any:
    """The value of a JSON file. OSError if it cannot be read, ValueError if it is not JSON in UTF-8."""
    return parsed_json(read_bytes(path))


def parsed_json(data: bytes) -> Any:
    """The value of JSON in UTF-8; ValueError if it is invalid or nested too deeply."""
    try:
        return json.loads(data.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def append_line(path: Path, value: Any) -> None:
    """Append `value` as one line of JSON, in one write: several processes may append to the same file."""
    _append(path, json.dumps(value, ensure_ascii=False).encode() + b"\n")


def _append(path: Path, line: bytes, *, durable: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        torn = file.read(1) not in (b"", b"\n")
        data = (b"\n" if torn else b"") + line
        if file.write(data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        if durable:
            flush(file)


def read_lines(path: Path, kind: Any = Record, *, appended: bool = False) -> Iterator[Any]:
    """Every complete line of a JSON-lines file. A last line that a kill truncated is skipped.

    kind: the type of a line (`typed`): a TypedDict or a dataclass.
    appended: the file is written by `append_line`, which may leave truncated lines anywhere. They are skipped, and so
        is every other line that is no such record.

    Raises:
        UserError: another line is no such record, or is endless: the file is damaged.
    """
    if not path.is_file():
        return
    with opened(path) as file:
        for number, line in enumerate(bounded_lines(file), 1):
            complete = line.endswith(b"\n")
            try:
                value = typed(parsed_json(line), kind)
            except ValueError as error:
                if complete and not appended:
                    raise UserError(f"Line {number} of {path} is damaged: {error}. Take the file from a copy of the "
                                    f"run, or remove the line.") from None
                continue
            if complete:
                yield value


def bounded_lines(file: IO[bytes]) -> Iterator[bytes]:
    """The lines of a file. UserError for one that is longer than any record: a file with a hole may be larger than the
    memory."""
    for number, line in enumerate(iter(partial(file.readline, LONGEST), b""), 1):
        if len(line) == LONGEST:
            raise UserError(f"Line {number} of {file.name} is damaged: it has over {LONGEST:,} bytes. Take the "
                            f"file from a copy of the run, or remove the line.")
        yield line


def changed_ns(stat: Any) -> int:
    """Time of the last change of a file, from the result of `os.stat`: mtime or ctime, whichever is later. Setting the
    mtime back changes ctime. For an object: the number of its content."""
    return max(stat.st_mtime_ns, getattr(stat, "st_ctime_ns", 0))


def sha256_file(path: Path) -> str:
    """Hex sha256 of a regular file's bytes."""
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_json(value: Any) -> str:
    """Hex sha256 of a JSON value in canonical form (sorted keys, no spaces)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def output_record(folder: Path, path: Path, **counts: Any) -> Record:
    """A manifest's record of one output file: path inside the stage's folder, bytes, sha256, counts.

    The file is read back from the disk, so the hash is of what a reader will see.
    """
    return {"path": path.relative_to(folder).as_posix(), "bytes": path.stat().st_size,
            "sha256": sha256_file(path), **counts}


def problem_of(path: Path, record: Record, *, hashed: bool = True) -> str:
    """Why a file differs from its record, as a sentence without its full stop; "" if it does not. hashed: also compare
    the hash."""
    try:
        size = refuse_irregular(path).st_size
        digest = sha256_file(path) if hashed and size == record["bytes"] else record["sha256"]
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    if size != record["bytes"]:
        return f"{path} has {size:,} bytes instead of {record['bytes']:,}"
    return "" if digest == record["sha256"] else \
        f"{path} is not what was written: sha256 {record['sha256'][:12]} -> {digest[:12]}"


def problems_of(folder: Path, records: Iterable[Record]) -> Iterator[str]:
    """`problem_of` for each file of a folder, by size only, several at a time."""
    return ordered_map(lambda record: problem_of(folder / record["path"], record, hashed=False), records, batch=512)


class Output(TypedDict):
    """The fields that every record of an output file has."""

    path: Inside
    bytes: Count
    sha256: str


Outputs = Annotated[list[Record], like(list[Output])]


def remove_temporary(folder: Path) -> None:
    """Delete what killed writers left (files and folders `*.tmp`) under `folder`, which may be missing."""
    for path in list(folder.rglob("*.tmp")):
        remove(path, ignore_errors=True)  # an orphan may still write into a folder, which the next start removes


def remove_orphans(path: Path) -> None:
    """Delete the temporary files of `atomic_file(path)` whose writers on this machine were killed."""
    import psutil

    start = f"{path.name}.{platform.node()}-"
    for temporary in path.parent.glob(f"{path.name}.*.tmp"):
        process = temporary.name.removeprefix(start).removesuffix(".tmp")
        if process.isdecimal() and not psutil.pid_exists(int(process)):
            temporary.unlink(missing_ok=True)


def remove(path: Path, *, ignore_errors: bool = False) -> None:
    """Delete a file, a folder or a link, but not the link's target. ignore_errors: delete as much of a folder as
    possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=ignore_errors)
    else:
        path.unlink(missing_ok=True)


# Records with a checksum of their own bytes, so that a changed byte is detected (tools/verify.py). A stage's manifest
# has the hashes of the outputs, and at its end its own: `"seal"` is the sha256 of every byte before its comma (in YAML:
# its #). A checksum detects accidents, not forgery.
SEAL = "seal"
Sealed = Literal["sealed", "not sealed", "damaged"]
_SEAL = re.compile(rb'(?:, "seal": "([0-9a-f]{64})"}|# "seal": "([0-9a-f]{64})")\n\Z')
_WAS_SEAL = re.compile(rb"seal|[0-9a-f]{64}")
"""One changed byte in a checksum leaves one of the two."""
_SEAL_BYTES = 84


def write_sealed(path: Path, value: Record) -> None:
    """Write a JSON object as `write_json` does, with its checksum; an old checksum in `value` is dropped."""
    content = {key: item for key, item in value.items() if key != SEAL}
    assert content, f"{path}: an empty record is not sealed"
    with atomic_file(path) as file:
        file.write(_sealed(json.dumps(content, indent=1, ensure_ascii=False)))


def _sealed(text: str) -> bytes:
    """The text of a JSON object with its checksum."""
    content = text.removesuffix("}").rstrip("\n").encode("utf-8", "backslashreplace")
    return content + b', "seal": "' + hashlib.sha256(content).hexdigest().encode() + b'"}\n'


def sealed_text(text: str) -> str:
    """A YAML text with its checksum, as a comment."""
    return f'{text}# "seal": "{hashlib.sha256(text.encode()).hexdigest()}"\n'


def seal_of(path: Path) -> Sealed:
    """Whether a file has a checksum that matches. OSError if it cannot be read."""
    return sealing(read_bytes(path))


def sealing(data: bytes) -> Sealed:
    """The same for a file's content, or for a line with its newline."""
    end = max(0, len(data) - _SEAL_BYTES)
    if match := _SEAL.search(data, end):
        digest = hashlib.sha256(data[:match.start()]).hexdigest().encode()
        return "sealed" if digest in match.groups() else "damaged"
    return "damaged" if _WAS_SEAL.search(data, end) else "not sealed"


class Commit(TypedDict):
    """A line of a ledger."""

    task: str
    key: str
    record: Any
    at: int


class Ledger:
    """Records of finished tasks in a folder.

    Each process appends to its own file. A checksummed line commits a task; it is on the disk before `add` returns.
    Truncated and damaged lines do not count. Of several lines for one task and key the newest counts, by the writers'
    clocks; a null record cancels earlier ones.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, name: str, key: str, record: Any, *, durable: bool = True) -> None:
        """Commit a task. record: a JSON value; None cancels earlier commits. Without `durable` a power cut may lose
        it."""
        path = self.folder / f"{platform.node()}-{os.getpid()}.jsonl"
        new = durable and not path.exists()
        line = json.dumps({"task": name, "key": key, "record": record, "at": time.time_ns()})
        _append(path, _sealed(line), durable=durable)
        if new:
            sync(self.folder)
            sync(self.folder.parent)  # the folder may be new, too

    def recorded(self, keys: Mapping[str, str]) -> Record:
        """The records of the tasks that are finished under these keys."""
        return {name: record for name, key, record in self.lines() if keys.get(name) == key}

    def of_key(self, key: str) -> Record:
        """The records of all tasks that are finished under one key, by name."""
        return {name: record for name, own, record in self.lines() if own == key}

    def lines(self) -> Iterator[tuple[str, str, Any]]:
        """Name, key and record of every finished task."""
        result: dict[tuple[str, str], tuple[int, Any]] = {}
        for path in sorted(self.folder.glob("*.jsonl")):
            with suppress(FileNotFoundError), opened(path) as file:  # --force removes the folder
                for line in bounded_lines(file):
                    with suppress(ValueError):  # sealed, but no commit: it does not count
                        if sealing(line) == "sealed":
                            value = typed(parsed_json(line), Commit)
                            task = value["task"], value["key"]
                            if task not in result or result[task][0] <= value["at"]:
                                result[task] = value["at"], value["record"]
        yield from ((*task, record) for task, (_, record) in result.items() if record is not None)


def read_sealed(path: Path) -> Any:
    """As `read_json`, without the checksum, which is not verified."""
    value = read_json(path)
    if isinstance(value, dict):
        value.pop(SEAL, None)
    return value


def read_record(path: Path, kind: type[Kind], advice: str = "Make it again.", version: int | None = None
                ) -> Kind | None:
    """The record in a JSON file, without its checksum; None if there is no file.

    Args:
        kind: a dataclass or TypedDict (`typed`).
        advice: how to repair a damaged file.
        version: the value that `format` should have.

    Raises:
        UserError: the file cannot be read, or holds something else: OtherVersionError for another `format`.
    """
    try:
        value = read_sealed(path)
        if version is not None and isinstance(value, dict) and value.get("format") != version:
            raise OtherVersionError(f"{path} was written by another version of Drover (format "
                                    f"{str(value.get('format'))[:20]}, this one reads {version}). {advice}")
        result: Kind = typed(value, kind)
        return result
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}). {advice}") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}. {advice}") from None
