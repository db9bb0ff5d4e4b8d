"""Tables for a terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def aligned(rows: Sequence[Sequence[str]], just: Callable[[str, int], str] = str.ljust) -> list[str]:
    """A table for a terminal. just: how all cells but those of the first column are put into their width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([first.ljust(widths[0]), *map(just, others, widths[1:])]).rstrip() for first, *others in rows]


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table of Markdown; the first row is its heading."""
    return [f"| {' | '.join(cells)} |" for cells in (rows[0], ["---"] * len(rows[0]), *rows[1:])]
