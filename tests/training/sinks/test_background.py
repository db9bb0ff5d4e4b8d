"""A sink at arm's length: what it raises and how long it takes are not training's, and are said once."""

import threading
from unittest.mock import MagicMock, call

import pytest

from drover.pipeline.core.files import read_lines
from drover.pipeline.training.sinks import (
    About,
    JsonLines,
    SinkSettings,
    TrainingLog,
    without_secrets,
)
from tests.waiting import HANG_S


def sink_mock(fails="", gate=None):
    """A sink that keeps what it is told, fails where it is to, and waits at the gate before it opens."""
    sink = MagicMock()
    sink.open.return_value = sink
    if gate is not None:
        sink.open.side_effect = lambda: gate.wait(HANG_S)
    if fails:
        getattr(sink, fails).side_effect = SystemExit("no more of that")  # the worst that a library does
    return sink


class Given(SinkSettings):
    """The settings of a sink that is open already; one for each kind below."""

    def open(self, about):
        return SINKS[self.kind].open()


SINKS = {}


@pytest.fixture
def log(tmp_path):
    """Make a log of these sinks; what it says stands in `log.said`, its events in `log.events()`."""
    def make(**sinks):
        SINKS.update(sinks)
        lines = JsonLines(tmp_path)
        return TrainingLog(lines, About("mine", tmp_path, tmp_path, 0, 0, {}), [Given(kind=name) for name in sinks],
                           make.printed.append)
    make.printed = []
    make.events = lambda: [line for line in read_lines(tmp_path / "events.jsonl") if line["event"] == "sink_failed"]
    make.steps = lambda: [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")]
    yield make
    SINKS.clear()


@pytest.mark.parametrize("fails", ["open", "step", "sample", "event", "close"])
def test_one_that_fails_is_switched_off_and_said_once_and_another_is_told_everything_in_order(log, fails):
    log_ = log(bad=sink_mock(fails), good=(good := sink_mock()))
    for step in range(1, 20):
        log_.write("step", {"step": step})
        log_.write("sample", step, "a", "b")
        log_.write("event", "checkpoint", {"step": step})
    log_.close()
    assert log.printed == ["warning: the logger bad is disabled: SystemExit: no more of that. Training continues; "
                        "metrics.jsonl has everything"]
    assert [(event["sink"], event["error"]) for event in log.events()] == [("bad", "SystemExit: no more of that")]
    told_of = [each for step in range(1, 20) for each in (
        call.step({"step": step}), call.sample(step, "a", "b"), call.event("checkpoint", {"step": step}))]
    assert good.mock_calls == [call.open(), *told_of, call.close()]
    assert log.steps() == list(range(1, 20))


def test_one_that_hangs_stalls_nothing_and_is_left_behind(log, monkeypatch):
    monkeypatch.setattr("drover.pipeline.training.sinks.CLOSE_S", 0.05)
    gate = threading.Event()
    log_ = log(slow=(slow := sink_mock(gate=gate)))
    for step in range(100):
        log_.write("step", {"step": step})
    log_.close()
    assert log.steps() == list(range(100)) and not slow.step.called and len(log.events()) == 1
    assert "it had not taken in everything when training ended" in "".join(log.printed)
    gate.set()


def test_errors_are_told_without_secrets():
    text = without_secrets(
        "401 for s3cretvalue\nat https://user:hunter22@host:5000/api of /home/user, 1 try" + " x" * 1000,
        {"WANDB_API_KEY": "s3cretvalue", "MLFLOW_TRACKING_PASSWORD": "hunter22", "HOME": "/home/user", "A_KEY": "1"})
    assert text.startswith("401 for <WANDB_API_KEY> at https://<...>@host:5000/api of /home/user, 1 try")
    assert len(text) <= 500
