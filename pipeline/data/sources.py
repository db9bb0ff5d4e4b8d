"""Where documents come from: the files of each source, and the units they are read in."""

from __future__ import annotations

import glob
import os
import shlex
import sysconfig
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import filterfalse, pairwise
from operator import itemgetter
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, TypedDict

from drover.pipeline.config.data import (
    COMPRESSIONS,
    FilesSource,
    HubSource,
    ShardConfig,
    Source,
    StdlibSource,
    TokenSource,
    converter,
    file_format,
)
from drover.pipeline.config.shipped import name_of
from drover.pipeline.core.background import ordered_map
from drover.pipeline.core.console import first
from drover.pipeline.core.errors import AbsentInputError, UserError, all_problems, listed, refusals
from drover.pipeline.core.files import Record
from drover.pipeline.core.folders import matches, once
from drover.pipeline.data.filters.base import Filter
from drover.pipeline.data.filters.classifier import FastText
from drover.pipeline.data.readers import FORMATS, divisible
from drover.pipeline.data.streams import Piece, name_as_text
from drover.pipeline.storage.object_files import InputFile, ObjectFile, find
from drover.pipeline.storage.store import is_url

if TYPE_CHECKING:
    from drover.pipeline.config.tree import Config
    from drover.pipeline.contract.manifest import ListedFile

NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
UNDIVIDED_UP_TO = 2
"""A file of up to so many times shard_mb is read in one piece."""
LEAST_PART = 1 << 23
"""Parts of files are not made smaller, however small shards are; larger ones begin at multiples of it."""
EXAMPLE_UNITS = 1000
"""So many units of a source, from the first on, keep examples: those of a million units would fill the memory."""


def input_files(config: Config) -> list[tuple[str, InputFile]]:
    """All files that the sources read, as (`<source>/<path below the source's common folder>`, path or object).

    A dataset of the Hub has none.

    Raises:
        AbsentInputError: naming all that cannot be read: globs without a match, folders that are closed, unknown
            formats, objects that cannot be listed.
    """
    result: list[tuple[str, InputFile]] = []
    problems: dict[str, list[str]] = {}
    for source in config.shard.sources:
        paths, wrong = _paths(source)
        named = named_files(source.name, paths)
        assert len(dict(named)) == len(named), f"two files have one name in {source.name}"
        if wrong:
            problems[source.name] = wrong
        result += named
    _refuse(problems, "The sources of the corpus cannot all be read", result)
    return result


def _refuse(problems: dict[str, list[str]], title: str, files: list[Any]) -> None:
    """AbsentInputError if sources have problems. files: those that can be read."""
    if every := [problem for wrong in problems.values() for problem in wrong]:
        raise AbsentInputError(all_problems(every, title, len(every)), files, set(problems))


def reading_units(config: ShardConfig, files: Sequence[ListedFile]) -> list[Record]:
    """The corpus cut into pieces of work, in order: payloads for `drover.pipeline.data.reading.stage_unit`.

    A unit is a run of whole files of one source with about `shard_mb` together, a part of about that size (and at least
    `LEAST_PART`) of a file that is more than twice as large, or a dataset of `kind: hf`. The cut depends on the files'
    names, sizes and formats alone, never on who reads them; no file is opened for it.

    A payload has `name`, `source`, `max_document_mb` and `pieces`, each the fields of a `Piece`; a dataset has none.
    With filters it has `examples`, too, for the first EXAMPLE_UNITS of a source.

    files: their records (`inputs.listed_files`), those of a source sorted by name.
    """
    of_source: dict[str, list[Piece]] = defaultdict(list)
    for file in files:
        of_source[file["name"].partition("/")[0]].append(Piece(**file, start=0, stop=file["bytes"]))
    units: list[Record] = []
    for source in config.sources:
        pieces = of_source[source.name]
        groups = [[]] if isinstance(source, HubSource) else _groups(pieces, source, config.shard_mb * 1e6)
        settings = source.model_dump(mode="json")
        for index, group in enumerate(groups):
            units.append({"name": f"{source.name}-{index:05d}", "source": settings,
                          "max_document_mb": config.max_document_mb, "pieces": [vars(piece) for piece in group]})
            if config.filters and index < EXAMPLE_UNITS:
                units[-1]["examples"] = config.dropped_examples
    return units


