"""Checks that a job executes what was submitted, and that nobody else could have written it.

    python -I trust.py check SPEC SHA256          for the job's script: prints the folder of the code to run
    python -I trust.py node JSON COMMAND...       for a task of a step: becomes the command, with values of the spec

Slurm keeps a job's script. Everything else is read from the run folder at every start: the job's spec, the
configuration and the copy of the code. The script compares the hash of this file and runs it before anything else. The
script contains the spec's hash, and the spec the hashes of code and configuration. This file imports only the standard
library.

Jobs run from a copy of the code on their node, in a folder that only their user can write. The copy comes from an
archive that was compared after it had been copied. Later changes of the run folder do not reach it, and thousands of
ranks import from local disks.

Owners may be the user and root. A group may write if it is the user's own (named like the user, without other members)
or `launch.trusted_group`; others must not. This holds for every folder above the run too, as in sshd's StrictModes:
anyone who can write there can replace the run. A sticky bit (as on /tmp) prevents that.
"""

from __future__ import annotations

import errno
import fcntl
import grp
import hashlib
import json
import os
import pwd
import shlex
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from zipfile import ZipFile

CACHE = "__pycache__"
CODE = ("code", "code_sha256", "trusted_group", "check_owners", "contained")
"""Fields of a job's spec that say which code runs and who may own it."""
LARGEST = 1 << 29
"""The most bytes that a file of a job has."""
SHOWN = 5
UNUSED_S = 30 * 24 * 3600
"""A node's copy that was not used for so long (in seconds) is removed when a new one is made."""
REFUSED = 2
"""Exit status of a refusal, which another try would repeat."""
OWN = ("code", "launch", "launch/jobs", "logs", "logs/slurm")
"""Folders of a run from which jobs execute files, or into which somebody could put such files."""
_AGAIN = ("Nothing was started. If you changed it, submit the same command again, which takes a new copy. If not, find "
          "out who did.")


def check_submission(spec: Path, spec_sha256: str) -> tuple[Path, list[str]]:
    """The folder of the code to run, and why the job must not start (empty if it may).

    Args:
        spec: file of the job's spec, in `launch/jobs/` of the run. It has the hash `spec_sha256`.
    """
    try:
        text = _content(spec)
        values = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        return spec, [f"{spec}, the job's spec, cannot be read ({error}). Submit the same command again."]
    if hashlib.sha256(text).hexdigest() != spec_sha256:
        return spec, [f"{spec}, the job's spec, changed after the submission. {_AGAIN}"]
    files = {Path(path): sha256 for path, sha256 in values["files"].items()}
    found = [f"{path} changed after the submission. {_AGAIN}" for path, sha256 in files.items()
             if _sha256(path) != sha256]
    if values["check_owners"]:
        run = spec.absolute().parents[2]
        found += owner_problems([*folders_of(run), spec, run / "launch" / "chain.json", *files],
                                values["trusted_group"], [run, *files])
    return (spec, found) if found else usable_code(values)


def usable_code(values: Mapping[str, Any]) -> tuple[Path, list[str]]:
    """The folder from which a job's code runs, and why it must not run (empty if it may).

    It is a copy on this node; or the copy in the run folder, if the node has no room, and in containers, which may not
    see the node's folders.

    Args:
        values: of the job's spec, those that are named in `CODE`.
    """
    code, content = Path(values["code"]), values["code_sha256"]
    other = f"{archive_of(code)}, the copy of the code, changed after the submission or is missing. {_AGAIN}"
    if not values["contained"]:
        try:
            return local_copy(code, content), []
        except ValueError:
            return code, [other]
        except OSError as error:
            print(f"note: the code runs from {code}, because it cannot be copied to this node: {error}",
                  file=sys.stderr, flush=True)
    if values["check_owners"] and (found := owner_problems([code, *_below(code)], values["trusted_group"])):
        return code, found
    if _sha256(archive_of(code)) != content:
        return code, [other]
    changed = changed_files(code)
    return code, [f"The code in {code} changed after the submission: {_listed(changed)}. {_AGAIN}"] * bool(changed)


