"""Shared by the tests of the configuration."""

import pytest
import yaml


@pytest.fixture
def written(tmp_path):
    """Function: write the configuration's file, or one that it names: text, bytes, or anything else as YAML; its
    path."""
    def write(content, name="c.yaml"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not isinstance(content, str | bytes):
            content = yaml.safe_dump(content)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path
    return write
