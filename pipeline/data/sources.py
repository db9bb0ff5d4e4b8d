"""Where documents come from: the files of each source, the units they are read in, and their documents in order."""

from __future__ import annotations

import errno
import glob
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from pipeline.config.data import FilesSource, HubSource, ShardConfig, Source, StdlibSource
from pipeline.config.tree import Config
from pipeline.data.documents import Document, Rejection, plain, to_json
from pipeline.data.readers import (
    FORMATS,
    PlainText,
    Records,
    Unreadable,
    damage,
    file_format,
    file_records,
    python_records,
)
from pipeline.data.streams import COMPRESSIONS, name_as_text
from pipeline.errors import AbsentInputError, UserError, listed

NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}
TEST_FOLDERS = {"test", "tests", "idle_test"}
Item = tuple[Document, bytes] | Rejection
"""A document and its JSON, or why there is none."""


def input_files(config: Config) -> list[tuple[str, Path]]:
    """All files that the sources read, as (`<source>/<path below the source's common folder>`, path).

    A dataset from the Hub has none.

    Raises:
        AbsentInputError: naming every file or glob that matches nothing and every file of no known format.
    """
    found: list[tuple[str, Path]] = []
    problems: dict[str, list[str]] = {}
    for source in config.shard.sources:
        paths, wrong = _paths(source)
        named = _named(source.name, paths)
        twice = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
        wrong += [f"source {source.name}: two files are called {name} where bytes that are not UTF-8 are written as "
                  f"\\xNN. Rename one." for name in twice]
        problems |= {source.name: wrong} if wrong else {}
        found += named
    if problems:
        told = [problem for wrong in problems.values() for problem in wrong]
        raise AbsentInputError(f"The sources of the corpus cannot all be read:\n{listed(told)}" if len(told) > 1
                           else told[0], found, set(problems))
    return found


def reading_units(config: ShardConfig, files: list[tuple[str, Path]]) -> list[tuple[str, dict[str, Any]]]:
    """The corpus cut into pieces of work, in order, as (name, payload for `unit_documents`).

    A unit is a run of files of one source with about `shard_mb` together, one larger file, or a dataset of
    `kind: hf`. The cut depends on the files alone, never on who reads them.
    """
    units: list[tuple[str, dict[str, Any]]] = []
    for source in config.sources:
        own = sorted((name, str(path)) for name, path in files if name.partition("/")[0] == source.name)
        groups = [[]] if isinstance(source, HubSource) else _groups(own, config.shard_mb * 1e6)
        units += [(f"{source.name}-{index:05d}", {"source": source.model_dump(mode="json"), "files": group})
                  for index, group in enumerate(groups)]
    return units


def unit_documents(payload: dict[str, Any]) -> Iterator[Item]:
    """The documents of one unit in order: by file name, then record number.

    Raises:
        UserError: the dataset of a `kind: hf` source cannot be loaded or read on.
    """
    source: Source = TypeAdapter(Source).validate_python(payload["source"])
    if isinstance(source, HubSource):
        yield from _hub_documents(source)
        return
    for name, path in payload["files"]:
        records = python_records(Path(path)) if isinstance(source, StdlibSource) else file_records(Path(path), source)
        yield from _file_documents(source, name.partition("/")[2], records)


def _paths(source: Source) -> tuple[list[Path], list[str]]:
    """The files of one source, and what is wrong with it as sentences."""
    if isinstance(source, StdlibSource):
        return _stdlib_paths(source), []
    if isinstance(source, HubSource):
        return _dataset_paths(source)
    return _glob_paths(source)


