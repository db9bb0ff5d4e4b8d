"""What the command lines of the tools share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from drover.pipeline.errors import UserError, is_full_disk


def exit_status(work: Callable[[], int | None], opening: str = "", writes: Path | None = None) -> int:
    """Do the work of a command; its exit status. What the user can mend is printed.

    Args:
        opening: of the message.
        writes: the folder that is made, of which the same command continues what is begun.
    """
    try:
        return int(work() or 0)
    except UserError as error:
        print(f"{opening}{error}", file=sys.stderr)
        return error.exit_status
    except Exception as error:
        if writes is None or not is_full_disk(error):
            raise
        print(f"The disk, quota or file size limit of {writes.parent} is exhausted: {error}. Make room and give the "
              f"same command again: it continues with what is written.", file=sys.stderr)
        return UserError.exit_status


def refuse_low(options: argparse.Namespace, *names: str) -> None:
    """UserError naming the options that are given and not above 0."""
    if low := [f"--{name.replace('_', '-')} must be above 0, not {value}" for name in names
               if (value := getattr(options, name)) is not None and not value > 0]:
        raise UserError("; ".join(low) + ".")


def aligned(rows: Sequence[Sequence[str]], just: Callable[[str, int], str] = str.ljust) -> list[str]:
    """A table for a terminal. just: how all cells but those of the first column are put into their width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([first.ljust(widths[0]), *map(just, others, widths[1:])]).rstrip() for first, *others in rows]


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table of Markdown; the first row is its heading."""
    return [f"| {' | '.join(cells)} |" for cells in (rows[0], ["---"] * len(rows[0]), *rows[1:])]
