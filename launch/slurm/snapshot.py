"""The code that jobs run: a copy of the checkout as it was at submission, in the run folder.

Jobs start hours after they were submitted and are restarted for weeks; what is edited in the checkout meanwhile must
not reach them. A copy is named by its content, so submitting the same code again makes none.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from pathlib import Path

from pipeline.errors import UserError
from pipeline.files import sha256_file, sync, write_json, write_text
from pipeline.stages import REPOSITORY, SNAPSHOT
from pipeline.state import now

CODE = Path("code")
PATCH = "changes.patch"
PARTS = ("launch", "model", "pipeline", "tools", "configs", "pyproject.toml", "constraints.txt")
"""What jobs need of the checkout; tests, docs and everything else stay behind."""


def take_snapshot(run_folder: Path, repository: Path = REPOSITORY) -> Path:
    """Copy the code into `code/<commit>-<content>/` of the run folder, whole or not at all; returns that folder.

    Besides the files it holds `snapshot.json` (commit, whether the checkout had changes) and, if it had,
    `changes.patch`: what was on top of the commit.

    Raises:
        UserError: the copy is not what was read; somebody was editing.
    """
    files = code_files(repository)
    content, commit, final = _identify(run_folder, repository, files)
    patch = _git(repository, "diff", "HEAD", "--", *PARTS) if commit else ""
    if (final / SNAPSHOT).is_file():
        return final
    temporary = final.with_name(f"{final.name}.{platform.node()}-{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    for name in files:
        target = temporary / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(repository / name, target)
    if _content(temporary, files) != content:
        shutil.rmtree(temporary)
        raise UserError(f"Files in {repository} changed while they were being copied for the jobs. Nothing was "
                        f"submitted; save what you edit and submit again.")
    if patch:
        write_text(temporary / PATCH, patch)
    write_json(temporary / SNAPSHOT, {"commit": commit, "changed": bool(patch) or _has_new_files(repository, files),
                                      "content": content, "made": now(), "from": str(repository)})
    shutil.rmtree(final, ignore_errors=True)  # without its record: a copy that was being removed
    temporary.rename(final)
    sync(final.parent)
    return final


def planned_snapshot(run_folder: Path, repository: Path = REPOSITORY) -> Path:
    """Where `take_snapshot` would put its copy; writes nothing."""
    return _identify(run_folder, repository, code_files(repository))[2]


def code_files(repository: Path) -> list[Path]:
    """The files that jobs need, relative to the repository, sorted: what git knows or does not ignore; outside of git,
    everything but caches."""
    listing = _git(repository, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *PARTS)
    if listing:
        found = {Path(name) for name in listing.split("\0") if name}
    else:
        found = {path.relative_to(repository) for part in PARTS
                 for path in [repository / part, *(repository / part).rglob("*")]}
    return sorted(path for path in found
                  if (repository / path).is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc")


def _identify(run_folder: Path, repository: Path, files: list[Path]) -> tuple[str, str, Path]:
    """Hash of the content, commit, and the copy's folder."""
    content, commit = _content(repository, files), _git(repository, "rev-parse", "HEAD").strip()
    return content, commit, run_folder.absolute() / CODE / f"{commit[:10] or 'unversioned'}-{content[:10]}"


def _content(folder: Path, files: list[Path]) -> str:
    digest = hashlib.sha256()
    for name in files:
        digest.update(f"{name.as_posix()}\0{sha256_file(folder / name)}\n".encode())
    return digest.hexdigest()


def _has_new_files(repository: Path, files: list[Path]) -> bool:
    known = set(_git(repository, "ls-files", "-z", "--cached", "--", *PARTS).split("\0"))
    return any(path.as_posix() not in known for path in files)


def _git(repository: Path, *arguments: str) -> str:
    """What git answers; empty where there is no git, no repository, or the folder is another one's."""
    try:
        top = _run(repository, "rev-parse", "--show-toplevel").strip()
        return _run(repository, *arguments) if Path(top).resolve() == repository.resolve() else ""
    except (OSError, subprocess.SubprocessError):
        return ""


def _run(repository: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, text=True, check=True,
                          timeout=60, errors="replace").stdout
