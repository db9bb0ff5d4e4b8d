"""Shared by the tests of the configuration."""

import pytest

from tests.config.files import write


@pytest.fixture
def written(tmp_path):
    """Function: write the configuration's file, or one that it names; its path."""
    return lambda content, name="c.yaml": write(tmp_path / name, content)
