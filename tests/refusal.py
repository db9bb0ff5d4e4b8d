"""Calls that end in an error on purpose, what commands print, and tables of both."""

from itertools import zip_longest

import pytest


def table(text, *columns):
    """Cases of a test, a line each, such as `arguments -> what is said`.

    columns: what makes a value of the text of each column; the text itself is the value of the others.
    """
    return [tuple(make(value) for make, value in zip_longest(columns, line.strip().split(" -> "), fillvalue=str))
            for line in text.splitlines() if line.strip()]


def refused(error, message, call, *given, **named):
    """Assert that a call ends in this error, with a message in which the pattern is found; the message."""
    with pytest.raises(error, match=message) as caught:
        call(*given, **named)
    return str(caught.value)


def printed(capsys, main, *arguments, expect=0):
    """Run a command to this exit status; what it printed, or where it is to fail, complained."""
    assert main([str(argument) for argument in arguments]) == expect
    found = capsys.readouterr()
    return found.err if expect else found.out
