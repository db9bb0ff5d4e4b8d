"""A group of one rank, for what trains and saves in this process."""

import pytest


@pytest.fixture
def ranks(monkeypatch):
    from drover.pipeline.parallel.ranks import start_ranks, stop_ranks
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield start_ranks()
    stop_ranks()
