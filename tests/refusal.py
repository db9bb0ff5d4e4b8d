"""Calls that end in an error on purpose, and what commands print."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


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
