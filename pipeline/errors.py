"""The one exception that a user is meant to read."""

from __future__ import annotations

import errno
import os


class UserError(Exception):
    """Something the user can mend: says what is wrong, where, and what to do, in one paragraph.

    The stage and launcher entry points print it without a traceback and exit with status 2.
    Every other exception is a defect of Drover and keeps its traceback.
    """

    exit_status = 2


def is_full_disk(error: BaseException) -> bool:
    """Whether an error, or one that led to it, says that a disk, quota or file size limit is exhausted.

    Libraries in other languages (safetensors, sentencepiece, Arrow) tell it in their message only.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return True
        if any(os.strerror(number) in str(cause) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def listed(problems: list[str]) -> str:
    """Several problems as one block of text, one a line, so that all of them are reported at once."""
    return problems[0] if len(problems) == 1 else "\n".join(f"  - {problem}" for problem in problems)
