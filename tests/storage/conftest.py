"""Stores of every kind that tests go through: one of a kind in `make test`, the others in `make test-all`."""

import os

import pytest

from drover.pipeline.storage import store as stores
from drover.pipeline.storage.store import Store
from tests.conftest import slow

BIG = 2 * stores.BLOCK_BYTES + 12_345
"""More than two of the blocks in which objects are read, and than one part of an upload."""


@pytest.fixture(params=["file", "moto_server", "google", *slow("seaweed", "azurite")])
def store(request, tmp_path):
    if request.param == "file":
        return Store(f"file://{tmp_path}/deep/er")
    return Store(request.getfixturevalue(request.param).url_of("some/prefix"))


@pytest.fixture(params=["google", *slow("seaweed", "azurite")])
def checking(request):
    """A bucket at a server that compares signatures."""
    return request.getfixturevalue(request.param)


@pytest.fixture(params=["moto_server", *slow("google", "azurite")])
def failing(request):
    """A bucket at a server that fails on request."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def big():
    return os.urandom(1 << 20) * (BIG >> 20) + os.urandom(BIG & 0xfffff)
