"""The order of what the training loop does: nothing that may fail comes between an update and its checkpoint."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from drover.pipeline.training.loop import Loop


@pytest.mark.parametrize("fails", ["hook.look", "recorder.tell"])
def test_a_measurement_that_fails_comes_after_the_save(fails):
    loop, calls = Loop.__new__(Loop), MagicMock()
    calls.hook.look.return_value = {"seen": 1}
    calls.configure_mock(**{f"{fails}.side_effect": MemoryError(fails)})
    for name in ("_start", "_agree", "_update", "_advance", "_save"):
        setattr(loop, name, getattr(calls, name))
    calls._agree.return_value = 1, 0
    loop.batches, loop.guards, loop.recorder, loop.hooks = calls.batches, calls.guards, calls.recorder, [calls.hook]
    loop.progress, loop.has_checkpoint, loop.current = SimpleNamespace(step=0, record={}), False, (None, 1)
    loop.config, loop._checkpoint_is_due = SimpleNamespace(train=SimpleNamespace(steps=1)), lambda: True
    with pytest.raises(MemoryError, match=fails):
        loop._train()
    asked = [name for name, *_ in calls.mock_calls]
    assert asked.index("_update") < asked.index("_advance") < asked.index("_save") < asked.index(fails)


def test_a_step_is_watched_while_it_computes(monkeypatch):
    """With a shorter limit from where all ranks have their batch to where the step is judged."""
    loop, calls = Loop.__new__(Loop), MagicMock()
    loop.watchdog, loop.engine, loop.guards, loop.batch = calls.watchdog, calls.engine, calls.guards, calls.batch
    loop.plan, loop.ranks, loop.done, loop.as_rehearsed, loop.progress = None, None, 1, "", SimpleNamespace(step=2)
    monkeypatch.setattr("drover.pipeline.training.loop.planned_rate", lambda step, plan: 0.1)
    assert loop._update(MagicMock(), 7) is calls.engine.step.return_value
    asked = [name for name, *_ in calls.mock_calls]
    assert asked.index("watchdog.step_begins") < asked.index("engine.step") < asked.index("watchdog.pulse")