def _paths(source: Source) -> tuple[Sequence[InputFile], list[str]]:
    """The files of one source, and what is wrong with it as sentences."""
    if isinstance(source, StdlibSource):
        return _stdlib_paths(), []
    if isinstance(source, HubSource):
        return [], [f"source {source.name}: {source.dataset} is a path of this machine. Read its files with `kind: "
                    f"files`, as paths: [{source.dataset}/**/*.parquet]."] if Path(source.dataset).exists() or \
            source.dataset.startswith(("/", ".", "~")) else []
    files, problems = matching(source.name, source.paths, source.exclude)
    if any(isinstance(path, ObjectFile) for path in files) and any(isinstance(path, Path) for path in files):
        problems.append(f"source {source.name}: `paths` has files of this machine and objects of a store, which no "
                        f"common folder holds. Make two sources of it.")
        files = [path for path in files if isinstance(path, Path)]
    unknown = [_pure(path) for path in files if file_format(_pure(path), source.format) is None]
    if office := sorted(path.name for path in unknown if converter(path)):
        problems.append(f"source {source.name}: {len(office):,} files are those of office programs or notebooks "
                        f"({first(office)}). Convert them to text, as by `{converter(PurePath(office[0]))}`, or narrow "
                        f"`paths`.")
    if endings := sorted(path.name for path in unknown if not converter(path)):
        problems.append(f"source {source.name}: the names of {len(endings)} files ({first(endings)}) "
                        f"do not show their format. Set `format`, narrow "
                        f"`paths`, or use the endings .{', .'.join(FORMATS)}, each also with "
                        f"{' or '.join(COMPRESSIONS)}.")
    return files, problems


def _stdlib_paths() -> list[Path]:
    result: list[Path] = []
    for folder, inside, names in os.walk(sysconfig.get_path("stdlib")):
        inside[:] = set(inside) - NOT_STDLIB  # not walked: installed packages may have tens of thousands of folders
        result += [path for name in names if name.endswith(".py") and (path := Path(folder, name)).is_file()]
    return result


def matching(name: str, patterns: Sequence[str], exclude: Sequence[str] = ()) -> tuple[list[InputFile], list[str]]:
    """The files and objects that paths, globs and URLs of a source name, and what is wrong with these as sentences."""
    result: dict[InputFile, None] = {}
    problems = []
    excluded = {match for pattern in exclude for match in (
        find(pattern) if is_url(pattern) else matches(_without_dots(Path(pattern).absolute())))}
    for objects in ordered_map(_objects, filter(is_url, patterns)):
        if isinstance(objects, UserError):
            problems.append(f"source {name}: {objects}")
        else:
            result.update(dict.fromkeys(found for found in objects if found not in excluded))
    for pattern in filterfalse(is_url, patterns):
        full = _without_dots(Path(pattern).absolute())
        # A name with [ or ] in it that exists is meant literally.
        closed = list[OSError]()
        matched = [full] if full.is_file() else matches(full, closed.append)
        there = [path for path in matched if path not in excluded]
        problems += [f"source {name}: the folder {error.filename} cannot be read: {error.strerror}. Make it "
                     f"readable, or name it in `exclude`." for error in closed
                     if isinstance(error, PermissionError) and Path(error.filename) not in excluded]
        files = [path for path in there if path.is_file()]
        if broken := [path.name for path in there if path.is_symlink() and not path.exists()]:
            problems.append(f"source {name}: {len(broken):,} links that match {pattern} lead to no file "
                            f"({first(sorted(broken))}). Fetch what they name (`git annex get`, `dvc pull`), or remove "
                            f"them.")
        elif not files and (there or not matched):
            problems.append(f"source {name}: {pattern} is a folder. Name the files in it (`drover init "
                            f"{shlex.quote(pattern)}` shows how), as in {PurePath(pattern)}/**/*.ENDING."
                            if full.is_dir() else
                            f"source {name}: no file matches {pattern} (looked for {full}). Correct `paths`.")
        result.update(dict.fromkeys(files))
    own = once(path for path in result if isinstance(path, Path))
    return [*own, *(path for path in result if not isinstance(path, Path))], problems


