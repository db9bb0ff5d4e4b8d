"""Cyclic garbage is collected after the steps that are said, and by nothing else in between."""

import gc
from types import SimpleNamespace
from unittest.mock import Mock, call

from drover.pipeline.training.hooks import ALL_EVERY, EVERY, Garbage


def test_garbage_goes_after_the_same_steps_on_all_ranks(monkeypatch):
    garbage = Garbage()
    try:
        garbage.on_start(None)
        assert not gc.isenabled() and gc.get_freeze_count() > 0
        monkeypatch.setattr(gc, "collect", collect := Mock())
        for step in range(1, ALL_EVERY + 1):
            garbage.after_step(SimpleNamespace(progress=SimpleNamespace(step=step)))
        assert collect.mock_calls == [*[call(1)] * (ALL_EVERY // EVERY - 1), call()]
    finally:
        garbage.on_end(None)
    assert gc.isenabled() and gc.get_freeze_count() == 0
