"""The order of what the training loop does: nothing that may fail comes between an update and its checkpoint."""

from types import SimpleNamespace

import pytest

from pipeline import train as stage
from pipeline.training import session as session_module
from pipeline.training import watchdog


class Recorded:
    """A session of one step that writes down what it is asked for; `fails` raises."""

    def __init__(self, fails):
        self.asked, self.fails, self.unfinished, self.progress = [], fails, True, None
        self.batches = SimpleNamespace(next=lambda: SimpleNamespace(split=lambda size: []))
        self.batch = SimpleNamespace(micro_batch=1, accumulation=1)
        self.engine = SimpleNamespace(step=lambda *arguments: self.noted("update"))
        self.monitor = SimpleNamespace(validate=lambda step: self.noted("validate"), log=lambda *_: self.noted("log"),
                                       draw_samples=lambda step: self.noted("sample"),
                                       watch_fp8=lambda *_: None)

    def noted(self, name):
        self.asked.append(name)
        if name == self.fails:
            raise MemoryError(name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def steps(self):
        return [1]

    def agree(self, batch):
        return SimpleNamespace(targets=1, stop=None)

    def judge(self, *arguments):
        return SimpleNamespace(outcome="applied")

    def checkpoint_is_due(self, step, agreed):
        return True

    def save(self):
        self.noted("save")

    def lr(self, step):
        return 0.1

    def __getattr__(self, name):
        return lambda *arguments: None


@pytest.mark.parametrize("fails", ["validate", "sample"])
def test_a_measurement_that_fails_comes_after_the_save(monkeypatch, fails):
    session = Recorded(fails)
    monkeypatch.setattr(session_module, "Session", lambda *arguments: session)
    monkeypatch.setattr(watchdog.Watchdog, "of", classmethod(lambda *arguments: session))
    monkeypatch.setattr(stage, "is_leader", lambda: False)
    with pytest.raises(MemoryError, match=fails):
        stage.train(None)
    assert session.asked.index("update") < session.asked.index("save") < session.asked.index(fails)
