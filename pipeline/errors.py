"""The one exception that a user is meant to read."""

from __future__ import annotations


class UserError(Exception):
    """Something the user can mend: says what is wrong, where, and what to do, in one paragraph.

    The stage and launcher entry points print it without a traceback and exit with status 2.
    Every other exception is a defect of Drover and keeps its traceback.
    """

    exit_status = 2


def listed(problems: list[str]) -> str:
    """Several problems as one block of text, one a line, so that all of them are reported at once."""
    return problems[0] if len(problems) == 1 else "\n".join(f"  - {problem}" for problem in problems)
