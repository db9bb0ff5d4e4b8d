"""The order of what the training loop does: nothing that may fail comes between an update and its checkpoint, and the
host waits for a step only when the device has work of the next one."""

from unittest.mock import MagicMock, PropertyMock

import pytest

from drover.pipeline.training.loop import Loop
from tests.refusal import refused


def loop_of(steps, pauses, **options):
    """A loop with so many steps left, which only notes in which order it was called. pauses: which of them it reads at
    once. Of it `_train`, `_complete` and `_log_step` are real."""
    loop = MagicMock(updated=None, **{"progress.record": {}, "stop.stop": None, "_begin_step.side_effect": [
        MagicMock(number=number) for number in range(1, steps + 1)]}, **options)
    type(loop).unfinished = PropertyMock(side_effect=[True] * steps + [False] * 2)
    loop._pauses_after.side_effect = lambda number: number in pauses
    loop._update.side_effect = lambda step: setattr(loop, "updated", step)
    loop._complete = lambda step: Loop._complete(loop, step)
    loop._log_step = lambda: Loop._log_step(loop)
    loop.hooks = [loop.hook]
    return loop


@pytest.mark.parametrize("fails", ["hook.look", "recorder.write"])
def test_a_measurement_that_fails_comes_after_the_save(fails):
    """In the last step a new measurement or record fails."""
    loop = loop_of(1, pauses={1}, **{"hook.look.return_value": {"seen": 1}, f"{fails}.side_effect": MemoryError(fails)})
    refused(MemoryError, fails, Loop._train, loop)
    calls = [name for name, *_ in loop.mock_calls]
    assert calls.index("_update") < calls.index("_advance") < calls.index("_save") < calls.index(fails)


def test_a_result_is_read_when_the_next_passes_are_queued_or_before_a_pause():
    loop = loop_of(4, pauses={3, 4})
    Loop._train(loop)
    short = {"_begin_step": "begin", "_update": "update", "engine.result": "read"}
    order = " ".join(short[name] for name, *_ in loop.mock_calls if name in short)
    assert order == "begin update begin read update begin read update read begin update read"
