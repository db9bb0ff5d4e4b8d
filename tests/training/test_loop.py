"""The order of what the training loop does: nothing that may fail comes between an update and its checkpoint."""

from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from pipeline import train as stage
from pipeline.errors import UserError
from pipeline.training import session as session_module
from pipeline.training import watchdog


@pytest.mark.parametrize("fails", ["validate", "draw_samples"])
def test_a_measurement_that_fails_comes_after_the_save(monkeypatch, fails):
    session = MagicMock()
    session.of.return_value = session.__enter__.return_value = session
    session.__exit__.return_value = None
    session.steps.return_value = [1]
    getattr(session.monitor, fails).side_effect = MemoryError(fails)
    monkeypatch.setattr(session_module, "Session", lambda *arguments: session)
    monkeypatch.setattr(watchdog, "Watchdog", session)
    monkeypatch.setattr(stage, "is_leader", lambda: False)
    with pytest.raises(MemoryError, match=fails):
        stage.train(None)
    asked = [name for name, *_ in session.mock_calls]
    assert asked.index("update") < asked.index("save") < asked.index(f"monitor.{fails}")


@pytest.mark.parametrize("through", [False, True])
def test_a_step_is_watched_while_it_computes_and_explained_where_memory_does_not_suffice(monkeypatch, capsys, through):
    """A shorter limit from where all ranks have their batch to where the step is judged."""
    session, calls = session_module.Session.__new__(session_module.Session), MagicMock()
    session.watchdog, session.engine, session.guard_runner, session.batch = (
        calls.watchdog, calls.engine, calls.guards, calls.batch)
    session.monitor = SimpleNamespace(norms=lambda step: nullcontext({}))
    session.stop, session.ranks, session.through, session.lr = calls.stop, calls.ranks, through, lambda step: 0.1
    session.as_rehearsed = "--config c.yaml"
    assert session.update(3, MagicMock(), MagicMock()) is calls.engine.step.return_value
    asked = [name for name, *_ in calls.mock_calls]
    assert asked.index("watchdog.step_begins") < asked.index("guards.before") < asked.index("engine.step") \
        < asked.index("watchdog.pulse")
    calls.engine.step.side_effect = torch.OutOfMemoryError("too much")
    calls.engine.held.return_value = []
    with pytest.raises(torch.OutOfMemoryError if through else UserError, match="too much"):
        session.update(4, MagicMock(), MagicMock())
    assert ("did not suffice in step 4 (too much)" in capsys.readouterr().err) == through


def test_a_finished_step_lets_garbage_be_collected_and_profiles_be_written(monkeypatch):
    session, collected = session_module.Session.__new__(session_module.Session), []
    monkeypatch.setattr(session_module.garbage, "collect", collected.append)
    for name in ("saver", "copies", "recorder", "profiling", "watchdog", "config", "phase"):
        setattr(session, name, MagicMock())
    session.progress = MagicMock(step=7)
    session.config.train.steps = 7
    session.end_step()
    assert collected == [7]
    session.profiling.step.assert_called_once_with(7)
    session.watchdog.pulse.assert_called_once_with(first=False)
