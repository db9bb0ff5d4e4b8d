"""The code that jobs run: a copy of the checkout as it was at submission, in the run folder.

Jobs start hours after they were submitted and are restarted for weeks; what is edited in the checkout meanwhile must
not reach them. A copy is named by its content, so submitting the same code again makes none.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

from drover.launch.credentials import files_with_secrets
from drover.launch.slurm.trust import code_problems, digest
from drover.pipeline.contract.stages import REPOSITORY, SNAPSHOT
from drover.pipeline.contract.state import now
from drover.pipeline.errors import UserError, listed
from drover.pipeline.files import publish, sha256_file, write_json

CODE = Path("code")
PACKAGE = "drover"
PARTS = (PACKAGE, "__init__.py", "launch", "model", "pipeline", "tools", "configs")
"""What jobs need of the checkout, or of an installed package; tests, docs and everything else stay behind."""


def take_snapshot(run_folder: Path, repository: Path = REPOSITORY) -> Path:
    """Copy the code into `code/<commit>-<content>/` of the run folder, whole or not at all; returns that folder.

    `drover/` in it holds the files, as in an installed package. Beside that lies `snapshot.json`: the commit, and
    whether the checkout had changes.

    Raises:
        UserError: a file holds a secret; or the copy is not what was read, since somebody was editing.
    """
    files, commit, final = _look(run_folder, repository)
    # What is copied into a run folder is read by whoever may read the run.
    sources = {_in_copy(name): name for name in _files(repository)}
    if found := [f"{name} holds {what}" for name, what in files_with_secrets(repository, sources.values()).items()]:
        raise UserError(f"Jobs get a copy of the code, and it would hold secrets:\n{listed(found)}\nNothing was "
                        f"submitted. Move them out of {repository}, or into a file that git ignores; variables reach "
                        f"the jobs through launch.secrets.")
    content = digest(files)
    if (final / SNAPSHOT).is_file() and not code_problems(final, content, None, owners=False):
        return final
    temporary = final.with_name(f"{final.name}.{platform.node()}-{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    for name, source in sources.items():
        target = temporary / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(repository / source, target)
        target.chmod(target.stat().st_mode & ~0o022)  # who may edit the checkout need not write what jobs run
    if {name: sha256_file(temporary / name) for name in files} != files:
        shutil.rmtree(temporary)
        raise UserError(f"Files in {repository} changed while they were being copied for the jobs. Nothing was "
                        f"submitted; save what you edit and submit again.")
    changed = bool(commit and _git(repository, "status", "--porcelain", "--", *PARTS))
    write_json(temporary / SNAPSHOT, {"commit": commit, "changed": changed, "content": content, "made": now(),
                                      "from": str(repository), "files": files})
    shutil.rmtree(final, ignore_errors=True)  # a copy that was being removed, or that somebody changed
    publish(temporary, final)
    return final


def planned_snapshot(run_folder: Path, repository: Path = REPOSITORY) -> tuple[Path, str]:
    """Where `take_snapshot` would put its copy, and the hash of its content; writes nothing."""
    files, _, final = _look(run_folder, repository)
    return final, digest(files)


def _look(run_folder: Path, repository: Path) -> tuple[dict[str, str], str, Path]:
    """The hashes of the files that jobs need, by their names in the copy; the commit, and the folder of the copy."""
    files = {_in_copy(name): sha256_file(repository / name) for name in _files(repository)}
    commit = _git(repository, "rev-parse", "HEAD").strip()
    name = f"{commit[:10] or 'unversioned'}-{digest(files)[:10]}"
    return files, commit, run_folder.absolute() / CODE / name


def _files(repository: Path) -> list[Path]:
    """The files that jobs need, in order: what git knows or does not ignore; outside of git, everything but caches."""
    listing = _git(repository, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *PARTS)
    found = map(Path, filter(None, listing.split("\0"))) if listing else (
        path.relative_to(repository) for part in PARTS for path in [repository / part, *(repository / part).rglob("*")])
    return [name for name in sorted(set(found)) if (repository / name).is_file() and "__pycache__" not in name.parts
            and name.suffix != ".pyc"]


def _in_copy(name: Path) -> str:
    return name.as_posix() if name.parts[0] == PACKAGE else f"{PACKAGE}/{name.as_posix()}"


def _git(repository: Path, *arguments: str) -> str:
    """What git answers; empty where there is no git, or the folder is no repository (but perhaps within one)."""
    within = {**os.environ, "GIT_CEILING_DIRECTORIES": str(repository.resolve().parent)}
    try:
        return subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, text=True, check=True,
                              timeout=60, errors="replace", env=within).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