def _objects(url: str) -> list[ObjectFile] | UserError:
    try:
        return find(url)
    except UserError as error:
        return error


def _without_dots(path: Path) -> Path:
    """An absolute path or glob without `..`, so that a file has one name however it is written; of symbolic links only
    those that a `..` leads out of are followed."""
    made = Path(path.anchor)
    for part in path.parts[1:]:
        if part != ".." or made.name == ".." or glob.has_magic(made.name):
            made /= part
        else:
            made = (made.resolve() if made.is_symlink() else made).parent
    return made


def _pure(path: InputFile) -> PurePath:
    return path.place if isinstance(path, ObjectFile) else path


def named_files(source: str, paths: Sequence[InputFile]) -> list[tuple[str, InputFile]]:
    """Names that do not depend on where the files lie: relative to the folder that holds them all."""
    if not paths:
        return []
    common = os.path.commonpath([_pure(path).parent for path in paths])
    return sorted(((f"{source}/{name_as_text(_pure(path).relative_to(common).as_posix())}", path) for path in paths),
                  key=itemgetter(0))


def _groups(files: Sequence[Piece], source: FilesSource | StdlibSource, size: float) -> list[list[Piece]]:
    """Runs of whole files of at least `size` bytes each, but for the last before a file in parts; those alone."""
    groups: list[list[Piece]] = []
    held = size
    part_size = max(size, LEAST_PART)
    for file in files:
        large = file.bytes > UNDIVIDED_UP_TO * part_size
        if large and isinstance(source, FilesSource) and divisible(PurePath(file.path), source):
            groups += [[part] for part in parts(file, part_size)]
            held = size
            continue
        if held >= size:
            groups.append([])
            held = 0
        groups[-1].append(file)
        held += file.bytes
    return groups


