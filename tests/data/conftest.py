"""For all tests of data."""

import os

import pytest


@pytest.fixture(scope="package", autouse=True)
def without_waiting_for_the_disk():
    """Many small files, and no power cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield
