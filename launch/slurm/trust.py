"""Whether what a job executes from its run folder is what was submitted, and nobody else could have written it.

    python -I trust.py SPEC SHA256

Slurm keeps a job's script; all the rest is read from the run folder at every start: the job's spec, submitit's pickle,
the copy of the code. The script compares the hash of this file and runs it before anything else; the spec's hash stands
in the script, and that of the code in the spec. It imports nothing but the standard library.

Owners may be the user and root. The group may write where it is the user's own (named like the user, with nobody else
in it) or `launch.trusted_group`; others never.
"""

from __future__ import annotations

import grp
import hashlib
import json
import os
import pwd
import shlex
import stat
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

SNAPSHOT, PATCH, CACHE = "snapshot.json", "changes.patch", "__pycache__"
"""What a copy of the code holds besides the files that its hash is of."""
SHOWN = 5
OWN = ("code", "launch", "launch/jobs", "logs", "logs/slurm")
"""Folders of a run from which something is executed, or in which a file could be put that is."""


def submission_problems(run: Path, spec: Path, spec_sha256: str, pickle: str = "") -> list[str]:
    """Why a job must not start; empty if it may.

    Args:
        run: the run's folder.
        spec: the job's spec, whose hash is to be `spec_sha256`.
        pickle: name of submitit's file in `logs/slurm`, which may be there already.
    """
    try:
        values = json.loads(spec.read_bytes())
        content = content_of(values)
    except (OSError, ValueError, RecursionError) as error:
        return [f"{spec}, what the job has to do, cannot be read ({error}). Submit the same command again."]
    if content != spec_sha256:
        return [f"{spec}, what the job has to do, is not what was submitted. {_AGAIN}"]
    found: list[str] = []
    if values["check_owners"]:
        launch = run / "launch"
        found = owner_problems([*folders_of(run), spec, launch / "chain.json", *launch.glob("config-*.yaml"),
                                run / "logs" / "slurm" / pickle], values["trusted_group"])
    return found or code_problems(Path(values["code"]), values["code_sha256"], values["trusted_group"],
                                  owners=values["check_owners"])


def folders_of(run: Path) -> list[Path]:
    """The folders of a run whose owners matter."""
    return [run, *(run / name for name in OWN)]


def code_problems(code: Path, content: str, trusted_group: str | None, *, owners: bool = True) -> list[str]:
    """Why the copy of the code must not be run: others own or may write some of it, or it is not the one with this
    hash."""
    try:
        entries = [code, *_below(code)]
        if links := [path for path in entries if path.is_symlink()]:
            return [f"{_listed(links)} is a link, and the copy of the code that was submitted has none. {_AGAIN}"]
        if owners and (found := owner_problems(entries, trusted_group)):
            return found
        files = {path.relative_to(code).as_posix(): path for path in entries
                 if path.is_file() and CACHE not in path.parts and path not in (code / SNAPSHOT, code / PATCH)}
        hashes = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    except OSError as error:
        return [f"The copy of the code in {code} cannot be read ({error}). {_AGAIN}"]
    if digest(hashes) == content:
        return []
    return [f"The code in {code} is not what was submitted{_changed(code, hashes, content)}. {_AGAIN}"]


def owner_problems(paths: list[Path], trusted_group: str | None) -> list[str]:
    """Which of the paths others own or may write, in sentences with what to do; those that are absent do not count."""
    trusted, found = _group(trusted_group), dict[str, list[Path]]()
    for path in paths:
        with suppress(FileNotFoundError):
            if why := _problem(path, path.lstat(), trusted):
                found.setdefault(why, []).append(path)
    return [f"{_listed(several)} {why}{_way(several, why)}" for why, several in found.items()]


