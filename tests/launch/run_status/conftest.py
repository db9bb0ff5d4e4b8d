"""A run folder made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.run_folders import HandMade


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The run folder runs/demo of the current folder."""
    monkeypatch.chdir(tmp_path)
    return HandMade(Path("runs/demo"))
