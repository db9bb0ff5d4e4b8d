"""Shared by the tests of the configuration."""

import pytest

from tests.config.files import write


@pytest.fixture
def written(tmp_path):
    """Function: write the configuration's file; its path."""
    return lambda content: write(tmp_path / "c.yaml", content)