def content_of(values: dict[str, Any]) -> str:
    """Hex sha256 of a JSON object in canonical form, as `pipeline.files.sha256_json`."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def digest(hashes: dict[str, str]) -> str:
    """Hex sha256 of a set of files, from their names and hashes."""
    total = hashlib.sha256()
    for name in sorted(hashes, key=lambda name: name.split("/")):
        total.update(f"{name}\0{hashes[name]}\n".encode())
    return total.hexdigest()


def private_folder(path: Path) -> Path:
    """Make a folder that nobody else can read or write, or take one that is such already.

    Raises:
        PermissionError: it is somebody else's, somebody else may write it, or it is a link.
    """
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    why = "is a link" if stat.S_ISLNK(status.st_mode) else "is no folder" if not stat.S_ISDIR(status.st_mode) else \
        f"belongs to {_user(status.st_uid)}" if status.st_uid != os.getuid() else \
        f"may be written by others (mode {stat.S_IMODE(status.st_mode):04o})" if status.st_mode & 0o022 else ""
    if why:
        raise PermissionError(f"{path} {why}, and code that is compiled is run from there")
    if status.st_mode & 0o077:  # others could read, no more
        path.chmod(0o700)
    return path


_AGAIN = ("Nothing was started. If it was you who changed it, submit the same command again, which copies what there "
          "is now; if not, look who did.")


def _problem(path: Path, status: os.stat_result, trusted: int | None) -> str:
    if status.st_uid not in (os.getuid(), 0) and not _is_member(status.st_uid, trusted):
        return f"belongs to {_user(status.st_uid)}"
    if stat.S_ISLNK(status.st_mode):  # a run folder may be kept elsewhere; a link has no mode of its own
        return _problem(path, path.stat(), trusted)
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o002:
        return f"may be written by everybody (mode {mode:04o})"
    if mode & 0o020 and status.st_gid != trusted and not _is_private(status.st_gid):
        return f"may be written by the group {_group_name(status.st_gid)} (mode {mode:04o})"
    return ""


def _way(paths: list[Path], why: str) -> str:
    names = " ".join(shlex.quote(str(path)) for path in paths[:SHOWN]) + (" ..." if len(paths) > SHOWN else "")
    group = "launch.trusted_group names a group that may write there" if "everybody" not in why else ""
    what = f"Use a run folder of your own (name, runs_dir), or `chown {_own_name()} {names}`" \
        if why.startswith("belongs") else f"Look at it, then `chmod go-w {names}`"
    return (f", and jobs execute what is there. {what}{f'; {group}' if group else ''}. Where the file system does not "
            f"show true owners and modes, set launch.check_owners=false.")


def _listed(paths: list[Path]) -> str:
    more = f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
    return ", ".join(map(str, paths[:SHOWN])) + more


def _changed(code: Path, hashes: dict[str, str], content: str) -> str:
    """Which files differ, where the record of the copy is that of the submission."""
    try:
        before = json.loads((code / SNAPSHOT).read_bytes())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    if not isinstance(before, dict) or digest(before) != content:
        return ""
    parts = [(word, sorted(names)) for word, names in (
        ("changed", [name for name in before if name in hashes and hashes[name] != before[name]]),
        ("gone", before.keys() - hashes.keys()), ("new", hashes.keys() - before.keys())) if names]
    return " (" + "; ".join(f"{word}: {', '.join(names[:SHOWN])}{' ...' if len(names) > SHOWN else ''}"
                            for word, names in parts) + ")"


def _below(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        yield path
        if path.is_dir() and not path.is_symlink():
            yield from _below(path)


def group_exists(name: str) -> bool:
    """Whether there is a group of this name."""
    return _group(name) is not None


def _group(name: str | None) -> int | None:
    if name is None:
        return None
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return None


def _is_member(user: int, group: int | None) -> bool:
    if group is None:
        return False
    try:
        entry = pwd.getpwuid(user)
        return entry.pw_gid == group or entry.pw_name in grp.getgrgid(group).gr_mem
    except KeyError:
        return False


def _is_private(group: int) -> bool:
    """Whether a group is the user's own: of the user's name, with nobody else in it."""
    try:
        entry, user = grp.getgrgid(group), pwd.getpwuid(os.getuid())
    except KeyError:
        return False
    return group == user.pw_gid and entry.gr_name == user.pw_name and set(entry.gr_mem) <= {user.pw_name}


def _user(number: int) -> str:
    try:
        return f"the user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"the user {number}"


def _own_name() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _group_name(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


def main(arguments: list[str]) -> int:
    """Refuse a job whose files are not to be trusted."""
    spec, spec_sha256 = Path(arguments[0]), arguments[1]
    array, element = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{element}" if array and element else os.environ.get("SLURM_JOB_ID", "")
    found = submission_problems(spec.parents[2], spec, spec_sha256, f"{job}_submitted.pkl")
    for problem in found:
        print(f"refused: {problem}", flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