def local_copy(code: Path, content: str) -> Path:
    """The copy of the code on this node, compared with the archive once for all tasks of a step.

    Raises:
        ValueError: the archive does not have the hash `content`.
        OSError: it cannot be copied.
    """
    final = private_folder(node_folder()) / f"code-{content[:16]}"
    compared, archive = final.with_suffix(".compared"), archive_of(final)
    step = " ".join(os.environ.get(f"SLURM_{name}", "") for name in ("JOB_ID", "RESTART_COUNT", "STEP_ID"))
    with open(final.with_suffix(".lock"), "a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        if "SLURM_STEP_ID" in os.environ and compared.exists() and compared.read_text() == step and final.is_dir():
            return final
        if _sha256(archive) != content:
            shutil.copyfile(archive_of(code), archive)
            if _sha256(archive) != content:
                raise ValueError("other code")
        if changed_files(final):
            unpack(final)
            for old in final.parent.glob("code-*.compared"):
                if old != compared and time.time() - old.stat().st_mtime > UNUSED_S:
                    shutil.rmtree(old.with_suffix(""), ignore_errors=True)
                    archive_of(old.with_suffix("")).unlink(missing_ok=True)
                    old.unlink()
        compared.write_text(step)
    return final


def archive_of(code: Path) -> Path:
    """The archive of a copy of the code, in the same folder."""
    return code.with_name(f"{code.name}.zip")


def unpack(code: Path) -> None:
    """Replace a copy of the code by the content of its archive."""
    shutil.rmtree(code, ignore_errors=True)
    with ZipFile(archive_of(code)) as archive:
        archive.extractall(code)


def changed_files(code: Path) -> list[str]:
    """Files of a copy of the code that differ from its archive, are missing, or are not in it. Links count as changes,
    Python's caches do not."""
    there = {path.relative_to(code).as_posix(): path for path in _below(code)
             if path.is_symlink() or (path.is_file() and CACHE not in path.parts)}
    with ZipFile(archive_of(code)) as archive:
        names = {*archive.namelist()}
        return sorted({*names ^ there.keys(), *(name for name in names & there.keys() if there[name].is_symlink()
                                                or there[name].read_bytes() != archive.read(name))})


def folders_of(run: Path) -> list[Path]:
    """The folders of a run whose owners matter."""
    return [run, *(run / name for name in OWN)]


def owner_problems(paths: Iterable[Path], trusted_group: str | None, above: Iterable[Path] = ()) -> list[str]:
    """Sentences, with what to do, about those of the paths, and of the folders above those in `above`, that others own
    or may write. Missing paths do not count."""
    found: dict[str, list[Path]] = {}
    parents = _above(above)
    for path in dict.fromkeys([*paths, *parents]):
        with suppress(FileNotFoundError):
            status = path.lstat()
            if path in parents and status.st_mode & stat.S_ISVTX and status.st_uid in (os.getuid(), 0):
                continue  # others may add files to a sticky folder, but not replace any
            if why := _problem(path, status, trusted_group):
                found.setdefault(why, []).append(path)
    return [f"{_listed(several)} {why}{_way(several, why)}" for why, several in found.items()]


def node_folder() -> Path:
    """The folder of what jobs execute on this node: the code, and the output of compilers."""
    return Path(tempfile.gettempdir()) / f"drover-{os.getuid()}"


def private_folder(path: Path) -> Path:
    """Make a folder that nobody else can read or write, or use an existing one.

    Raises:
        OSError: it is no folder; or (PermissionError) it is another user's, or another user may write there or above.
    """
    path.mkdir(mode=0o700, exist_ok=True)
    if problems := owner_problems([path], None, [path]):
        raise PermissionError(problems[0].partition(". ")[0])
    path.chmod(0o700)  # so far others could at most read
    return path


def _problem(path: Path, status: os.stat_result, trusted: str | None) -> str:
    if status.st_uid not in (os.getuid(), 0) and not _is_member(status.st_uid, trusted):
        return f"belongs to the user {_name(pwd.getpwuid, status.st_uid)}"
    if stat.S_ISLNK(status.st_mode):  # a link to a run folder elsewhere, which has no mode of its own
        return _problem(path, path.stat(), trusted)
    mode, group = stat.S_IMODE(status.st_mode), _name(grp.getgrgid, status.st_gid)
    if mode & 0o002:
        return f"may be written by everyone (mode {mode:04o})"
    if mode & 0o020 and group != trusted and not _is_private(status.st_gid):
        return f"may be written by the group {group} (mode {mode:04o})"
    return ""


def _way(paths: list[Path], why: str) -> str:
    names = " ".join(shlex.quote(str(path)) for path in paths[:SHOWN]) + (" ..." if len(paths) > SHOWN else "")
    group = "" if "everyone" in why else "; launch.trusted_group names a group that may write there"
    what = f"Use a run folder of your own (name, runs_dir), or `chown {_name(pwd.getpwuid, os.getuid())} {names}`" \
        if why.startswith("belongs") else f"Look at it, then `chmod go-w {names}`"
    return (f", and jobs execute files there or below. {what}{group}. If the file system does not show true owners and "
            f"modes, set launch.check_owners=false.")


def _listed(names: Sequence[Path | str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(map(str, names[:SHOWN])) + more


def _content(path: Path) -> bytes:
    """The bytes of a regular file; OSError for anything else, and for more than a job's files have: somebody else may
    have put a pipe or an endless file there."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode) or state.st_size > LARGEST:
            raise OSError(errno.EINVAL, f"it is no regular file of at most {LARGEST:,} bytes", str(path))
        return file.read()


def _sha256(path: Path) -> str:
    """Hash of a file; empty if it cannot be read."""
    try:
        return hashlib.sha256(_content(path)).hexdigest()
    except OSError:
        return ""


def _above(paths: Iterable[Path]) -> dict[Path, None]:
    """The folders through which paths are reached, including those of links on the way."""
    pending, seen = [path.absolute() for path in paths], set[Path]()
    for path in pending:  # the list grows meanwhile
        for place in (path, *path.parents):
            if place not in seen and place.is_symlink():
                pending.append(place.parent / place.readlink())
            seen.add(place)
    return dict.fromkeys(place for path in pending for place in path.parents)


def _below(folder: Path) -> list[Path]:
    """Everything in a folder, without following links."""
    return [Path(root, name) for root, folders, names in os.walk(folder) for name in sorted(folders + names)]


def group_exists(name: str) -> bool:
    """Whether there is a group of this name."""
    return _entry(grp.getgrnam, name) is not None


def _entry(look_up: Callable[[Any], Any], key: str | int) -> Any:
    """The system's entry of a user or group, its name first; None if there is none."""
    try:
        return look_up(key)
    except KeyError:
        return None


def _name(look_up: Callable[[Any], Any], number: int) -> str:
    return str((_entry(look_up, number) or [number])[0])


def _is_member(user: int, group: str | None) -> bool:
    there, entry = _entry(grp.getgrnam, group or ""), _entry(pwd.getpwuid, user)
    return bool(there and entry) and (entry.pw_gid == there.gr_gid or entry.pw_name in there.gr_mem)


def _is_private(group: int) -> bool:
    """Whether a group is the user's own: named like the user, without other members."""
    there, user = _entry(grp.getgrgid, group), _entry(pwd.getpwuid, os.getuid())
    return bool(there and user) and group == user.pw_gid and there.gr_name == user.pw_name and \
        set(there.gr_mem) <= {user.pw_name}


def main(arguments: list[str]) -> int:
    """Refuse a job or a task whose files are not trustworthy; otherwise print the folder, or become the command."""
    mode, what, *rest = arguments
    folder, found = check_submission(Path(what), rest[0]) if mode == "check" else usable_code(json.loads(what))
    for problem in found:
        print(f"refused: {problem}", file=sys.stderr, flush=True)
    if found:
        return REFUSED
    if mode == "check":
        print(folder)
        return 0
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)[1:]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *inherited])
    os.execvp(rest[0], rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
