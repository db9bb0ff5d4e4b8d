"""What may take long between two steps is no hang: on a clock that the tests turn."""

from collections import defaultdict
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

import pytest
import torch

from drover.model.llama import Llama
from drover.pipeline.config.training import FIRST, TrainConfig
from drover.pipeline.training.checkpoints import AsyncSaver
from drover.pipeline.training.monitor import Samples
from drover.pipeline.training.watchdog import STEP_S, Watchdog
from tests.stages.here import run_here

LIMIT = 600.0


def hangs(dog, seconds):
    """Whether a watchdog finds a hang while so much of a made-up time goes by; it is asked every second."""
    return any(dog.hangs_for(1.0) is not None for _ in range(int(seconds)))


def after(tmp_path, *seconds):
    """A watchdog after such steps, of which each took so long."""
    dog = Watchdog(tmp_path / "hangs", 0, LIMIT)
    for step, took in enumerate(seconds, 1):
        dog.finished(step, took)
        assert not hangs(dog, 1)
    return dog


@pytest.mark.parametrize(("steps", "sign", "limit"), [
    ([1.0] * 3, Watchdog.pulse, LIMIT),
    ([1.0], lambda dog: dog.pulse(first=True), FIRST * LIMIT), ([], Watchdog.pulse, FIRST * LIMIT),  # it may compile
    ([1.0], Watchdog.step_begins, STEP_S), ([], Watchdog.step_begins, FIRST * LIMIT),  # nobody waits for data
    ([30.0] * 3, Watchdog.step_begins, 300.0), ([100.0], Watchdog.pulse, 1000.0)])  # ten slow steps
def test_the_limit_is_what_it_says(tmp_path, steps, sign, limit):
    dog = after(tmp_path, *steps)
    sign(dog)
    assert not hangs(dog, limit - 1) and hangs(dog, 4)


def test_texts_that_could_not_be_drawn_for_want_of_numbers_are_no_end(monkeypatch):
    error = FloatingPointError("the model's scores are NaN")
    monkeypatch.setattr("drover.pipeline.training.monitor.generate", Mock(side_effect=error))
    samples = Samples.__new__(Samples)
    loop = MagicMock(config=SimpleNamespace(train=TrainConfig(sample_every=10)))
    samples.prompts = [("a", [1])]
    loop.progress.step = 10
    assert samples.look(loop) == {}
    loop.say.assert_called_once_with("no sample texts after step 10: the model's scores are NaN")
    loop.engine.free_unsharded.assert_called_once()


def test_a_quick_rank_is_not_taken_to_hang_while_it_waits_for_a_slow_one(tmp_path):
    """Loading, comparing, copying: all ranks are through before any is watched again."""
    dog = after(tmp_path, 1.0)
    waited = []
    with dog.paused(lambda: waited.append(hangs(dog, 4 * LIMIT))):
        waited.append(hangs(dog, 4 * LIMIT))
    assert waited == [False, False] and hangs(dog, 2 * LIMIT)


def test_looking_and_saving_for_longer_than_the_limit_is_no_hang(fresh, monkeypatch):
    """A save, and waiting for it, takes four times as long; a pass that measures or draws nearly as long."""
    dogs, seen = [], defaultdict(set)
    monkeypatch.setattr(Watchdog, "__enter__", lambda dog: dogs.append(dog) or dog)  # no thread watches

    def lasting(owner, name, limits):
        plain = getattr(owner, name)

        def late(*given, **named):
            if name != "forward" or not torch.is_grad_enabled():
                seen[name].add(hangs(dogs[0], limits * LIMIT))
            return plain(*given, **named)
        monkeypatch.setattr(owner, name, late)
    lasting(AsyncSaver, "save", 4)
    lasting(AsyncSaver, "wait", 4)
    lasting(Llama, "forward", 0.9)
    assert run_here("train", fresh) == 0
    assert seen == {name: {False} for name in ("save", "wait", "forward")}
