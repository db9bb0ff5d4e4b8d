"""Refuses files that another user could have written, where they would be executed.

A Slurm job executes files of the run folder, and plugins, hours after its submission. They, and all folders above them,
must belong to the user or root, and nobody else may write them: who can write a folder can replace what is in it. The
submission and each start of a job check this. A folder above may have the sticky bit, like `/tmp`. An access control
list that lets others write shows as the group's mode.
"""

from __future__ import annotations

import os
import shlex
import stat
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from drover.pipeline.core.console import first
from drover.pipeline.core.errors import UserError, listed

SHOWN = 5
OWN = ("code", "launch", "launch/submitit")
"""Folders of a run with what jobs execute. The last one has submitit's scripts and pickles."""


def refuse_foreign_files(run: Path, files: Iterable[Path] = ()) -> None:
    """Check what the jobs of a run execute.

    Args:
        run: the run folder; what does not exist yet does not count.
        files: those outside of it.

    Raises:
        UserError: others own or may write some of it; with the commands that change this.
    """
    own = [run, *(run / name for name in OWN), *(run / "code").rglob("*")]
    if problems := owner_problems([*own, *files]):
        raise UserError(f"Jobs of {run} execute files that others could change:\n{listed(problems)}\nNothing was "
                        f"started. If you trust all who can write there, or the file system does not show true owners "
                        f"and modes, set launch.check_owners=false.")


def owner_problems(paths: Iterable[Path]) -> list[str]:
    """Sentences, with what to do, about those of the paths, and of the folders and links through which they are
    reached, that others own or may write. Missing paths do not count."""
    wanted = {path.absolute() for path in paths}
    pending, seen = sorted(wanted), dict[Path, None]()
    for path in pending:  # the list grows meanwhile
        for place in (path, *path.parents):
            if place not in seen and place.is_symlink():
                pending.append(place.parent / place.readlink())
            seen[place] = None
    paths_by_problem = defaultdict[str, list[str]](list)
    for path in seen:
        with suppress(FileNotFoundError, NotADirectoryError, ValueError):  # no file has a NUL in its name
            paths_by_problem[_problem(path, above=path not in wanted)].append(str(path))
    return [f"{first(names, SHOWN)} {problem}. {_remedy(names, problem)}"
            for problem, names in paths_by_problem.items() if problem]


def node_folder() -> Path:
    """The folder of what compilers leave on this node, to be executed again."""
    return Path(tempfile.gettempdir()) / f"drover-{os.getuid()}"


def private_folder(path: Path) -> Path:
    """Make a folder that nobody else can read or write, or use an existing one.

    Raises:
        OSError: it is no folder; or (PermissionError) it is another user's, or another user may write there or above.
    """
    path.mkdir(mode=0o700, exist_ok=True)
    if problems := owner_problems([path]):
        raise PermissionError(problems[0].partition(". ")[0])
    path.chmod(0o700)  # so far others could at most read
    return path


def _problem(path: Path, *, above: bool) -> str:
    status = path.lstat()
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid not in (os.getuid(), 0):
        return f"belongs to the user {status.st_uid}"
    if stat.S_ISLNK(status.st_mode):  # it has no mode of its own
        return _problem(path.resolve(), above=above)
    if above and mode & stat.S_ISVTX:
        return ""  # others may add files there, but not replace any
    if mode & stat.S_IWOTH:
        return f"may be written by everyone (mode {mode:04o})"
    if mode & stat.S_IWGRP:
        return f"may be written by the group {status.st_gid} (mode {mode:04o})"
    return ""


def _remedy(names: list[str], problem: str) -> str:
    if problem.startswith("belongs"):
        return "Use a run folder of your own (name, runs_dir)"
    return f"Look at it, then `chmod go-w {shlex.join(names[:SHOWN])}{' ...' * (len(names) > SHOWN)}`"
