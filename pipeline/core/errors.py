"""Errors for users: the one exception that the user can fix, and messages about missing packages."""

from __future__ import annotations

import difflib
import errno
import os
import re
import traceback
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

EXTRAS = {"lm_eval": "eval", "deepspeed": "deepspeed", "submitit": "slurm", "datasets": "hub",
          "tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "rensa": "clean", "ftfy": "clean",
          "fasttext": "clean", "obstore": "objects", "torchao": "fp8",
          **dict.fromkeys(("resiliparse", "fastwarc", "trafilatura", "pypdfium2"), "web")}
"""The extra in pyproject.toml that installs an optional module."""
REPOSITORY = Path(__file__).resolve().parents[2]
"""The folder with `pipeline`, `model` and the others."""
CHECKOUT = (REPOSITORY / "pyproject.toml").is_file()
"""Whether this is a checkout, in which pip installs Drover's requirements and nothing from the index."""


class UserError(Exception):
    """An error that the user can fix. The message says in one paragraph what is wrong, where, and what to do.

    The stage and launcher entry points print it without a traceback and exit with status 2. Every other exception is a
    defect of Drover and keeps its traceback.
    """

    exit_status = 2


class UnusableInputError(UserError):
    """A stage cannot use what it has read, and running it again does not help: text or settings have to change.

    A stage that ends with it may be started with other settings without --force, although its finished units are then
    lost. Any other UserError allows this only if no unit is finished.
    """


class OtherVersionError(UserError):
    """A record was written by another version of Drover."""


class NotRehearsedError(UserError):
    """A step could not be simulated, which does not show whether it can be run."""


def meant(name: str, known: Iterable[str], otherwise: str = "", setting: str = "") -> str:
    """`did you mean 'x'?` with the known name that is most similar to an unknown one, in any case of letters;
    `otherwise` if none is similar. setting: what stands before it on the command line, with `=`."""
    written = {one.lower(): one for one in known}
    close = difflib.get_close_matches(name.lower(), written, n=1, cutoff=0.5)
    return f"did you mean '{setting}{written[close[0]]}'?" if close else otherwise


def raised_at(error: BaseException) -> str:
    """Where an error was raised, as `file.py:20`, or "". For errors in the user's own code, which are shown without a
    traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


class AbsentInputError(UserError):
    """Inputs that the configuration names are missing.

    existing: the (name, path) pairs of those that exist. sources: the sources of the missing ones: the part of their
    names before the first `/`.
    """

    def __init__(self, text: str, existing: Sequence[tuple[str, Any]], sources: set[str]) -> None:
        super().__init__(text)
        self.existing, self.sources = existing, sources


def refusals(*calls: Callable[[], Any]) -> list[str]:
    """The messages of the calls that raise a UserError."""
    result = list[str]()
    for call in calls:
        try:
            call()
        except UserError as error:
            result.append(str(error))
    return result


def all_results(*calls: Callable[[], Any]) -> list[Any]:
    """The results of calls; the messages of all that fail, as one UserError."""
    results, errors = [], list[UserError]()
    for call in calls:
        try:
            results.append(call())
        except UserError as error:
            errors.append(error)
    if len(errors) > 1:
        raise UserError("\n".join(map(str, errors)))
    if errors:
        raise errors[0]
    return results


LEAST_SECRET = 6
"""Shorter values of the environment are not treated as secrets: they could be ordinary words."""
_SECRET = re.compile("KEY|TOKEN|PASSWORD|PASSWD|SECRET|CREDENTIAL|SAS|SIGNATURE", re.IGNORECASE)
_PATHS = ("_FILE", "_APPLICATION_CREDENTIALS")
"""Endings of variables that hold a file's path, which messages have to show."""
_CREDENTIALS_IN_ADDRESS = re.compile(r"(://)[^\s/@]+@")


def without_secrets(text: str) -> str:
    """A library's message, safe to log: without values of environment variables whose names mark them as secret, and
    without users and passwords in addresses."""
    for name, value in os.environ.items():
        if len(value) >= LEAST_SECRET and _SECRET.search(name) and not name.endswith(_PATHS):
            text = text.replace(value, f"<{name}>")
    return _CREDENTIALS_IN_ADDRESS.sub(r"\1<...>@", text)


def is_full_disk(error: BaseException) -> bool:
    """Whether an error, or one that caused it, means that a disk, quota or file size limit is exhausted.

    Libraries in other languages (safetensors, sentencepiece, Arrow) report this in the message only. numpy's OSError
    has no errno; its message only compares the requested with the written size.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return True
        # The second: of `tempfile`, after it could write nowhere.
        if isinstance(cause, OSError) and re.search(r"^\d+ requested and \d+ written$|No usable temporary directory",
                                                    str(cause)):
            return True
        if any(os.strerror(number) in str(cause) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def listed(problems: Sequence[str]) -> str:
    """Several problems as one block of text, one per line."""
    return problems[0] if len(problems) == 1 else "\n".join(f"  - {problem}" for problem in problems)


def all_problems(problems: Sequence[str], heading: str, shown: int = 10) -> str:
    """Problems for the user: the only one, or `heading`, the first few, and the number of the others."""
    if len(problems) == 1:
        return problems[0]
    more = f"\n... and {len(problems) - shown:,} more" if len(problems) > shown else ""
    return f"{heading}:\n{listed(problems[:shown])}{more}"


def install(module: str) -> str:
    """The command that installs a module."""
    extra = EXTRAS.get(module)
    if extra is None:
        return f"`pip install {module}`"
    if CHECKOUT:
        return f"`pip install --editable '.[{extra}]'` in the checkout"
    return f"`pip install 'drover-lm[{extra}]'`"


def installed_version(package: str) -> str | None:
    """Version of a package, without importing it; None if it is not installed."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def absent(wanted: str, module: str, instead: str = "") -> list[str]:
    """A sentence if the module that `wanted` needs is not installed; an empty list otherwise."""
    if find_spec(module) is not None:
        return []
    return [f"{wanted} needs the package {module}, which is not installed here: {install(module)} installs it."
            f"{instead and f' Or {instead}.'}"]


def require(wanted: str, module: str, instead: str = "") -> None:
    """UserError if a needed module is not installed."""
    for problem in absent(wanted, module, instead):
        raise UserError(problem)
