"""What a stage needs until it is committed: removed after the manifest is there, so that no kill costs it again.

What is to go is noted before the manifest is written. Where a kill comes between, whoever finds the stage done removes
it; a stage that begins again uses what is there.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from drover.pipeline.files import read_json, write_json

SCRATCH = "scratch.json"


def note_scratch(folder: Path, paths: Iterable[Path]) -> None:
    """These files and folders of the stage in `folder` are to go once it is committed."""
    write_json(folder / SCRATCH, sorted(path.relative_to(folder).as_posix() for path in paths))


def keep_scratch(folder: Path) -> None:
    """Nothing is to go: the stage begins (again)."""
    (folder / SCRATCH).unlink(missing_ok=True)


def remove_scratch(folder: Path) -> list[str]:
    """Remove what was noted, of a stage that is committed; the names of what there was. OSError if that fails."""
    try:
        noted = [folder / name for name in read_json(folder / SCRATCH)]
    except (OSError, ValueError, TypeError):
        return []
    removed = []
    for path in noted:
        if folder.resolve() not in path.resolve().parents or not os.path.lexists(path):
            continue
        removed.append(path.name)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    with suppress(FileNotFoundError):  # another found it as well
        (folder / SCRATCH).unlink()
    return removed
