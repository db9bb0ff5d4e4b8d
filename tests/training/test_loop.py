"""The order of what the training loop does: nothing that may fail comes between an update and its checkpoint."""

from unittest.mock import MagicMock

import pytest

from pipeline import train as stage
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
