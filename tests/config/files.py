"""Configuration files that the tests write, and what is said where one is refused."""

import pytest
import yaml

from drover.pipeline.config.loading import load_config
from drover.pipeline.core.errors import UserError


def write(path, content):
    """Write a file: text, bytes, or anything else as YAML."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not isinstance(content, str | bytes):
        content = yaml.safe_dump(content)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def refusal(path, *overrides, check=True):
    """The error with which a configuration is refused."""
    with pytest.raises(UserError) as caught:
        load_config(path, overrides, check=check)
    return str(caught.value)
