"""Libraries that only some filters need."""

from __future__ import annotations

import importlib
from typing import Any

from pipeline.errors import UserError


def library(module: str, package: str, kind: str) -> Any:
    """The module of a package of the extra `clean`; UserError if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"shard.filters asks for {kind}, but the package {package} is not installed here ({error}): "
                        f"`pip install --editable '.[clean]'` in the checkout installs it. Or take {kind} out of "
                        f"shard.filters.") from None
