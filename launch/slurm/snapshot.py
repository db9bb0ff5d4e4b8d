"""The code that jobs run: a copy of the checkout at submission, in the run folder.

Jobs start hours after their submission and restart for weeks. Later edits of the checkout must not reach them. A copy
is named by its content, so that submitting the same code again makes no new one.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from drover.launch.credentials import files_with_secrets
from drover.pipeline.contract.stage_work import git
from drover.pipeline.contract.stages import REPOSITORY, SNAPSHOT
from drover.pipeline.core.errors import UserError, listed
from drover.pipeline.core.files import atomic_file, sha256_json

CODE = Path("code")
PACKAGE = "drover"
PARTS = (PACKAGE, "__init__.py", "launch", "model", "pipeline", "tools", "configs")
"""What jobs need of the checkout or of an installed package. Tests, docs and everything else are left out."""


def planned_snapshot(run_folder: Path, repository: Path = REPOSITORY) -> Path:
    """Path of the copy of the code to make: `code/<commit>-<content>/` in the run folder. Writes nothing."""
    return run_folder.absolute() / CODE / _name(_contents(repository))


def take_snapshot(code: Path, repository: Path = REPOSITORY) -> None:
    """Make the planned copy of the code.

    `drover/` in it holds the files, as in an installed package; `snapshot.json` the commit, and whether the checkout
    had changes.

    Raises:
        UserError: a file contains a secret; or the code was edited after it was planned.
    """
    # Everyone who can read the run folder can read the copy.
    if secrets := [f"{name} has {what}" for name, what in files_with_secrets(repository, _files(repository)).items()]:
        raise UserError(f"Jobs get a copy of the code, and it would contain secrets:\n{listed(secrets)}\nNothing was "
                        f"submitted. Move them out of {repository} or into a file that git ignores. To pass variables "
                        f"to the jobs, use launch.secrets.")
    contents = _contents(repository)
    if _name(contents) != code.name:
        raise UserError(f"Files in {repository} changed while they were being copied for the jobs. Nothing was "
                        f"submitted. Save your edits and submit again.")
    for name, content in contents.items():
        with atomic_file(code / name, keep_equal=True, durable=False) as file:
            file.write(content)


def _contents(repository: Path) -> dict[str, bytes]:
    """The content of each file of the copy, by its path there."""
    commit = (git(repository, "rev-parse", "HEAD") or "").strip()
    changed = bool(commit) and git(repository, "status", "--porcelain", "--", *PARTS) != ""  # also if git fails
    content = {(name if name.parts[0] == PACKAGE else PACKAGE / name).as_posix(): (repository / name).read_bytes()
               for name in _files(repository)}
    return {**content, SNAPSHOT: json.dumps({"commit": commit, "changed": changed}).encode()}


def _name(contents: dict[str, bytes]) -> str:
    commit = json.loads(contents[SNAPSHOT])["commit"][:10] or "unversioned"
    return f"{commit}-{sha256_json({name: hashlib.sha256(text).hexdigest() for name, text in contents.items()})[:10]}"


def _files(repository: Path) -> list[Path]:
    """The files that jobs need, sorted: those that git tracks or does not ignore; outside of git, all but caches."""
    listing = git(repository, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *PARTS)
    names = map(Path, filter(None, listing.split("\0"))) if listing else (
        path.relative_to(repository) for part in PARTS for path in [repository / part, *(repository / part).rglob("*")])
    return [name for name in sorted(set(names)) if (repository / name).is_file() and "__pycache__" not in name.parts
            and name.suffix != ".pyc"]
