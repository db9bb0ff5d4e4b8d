"""Stores of every kind that tests go through."""

import os

import pytest

from pipeline.stores import store as stores
from pipeline.stores.store import Store

BIG = 2 * stores.BLOCK_BYTES + 12_345
"""More than two of the blocks in which objects are read, and than one part of an upload."""


@pytest.fixture(params=["seaweed", "moto_server", "google", "azurite", "file", "memory"])
def store(request, tmp_path):
    if request.param == "file":
        return Store(f"file://{tmp_path}/deep/er")
    if request.param == "memory":
        return Store(f"memory://{tmp_path.name}")
    return Store(request.getfixturevalue(request.param).url_of("some/prefix"))


@pytest.fixture(params=["seaweed", "google", "azurite"])
def checking(request):
    """A bucket at a server that compares signatures."""
    return request.getfixturevalue(request.param)


@pytest.fixture(params=["moto_server", "google", "azurite"])
def failing(request):
    """A bucket at a server that fails on request."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def big():
    return os.urandom(1 << 20) * (BIG >> 20) + os.urandom(BIG & 0xfffff)
