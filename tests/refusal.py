"""Calls that end in an error on purpose, what commands print, and tables of both."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import pytest


def table(text: str, *columns: Callable[[str], Any]) -> list[tuple[Any, ...]]:
    """Cases of a test, a line each, such as `arguments -> what is said`.

    columns: what makes a value of the text of each column; the text itself is the value of the others.
    """
    return [tuple(make(value) for make, value in zip_longest(columns, line.strip().split(" -> "), fillvalue=str))
            for line in text.splitlines() if line.strip()]


def refused(error: type[BaseException], message: str, call: Callable[..., Any], *given: Any, **named: Any) -> str:
    """Assert that a call ends in this error, with a message in which the pattern is found; the message."""
    with pytest.raises(error, match=message) as caught:
        call(*given, **named)
    return str(caught.value)


def printed(capsys: pytest.CaptureFixture[str], main: Callable[[list[str]], int], *arguments: object,
            expect: int = 0) -> str:
    """Run a command to this exit status; what it printed, or where it is to fail, complained."""
    assert main([str(argument) for argument in arguments]) == expect
    found = capsys.readouterr()
    return found.err if expect else found.out
