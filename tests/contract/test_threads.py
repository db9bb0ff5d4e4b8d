"""How much is done at once."""

import os

from drover.pipeline.core.background import usable_cores


def test_the_cores_are_those_of_the_process_or_where_that_is_not_known_the_machines(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5}, raising=False)
    assert usable_cores() == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    assert usable_cores() == 7
