"""Folders and globs: what lies in a folder, where symbolic links lead to each folder once."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable
from pathlib import Path

Refuse = Callable[[OSError], object]


def matches(pattern: Path, refuse: Refuse = lambda error: None) -> list[Path]:
    """What an absolute glob matches, in which `**` enters each folder once. refuse: see `folders_below`."""
    head, *rest = _between_crossings(pattern)
    matched = glob.glob(head)  # noqa: PTH207 - absolute
    fixed = next(parent for parent in pattern.parents if not glob.has_magic(str(parent))).resolve()
    for part in rest:
        matched = [match for folder in folders_below(matched, (fixed, *fixed.parents), refuse=refuse)
                 for match in glob.glob(f"{glob.escape(folder)}/{part}")]  # noqa: PTH207
    return [Path(path) for path in dict.fromkeys(matched)]


def files_below(folder: Path, refuse: Refuse = lambda error: None) -> list[Path]:
    """All that lies in a folder and is no folder itself, without what is hidden; broken links, too."""
    return [path for path in matches(Path(glob.escape(str(folder.absolute()))) / "**", refuse)
            if not path.is_dir()]


def once(paths: Iterable[Path]) -> list[Path]:
    """Files without those that are in the same folder under the same name, to which a link leads. Of several paths to
    one file the first that goes through no link is kept, or the first."""
    paths = list(paths)
    identities = {folder: _identity(folder) for folder in {path.parent for path in paths}}
    if len(set(identities.values())) == len(identities):
        return paths
    paths.sort(key=lambda path: (path.parent != path.parent.resolve(), path))
    return list({(identities[path.parent], path.name): path for path in reversed(paths)}.values())


def _between_crossings(pattern: Path) -> list[str]:
    """The globs before, between and after the `**` of a glob."""
    parts, own = list[str](), Path(pattern.anchor)
    for part in pattern.parts[1:]:
        if part == "**":
            parts.append(str(own))
            own = Path()
        else:
            own /= part
    return [*parts, "*" if parts and own == Path() else str(own)]


def folders_below(tops: Iterable[str], above: Iterable[Path] = (), *, hidden: bool = False,
                  refuse: Refuse = lambda error: None) -> list[str]:
    """Folders and all folders in them, each once.

    Of several ways to one folder, that without a link is taken, else the first by fewest links and name. A link to a
    folder of `above`, which holds all of `tops`, is not followed: it would lead to them again, and out of them.

    hidden: with hidden ones. refuse: called with the error of a folder that cannot be read, but for `lost+found`, which
    belongs to the disk.
    """
    tops = sorted(tops)
    entered = {_identity(folder) for folder in above} - {_identity(top) for top in tops} - {None}
    folders = list[str]()
    while tops:
        links = list[str]()
        for top in tops:
            inside = [top]
            while inside:
                folder = inside.pop()
                if (identity := _identity(folder)) in entered:
                    continue
                try:
                    with os.scandir(folder) as entries:
                        for entry in sorted(entries, key=lambda entry: entry.name, reverse=True):
                            if entry.name.startswith(".") and not hidden:
                                continue
                            if entry.is_dir(follow_symlinks=False):
                                inside.append(entry.path)
                            elif entry.is_symlink() and Path(entry.path).is_dir():
                                links.append(entry.path)
                except OSError as error:
                    if Path(folder).name != "lost+found":
                        refuse(error)
                    continue
                entered.add(identity)
                folders.append(folder)
        tops = sorted(links)
    return folders


def _identity(folder: Path | str) -> tuple[int, int] | None:
    """Device and inode of a folder; None if it cannot be looked at."""
    try:
        stat = Path(folder).stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino
