"""The order of what the training loop does: nothing that may fail comes between an update and its checkpoint."""

from unittest.mock import MagicMock

import pytest

from drover.pipeline.training.loop import Loop
from tests.refusal import refused


@pytest.mark.parametrize("fails", ["hook.look", "recorder.write"])
def test_a_measurement_that_fails_comes_after_the_save(fails):
    """Of the loop only `_train` and `_log_step` are real: a loop with one step left, whose new measurement or record
    fails. The rest only notes in which order it was called."""
    loop = MagicMock(unfinished=True, **{"_agree.return_value": (1, 0), "progress.record": {},
                                         "hook.look.return_value": {"seen": 1},
                                         f"{fails}.side_effect": MemoryError(fails)})
    loop.hooks = [loop.hook]
    loop._log_step = lambda: Loop._log_step(loop)
    refused(MemoryError, fails, Loop._train, loop)
    calls = [name for name, *_ in loop.mock_calls]
    assert calls.index("_update") < calls.index("_advance") < calls.index("_save") < calls.index(fails)