def _dataset_paths(source: HubSource) -> tuple[list[Path], list[str]]:
    folder = Path(source.dataset).expanduser()
    if not folder.is_dir():
        is_path = folder.exists() or source.dataset.startswith(("/", ".", "~"))
        return [], [f"source {source.name}: {source.dataset} is no folder. Give a folder of data files or the id of a "
                    f"dataset on the Hub; single files are read with `kind: files`."] if is_path else []
    paths = [path for path in folder.rglob("*")
             if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    return paths, [] if paths else [f"source {source.name}: the folder {folder} holds no files. Put data files there, "
                                    f"or correct `dataset`."]


def _stdlib_paths(source: StdlibSource) -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    left_out = NOT_STDLIB if source.include_tests else NOT_STDLIB | TEST_FOLDERS
    return [path for path in root.rglob("*.py")
            if path.is_file() and not left_out.intersection(path.relative_to(root).parts[:-1])]


def _glob_paths(source: FilesSource) -> tuple[list[Path], list[str]]:
    found: dict[Path, None] = {}
    problems = []
    for pattern in source.paths:
        full = Path(pattern).expanduser().absolute()
        # A name with [ or ] in it that exists is meant literally.
        matches = [str(full)] if full.is_file() else glob.glob(str(full), recursive=True)  # noqa: PTH207 - absolute
        files = [path for path in map(Path, matches) if path.is_file()]
        if not files:
            has_wildcard = glob.has_magic(pattern)
            problems.append(f"source {source.name}: " + (f"no file matches {pattern}" if has_wildcard else
                            _what_it_is(pattern, full)) +
                            f" ({_looked_in(full)}). Correct `paths`.")
        found.update(dict.fromkeys(files))
    endings = [path.name for path in found if file_format(path, source.format) is None]
    if endings:
        problems.append(f"source {source.name}: the names of {len(endings)} files ({', '.join(sorted(endings)[:3])}"
                        f"{' ...' if len(endings) > 3 else ''}) do not tell their format. Set `format`, narrow "
                        f"`paths`, or use the endings .{', .'.join(FORMATS)}, each also with "
                        f"{' or '.join(COMPRESSIONS)}.")
    return list(found), problems


def _looked_in(pattern: Path) -> str:
    """The folder in which an absolute path or glob was looked for, as far as it is there."""
    fixed = next(parent for parent in pattern.parents if not glob.has_magic(str(parent)))
    there = next(parent for parent in (fixed, *fixed.parents) if parent.is_dir())
    missing = "" if there == fixed else f", where there is no {fixed.relative_to(there)}"
    return f"looked in {there}{missing}"


def _what_it_is(pattern: str, path: Path) -> str:
    if path.is_dir():
        return f"{pattern} is a folder: name its files, as in {pattern.rstrip('/')}/**/*.txt"
    return f"{pattern} is not a file" if path.exists() else f"{pattern} does not exist"


def _named(source: str, paths: list[Path]) -> list[tuple[str, Path]]:
    """Names that do not depend on where the files lie: relative to the folder that holds them all."""
    if not paths:
        return []
    common = Path(os.path.commonpath([path.parent for path in paths]))
    return sorted((f"{source}/{name_as_text(path.relative_to(common).as_posix())}", path) for path in paths)


def _groups(files: list[tuple[str, str]], size: float) -> list[list[tuple[str, str]]]:
    """Runs of files of at least `size` bytes each, but for the last."""
    groups: list[list[tuple[str, str]]] = []
    held = size
    for name, path in files:
        if held >= size:
            groups.append([])
            held = 0
        groups[-1].append((name, path))
        held += Path(path).stat().st_size
    return groups


def _file_documents(source: StdlibSource | FilesSource, file: str, records: Records) -> Iterator[Item]:
    number = None
    try:
        for record in records:
            if isinstance(record, Unreadable):
                yield Rejection(source.name, file, record.number, record.reason, record.documents, record.lost)
            else:
                number = record[0]
                yield _document(source, file, *record)
    except damage() as error:
        if isinstance(error, OSError) and error.errno is not None:  # the disk or the permissions, not the data
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise UserError(f"source {source.name}: {file} cannot be read: {os.strerror(error.errno)}. Put it back or "
                            f"make it readable, and run the stage again.") from None
        after = None if number is None else number + 1
        yield Rejection(source.name, file, after, f"the file cannot be read from here on: {error}", lost=True)


def _document(source: Source, file: str, number: int | None, record: Any) -> Item:
    """A record as a document, or why it is none."""
    where = file if number is None else f"{file}:{number}"
    try:
        if isinstance(source, StdlibSource) or isinstance(record, PlainText):
            document = Document(str(record), source.name, where, {})
        else:
            document = _from_fields(source, where, record)
        return document, to_json(document)
    except UnicodeEncodeError:
        if isinstance(record, PlainText) and "\0" in record:
            return Rejection(source.name, file, number, "binary data, not text: NUL bytes and broken UTF-8")
        return Rejection(source.name, file, number, "broken UTF-8, or half of a surrogate pair; "
                         "convert the file to UTF-8 (iconv -f latin1 -t utf-8, where it is Latin-1)")
    except TypeError as error:
        return Rejection(source.name, file, number, str(error))


def _from_fields(source: FilesSource | HubSource, where: str, record: Any) -> Document:
    """The document in a record's fields; TypeError, fit for a reader's eyes, if it lacks one or is of another kind."""
    if not isinstance(record, dict):
        raise TypeError(f"the record is {_kind(record)}, not an object with fields")
    fields = [source.text_field, *([source.id_field] if source.id_field else [])]
    if missing := [field for field in fields if field not in record]:
        raise TypeError(f"no field named {', '.join(missing)}; the fields are {', '.join(map(str, record)) or 'none'}")
    text, own = record[source.text_field], record[source.id_field] if source.id_field else where
    if not isinstance(text, str):
        raise TypeError(f"the field '{source.text_field}' is {_kind(text)}, not text")
    if not isinstance(own, (str, int)):
        raise TypeError(f"the field '{source.id_field}' is {_kind(own)}, not text or a whole number")
    return Document(text, source.name, str(own), {field: plain(record.get(field)) for field in source.meta_fields})


def _kind(value: Any) -> str:
    return "null" if value is None else f"a {type(value).__name__}"


def _hub_documents(source: HubSource) -> Iterator[Item]:
    """The rows of a Hugging Face dataset; damage inside it cannot be told row by row, so it fails the stage."""
    import datasets
    datasets.disable_progress_bars()
    local = Path(source.dataset).expanduser()
    call = f"load_dataset({source.dataset!r}, {source.config_name!r}, split={source.split!r})"
    try:
        rows = datasets.load_dataset(str(local) if local.is_dir() else source.dataset, source.config_name,
                                     split=source.split, revision=source.revision, streaming=source.streaming)
        iterator = iter(islice(rows, source.limit))
    except Exception as error:
        raise _hub_error(source, f"{call} failed", error) from error
    number = 0
    while True:
        try:
            row = next(iterator, None)
        except Exception as error:
            raise _hub_error(source, f"reading broke off after {number} records of {call}", error) from error
        if row is None:
            return
        number += 1
        if number == 1 and source.text_field not in row:
            raise UserError(f"source {source.name}: the dataset {source.dataset} has no column "
                            f"'{source.text_field}'. Set text_field to one of {', '.join(row)}.")
        yield _document(source, source.split, number, row)


def _hub_error(source: HubSource, what: str, error: Exception) -> UserError:
    text = " ".join(str(error).split())
    return UserError(f"source {source.name}: {what}: {type(error).__name__}: {text[:500]}. Check the dataset's name, "
                     f"`config_name` and `split`, and the network (or HF_HUB_OFFLINE with a filled cache), and run the "
                     f"stage again; damaged local files are better read with `kind: files`, which names the broken "
                     f"records and keeps the others.")
