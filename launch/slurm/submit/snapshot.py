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

from launch.credentials import files_with_secrets, known_form
from launch.slurm.trust import code_problems, digest
from pipeline.contract.stages import REPOSITORY, SNAPSHOT
from pipeline.contract.state import now
from pipeline.errors import UserError, listed
from pipeline.files import sha256_file, sync, write_json, write_text

CODE = Path("code")
PATCH = "changes.patch"
PARTS = ("launch", "model", "pipeline", "tools", "configs", "pyproject.toml", "constraints.txt")
"""What jobs need of the checkout; tests, docs and everything else stay behind."""


def take_snapshot(run_folder: Path, repository: Path = REPOSITORY) -> Path:
    """Copy the code into `code/<commit>-<content>/` of the run folder, whole or not at all; returns that folder.

    Besides the files it holds `snapshot.json` (commit, whether the checkout had changes) and, if it had,
    `changes.patch`: what was on top of the commit.

    Raises:
        UserError: a file holds a secret; or the copy is not what was read, since somebody was editing.
    """
    files = code_files(repository)
    hashes, commit, final = _identify(run_folder, repository, files)
    content = digest(hashes)
    patch = _git(repository, "diff", "HEAD", "--", *PARTS) if commit else ""
    known = {*_git(repository, "ls-files", "-z", "--cached", "--", *PARTS).split("\0")}
    _refuse_secrets(repository, files, patch)
    if (final / SNAPSHOT).is_file() and not code_problems(final, content, None, owners=False):
        return final
    temporary = final.with_name(f"{final.name}.{platform.node()}-{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    for name in files:
        target = temporary / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(repository / name, target)
        target.chmod(target.stat().st_mode & ~0o022)  # who may edit the checkout need not write what jobs run
    if _hashes(temporary, files) != hashes:
        shutil.rmtree(temporary)
        raise UserError(f"Files in {repository} changed while they were being copied for the jobs. Nothing was "
                        f"submitted; save what you edit and submit again.")
    if patch:
        write_text(temporary / PATCH, patch)
    write_json(temporary / SNAPSHOT, {"commit": commit, "changed": bool(patch) or not {*hashes} <= known,
                                      "content": content, "made": now(), "from": str(repository), "files": hashes})
    shutil.rmtree(final, ignore_errors=True)  # a copy that was being removed, or that somebody changed
    temporary.rename(final)
    sync(final.parent)
    return final


def _refuse_secrets(repository: Path, files: list[Path], patch: str) -> None:
    """What is copied into a run folder is read by whoever may read the run."""
    found = [f"{name} holds {what}" for name, what in files_with_secrets(repository, files).items()]
    if not found and (what := known_form(patch)):
        found = [f"what you changed since the last commit (git diff HEAD) holds or takes out {what}: commit the change"]
    if found:
        raise UserError(f"Jobs get a copy of the code, and it would hold secrets:\n{listed(found)}\nNothing was "
                        f"submitted. Move them out of {repository}, or into a file that git ignores; variables reach "
                        f"the jobs through launch.secrets.")


def planned_snapshot(run_folder: Path, repository: Path = REPOSITORY) -> tuple[Path, str]:
    """Where `take_snapshot` would put its copy, and the hash of its content; writes nothing."""
    hashes, _, final = _identify(run_folder, repository, code_files(repository))
    return final, digest(hashes)


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


def _identify(run_folder: Path, repository: Path, files: list[Path]) -> tuple[dict[str, str], str, Path]:
    """Hashes of the files, commit, and the copy's folder."""
    hashes, commit = _hashes(repository, files), _git(repository, "rev-parse", "HEAD").strip()
    return hashes, commit, run_folder.absolute() / CODE / f"{commit[:10] or 'unversioned'}-{digest(hashes)[:10]}"


def _hashes(folder: Path, files: list[Path]) -> dict[str, str]:
    return {name.as_posix(): sha256_file(folder / name) for name in files}


def _git(repository: Path, *arguments: str) -> str:
    """What git answers; empty where there is no git, no repository, or the folder is another one's."""
    try:
        top, answer = (subprocess.run(["git", "-C", str(repository), *words], capture_output=True, text=True,
                                      check=True, timeout=60, errors="replace").stdout
                       for words in (("rev-parse", "--show-toplevel"), arguments))
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer if Path(top.strip()).resolve() == repository.resolve() else ""
