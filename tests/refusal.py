"""Calls that end in an error on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def refused(error: type[BaseException], message: str, call: Callable[..., Any], *given: Any, **named: Any) -> str:
    """Assert that a call ends in this error, with a message in which the pattern is found; the message."""
    with pytest.raises(error, match=message) as caught:
        call(*given, **named)
    return str(caught.value)