def parts(file: Piece, size: float) -> list[Piece]:
    """A file in parts of about `size` bytes."""
    count = max(2, round(file.bytes / size))
    step = LEAST_PART if file.bytes // count >= LEAST_PART else 1
    borders = [file.bytes * number // count // step * step for number in range(count)] + [file.bytes]
    return [replace(file, start=start, stop=stop)
            for start, stop in pairwise(borders)]


FILTER_FILES = "filters"
"""What the names of filters' files begin with."""


def filter_files(config: Config) -> list[tuple[str, InputFile]]:
    """The files that filters read, as (`filters/<name of the filter>/<name of the file>`, path).

    A name goes back to the folder that holds all files of the filter.

    Raises:
        AbsentInputError: naming all that are not there.
    """
    result: list[tuple[str, InputFile]] = []
    problems = []
    for own in config.shard.filters:
        try:
            paths = [path.absolute() for path in own.reads()] if isinstance(own, Filter) else []
        except UserError as error:
            problems.append(str(error))
            continue
        problems += [f"the filter {name_of(own)} needs {path}, which is not there. Put it there, or correct its path."
                     for path in paths if not path.is_file()]
        there = [path for path in dict.fromkeys(paths) if path.is_file()]
        result += named_files(f"{FILTER_FILES}/{name_of(own)}", there)
    if result and FILTER_FILES in config.shard.source_names:
        raise UserError(f"A source of shard.sources is called {FILTER_FILES}, which the files of filters are called "
                        f"too. Give it another `name`.")
    if problems:
        raise AbsentInputError(listed(problems), result, {FILTER_FILES})
    return result


def label_problems(config: Config) -> list[str]:
    """Labels that filters name and their models do not have, as sentences."""
    return refusals(*(own.open for own in config.shard.filters if isinstance(own, FastText)))


TOKEN_PART = 1 << 25
"""Bytes of a file that a task reads, about; so many that it makes a token shard of the usual size."""
TOKEN_ENDINGS = (".bin", ".npy", ".ds", ".parquet", ".arrow")
BESIDE = {".bin": (".idx",), ".ds": (".ds.index", ".ds.metadata")}
"""Endings of the files that belong to one, in place of its own."""


def token_files(config: Config) -> list[tuple[str, Path]]:
    """All files that the sources of tokens read, as (`<source>/<split>/<path below their common folder>`, path).

    Raises:
        AbsentInputError: naming all that cannot be read.
    """
    result = list[tuple[str, Path]]()
    problems = dict[str, list[str]]()
    for source in config.encode.sources:
        for split, patterns, exclude in (("train", source.paths, source.validation_paths),
                                         ("validation", source.validation_paths, [])):
            matched, wrong = matching(source.name, patterns, exclude)
            paths = [path for path in matched if isinstance(path, Path)]
            companions = {other for path in paths for other in beside(path)}
            if strange := sorted(path.name for path in {*paths} - companions if path.suffix not in TOKEN_ENDINGS):
                wrong.append(f"source {source.name}: the names of {len(strange):,} files do not show their format, "
                             f"such as {strange[0]}. Narrow the paths, or use the endings {', '.join(TOKEN_ENDINGS)}.")
            if wrong:
                problems.setdefault(source.name, []).extend(wrong)
            result += named_files(f"{source.name}/{split}", sorted({*paths, *companions}))  # type: ignore[arg-type]
    _refuse(problems, "The files of tokens cannot all be read", result)
    return result


def beside(path: Path) -> list[Path]:
    """The files that belong to one and are there."""
    return [other for ending in BESIDE.get(path.suffix, ()) if (other := path.with_suffix(ending)).is_file()]


def token_problems(config: Config) -> list[str]:
    """Why files of tokens cannot be used, by their headers, indexes and sizes."""
    return refusals(*(partial(_refuse_damaged, path) for _, path in token_files(config)))


def _refuse_damaged(path: Path) -> None:
    from drover.pipeline.data.token_files import read_tokens

    if path.suffix in (".bin", ".npy", ".parquet"):
        [*read_tokens(path, 0, 0, "uint8", "", [])]  # whatever the type of ids is, which is not known yet


class TokenUnit(TypedDict):
    """A part of a file of tokens: a name of its own, the split of its documents, the share of them that is moved to the
    validation set, settings of its source, and the fields of a `Piece` of it and of each file that belongs to it."""

    name: str
    split: str
    validation_share: float
    source: Record
    piece: Record
    beside: list[Record]


def token_units(sources: Sequence[TokenSource], files: Sequence[ListedFile]) -> list[TokenUnit]:
    """The files cut into parts, in order."""
    units = list[TokenUnit]()
    for source in sources:
        pieces = {file["path"]: Piece(**file, start=0, stop=file["bytes"]) for file in files
                  if file["name"].startswith(f"{source.name}/")}
        settings = source.model_dump(include={"name", "dtype", "column", "separators"})
        share = 0 if source.validation_paths else source.validation_share
        own = [(file, part) for file in pieces.values() if Path(file.path).suffix in TOKEN_ENDINGS
               for part in (parts(file, TOKEN_PART) if file.bytes > 2 * TOKEN_PART else [file])]
        for number, (file, part) in enumerate(own):
            units.append(TokenUnit(
                name=f"{source.name}-{number:05d}", split=file.file.partition("/")[0], validation_share=share,
                source=settings, piece=vars(part),
                beside=[vars(pieces[str(path)]) for path in beside(Path(file.path))]))
    return units
